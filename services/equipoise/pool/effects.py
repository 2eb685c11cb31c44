"""Effects: what a pool wants done, as data. Messages to send, records to write, plans to compute.

`PoolController` decides, `balancer/runner.py` carries out. Effects come in chains, in the order in
which they must happen. A write that fails cuts its chain, so all effects after it depend on it.
"""

from dataclasses import dataclass

from equipoise.planning.layout import Layout
from equipoise.planning.proposal import ProposalRequest
from equipoise.pool.records import AuditRecord, AverageRecord, DecisionRecord, EpochMembers, Hold
from equipoise.pool.requests import AdminRequest, Answer
from equipoise.wire.balancer_messages import BalancerMessage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Send:
    """Send a message to a worker; dropped if the worker has no stream now."""

    worker: str
    message: BalancerMessage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteProposed:
    """Record a layout before any rank is asked to stage it."""

    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCommitted:
    """Make a proposed layout the committed one instead of `previous` (None: there is none)."""

    generation: int
    previous: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteAdopted:
    """Commit the layout that the ranks start in, or report to run."""

    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteMembership:
    """Record the members of an epoch."""

    members: EpochMembers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteAverage:
    """Record a moving average by name."""

    name: str
    record: AverageRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDecision:
    """Append a decision."""

    record: DecisionRecord


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteAudit:
    """Append an audit record; then the caller of `request` gets the `answer`.

    The same write sets what the pool is held to from now on, unless `hold` is None.
    """

    record: AuditRecord
    hold: Hold | None
    hold_before: Hold
    """What the pool was held to when the request came; an earlier request may be recorded since."""
    after: int = 0
    """Number of the latest audit record that is known when it is written."""
    request: AdminRequest
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reply:
    """Give the caller of `request` the `answer`; for a request that is not recorded."""

    request: AdminRequest
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Propose:
    """Compute a plan and its verdict off the event loop.

    `requested_by` is the operator's request that needs it, if one does.
    """

    request: ProposalRequest
    requested_by: AdminRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Write a line to the log, at once, without waiting for effects before it.

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
Effect = Send | Reply | Propose | Log | Write
Chain = tuple[Effect, ...]
