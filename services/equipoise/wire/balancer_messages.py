"""The messages of the balancer to workers; see `messages`."""

from dataclasses import dataclass

from equipoise.planning.layout import Layout
from equipoise.planning.moves import Move

JOIN_TIMEOUT_S = 600.0
"""Time within which a rank must serve unless a JoinEpoch says otherwise, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One rank of an epoch."""

    rank: int
    """The rank."""

    address: str
    """host:port for peers and clients."""

    node: str
    """Domain of fast interconnect that it is in."""

    worker: str
    """Name of the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinEpoch:
    """Makes a worker a rank of an epoch."""

    epoch: int
    """The epoch."""

    rank: int
    """Rank of the receiver."""

    peers: tuple[Peer, ...]
    """All ranks in order, including the receiver."""

    rendezvous_address: str
    """host:port where the ranks meet."""

    layout: Layout
    """Layout to start with."""

    report_interval_s: float
    """Time between load reports, seconds."""

    heartbeat_interval_s: float
    """Time between heartbeats, seconds."""

    term: int = 0
    """Fencing number of the sending balancer."""

    moves: tuple[Move, ...] = ()
    """Where to pull the experts that the receiver lacks: from ranks of this epoch, with the experts
    they held before it. Slots without a move are loaded from the checkpoint."""

    meet_timeout_s: float = 60.0
    """Time within which the ranks must have met, seconds."""

    join_timeout_s: float = JOIN_TIMEOUT_S
    """Time within which the receiver must serve, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Stage the experts of a new layout."""

    epoch: int
    """Epoch of the rollout."""

    layout: Layout
    """The new layout."""

    base_generation: int
    """Generation that the moves start from."""

    moves: tuple[Move, ...]
    """Experts to stage for the receiver's own slots; may be empty."""

    timeout_s: float
    """Time to stage them, seconds."""

    base: Layout | None = None
    """Layout of `base_generation`, if the receiver is known to run it. Only the change from it is
    then sent."""

    term: int = 0
    """Fencing number of the sending balancer."""

    traceparent: str = ""
    """W3C traceparent of the rollout's span; empty without tracing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Drop a staged generation, unless the rank has switched to it."""

    epoch: int
    """Epoch of the rollout."""

    generation: int
    """Generation to drop."""

    reason: str
    """Why, human-readable."""

    term: int = 0
    """Fencing number of the sending balancer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermConfirmed:
    """The balancer renewed its lease after the worker's Hello, so it leads in a lower term."""

    term: int
    """Term of the sending balancer, which the worker obeys from now on."""

    replaced_term: int
    """`Hello.highest_term` of this stream, which no leader has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAck:
    """The balancer received a heartbeat."""

    sequence: int
    """Number of the heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """The balancer rejects a worker or one of its messages."""

    reason: str
    """Why, human-readable."""

    fatal: bool
    """Whether the stream ends; otherwise one message was rejected."""

    not_leading: bool = False
    """Whether the only reason is that this balancer does not lead."""

    leader_address: str | None = None
    """host:port of the leader, if known."""


BalancerMessage = JoinEpoch | Stage | Abort | TermConfirmed | HeartbeatAck | Rejection
