"""`Timings`: how long a worker's steps, tokens and switches took since it started.

It outlives epochs. The engine's thread writes `step_s`, the event loop the others; each histogram
has one writer.
"""

from dataclasses import dataclass, field

from equipoise.telemetry.histogram import SHORT_S, Histogram


def _short() -> Histogram:
    return Histogram(SHORT_S)


@dataclass(slots=True, kw_only=True)
class Timings:
    """Histograms in seconds, and what is counted beyond an epoch.

    `num_corrupted` are pulled experts whose checksum was wrong, in epochs that are over.
    """

    step_s: Histogram = field(default_factory=_short)
    itl_s: Histogram = field(default_factory=_short)
    stall_s: Histogram = field(default_factory=_short)
    num_corrupted: int = 0
