"""`Timings`: how long a worker's steps, tokens and switches took since it started, over all epochs.

The engine's thread writes `step_s` and `prefill_cost`, the event loop the others: each histogram
has one writer.
"""

from dataclasses import dataclass, field
from functools import partial

from equipoise.telemetry.histogram import SHORT_S, Histogram
from equipoise.worker.prefill_cost import PrefillCostFit

_short = partial(Histogram, SHORT_S)


@dataclass(slots=True, kw_only=True)
class Timings:
    """Histograms, and what is counted beyond one epoch."""

    step_s: Histogram = field(default_factory=_short)
    """Duration of a step, seconds."""
    itl_s: Histogram = field(default_factory=_short)
    """Time from one token of a request to its next, seconds."""
    stall_s: Histogram = field(default_factory=_short)
    """Duration of a switch, seconds."""
    prefill_cost: PrefillCostFit = field(default_factory=PrefillCostFit)
    """What prefilling a prompt costs."""
    num_scrubbed: int = 0
    """Held slots that were hashed again and found good, in epochs that have ended."""
    num_corrupted: int = 0
    """Pulled experts that failed their checksum, in epochs that have ended."""
