"""How evenly requests are spread over the ranks of a pool, as balancedness. Pure."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from equipoise.gateway.rank_load import RankLoad, RankState


class BurdenKind(StrEnum):
    """Kinds of work that requests bring to a rank."""

    TOKENS = "tokens"
    """Prompt tokens to read that this gateway sent, lately."""

    ATTENTION = "attention"
    """Pairs of one of those and an earlier position."""

    LATENTS = "latents"
    """Tokens in the latent cache, with the expected rest of answers, now."""

    REQUESTS = "requests"
    """Requests, now."""


def request_balancedness(ranks: Sequence[RankLoad], *, now: float) -> Mapping[BurdenKind, float]:
    """Mean / max work over the ranks that take requests, by kind; 1.0 without any."""
    open_ranks = [rank for rank in ranks if rank.state is not RankState.CLOSED]
    return {
        BurdenKind.TOKENS: balancedness([rank.sent_tokens.at(now) for rank in open_ranks]),
        BurdenKind.ATTENTION: balancedness([rank.sent_pairs.at(now) for rank in open_ranks]),
        BurdenKind.LATENTS: balancedness([rank.latents.total for rank in open_ranks]),
        BurdenKind.REQUESTS: balancedness([rank.requests.total for rank in open_ranks]),
    }


def balancedness(burdens: Sequence[float]) -> float:
    """Compute mean / max, as `planning.balance` does of a layer; 1.0 without any work."""
    highest = max(burdens, default=0)
    return sum(burdens) / len(burdens) / highest if highest > 0 else 1.0
