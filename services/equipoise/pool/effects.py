"""What a pool wants done, as data: messages to send, records to write, a plan to compute.

`PoolController` decides, `runner.py` does. Effects come in chains, in the order in which they must
happen; a write that fails cuts its chain, so whatever stands behind a write rests on it.
"""

from dataclasses import dataclass

from equipoise.planning.layout import Layout
from equipoise.planning.proposal import ProposalRequest
from equipoise.pool.records import AuditRecord, AverageRecord, DecisionRecord, Hold, Membership
from equipoise.pool.requests import AdminRequest, Outcome
from equipoise.wire.messages import BalancerMessage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Send:
    """A message for a worker, dropped if the worker has no stream now."""

    worker: str
    message: BalancerMessage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteProposed:
    """Remember a layout before anybody is asked to stage it."""

    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCommitted:
    """Make a proposed layout the committed one, in place of `previous` (None: there is none)."""

    generation: int
    previous: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteAdopted:
    """Commit the layout that the ranks start in or report to run."""

    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteMembership:
    """Remember who takes part in an epoch."""

    membership: Membership


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteAverage:
    """Remember a moving average by name."""

    name: str
    record: AverageRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDecision:
    """Append a verdict."""

    record: DecisionRecord


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteAudit:
    """Append an operator's order; whoever gave the `request` then gets the `answer`.

    In the same step set what the pool is held to from now on, unless `hold` is None.
    """

    record: AuditRecord
    hold: Hold | None
    request: AdminRequest
    answer: Outcome


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Propose:
    """Compute a plan and its verdict off the event loop, because an operator `asked` or not."""

    request: ProposalRequest
    asked: AdminRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Write a line to the log, at once: it waits for nothing before it in its chain.

    `rank`, `epoch`, `generation` and `worker` are fields of the line where they apply.
    """

    text: str
    is_warning: bool = False
    rank: int | None = None
    epoch: int | None = None
    generation: int | None = None
    worker: str | None = None


Write = (
    WriteProposed
    | WriteCommitted
    | WriteAdopted
    | WriteMembership
    | WriteAverage
    | WriteDecision
    | WriteAudit
)
Effect = Send | Propose | Log | Write
Chain = tuple[Effect, ...]
