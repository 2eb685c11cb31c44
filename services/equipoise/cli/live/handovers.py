"""Handovers between pools, in words."""

import math

from equipoise.cli.display import format_count
from equipoise_api.v1 import status_pb2


def handovers_text(handovers: status_pb2.HandoverStatus) -> str:
    """How many prompts the ranks have handed over or got, and how much of them; empty if none."""
    parts = []
    if handovers.held_prompts:
        held = f", {handovers.held_tokens:,} tokens held now" if handovers.held_tokens else ""
        parts.append(f"{format_count(handovers.held_prompts, 'prompt')} to other pools{held}")
    if handovers.handed_over_prompts:
        num_tokens = handovers.handed_over_tokens
        arrived = 1 - handovers.missing_tokens / num_tokens if num_tokens else 1.0
        parts.append(
            f"{format_count(handovers.handed_over_prompts, 'prompt')} from other pools, "
            f"{_rounded_down(arrived)} of their latents arrived"
        )
    return "; ".join(parts)


def _rounded_down(share: float) -> str:
    """A share in per cent; 100 % means all."""
    return f"{math.floor(share * 1000) / 10:.4g} %"
