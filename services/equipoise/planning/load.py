"""Loads: what ranks counted, and the moving averages that decisions rest on."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

TokenCounts = npt.NDArray[np.uint64]
Load = npt.NDArray[np.float64]


class Phase(StrEnum):
    """Prefill and decode load experts differently and want different layouts."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadReport:
    """Cumulative counters of one rank.

    `tokens` is uint64 [layers, slots_per_rank]: tokens received per own slot since `generation`
    began on this `boot_id`. They only grow, so a lost, repeated or late report is harmless.
    """

    boot_id: str
    epoch: int
    rank: int
    generation: int
    phase: Phase
    tokens: TokenCounts
