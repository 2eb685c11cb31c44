"""What happened in a run, as seen from outside. Data only."""

from dataclasses import dataclass, field
from typing import NamedTuple


class StepSeen(NamedTuple):
    """A step in which a rank made a token, as its answer to a request says."""

    epoch: int
    step: int
    generation: int
    worker: str
    pool: str = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a client got for one request, and what it should have got.

    `rejection` is set if it was rejected with a reason before its first token; `breakage` if it was
    accepted and did not come to its end.
    """

    prompt: str
    tokens: tuple[int, ...]
    expected: tuple[int, ...]
    longest_wait_s: float
    """Longest time without a token, from the request to the end of the answer."""
    rejection: str = ""
    breakage: str = ""


@dataclass(slots=True, kw_only=True)
class History:
    """The whole of a run; times are seconds of one monotonic clock."""

    answers: list[Answer] = field(default_factory=list)
    steps: list[StepSeen] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    layouts: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    """Hashes of the layouts that were seen under each committed generation of a pool."""
    waits: dict[str, float] = field(default_factory=dict)
    """How long each condition took to hold again after the faults, seconds."""
    overdue: list[str] = field(default_factory=list)
    """Waits that reached their bound, with what was there instead."""
    unverified: list[str] = field(default_factory=list)
    """Experts without a correct copy on any rank, as messages."""
    died: list[str] = field(default_factory=list)
    """Processes that exited unexpectedly, with their last log lines."""
