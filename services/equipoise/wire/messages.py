"""What workers and the balancer say to each other, as values of planning's types.

These are what both sides program against; nothing here knows protobuf. A value that came through
`wire` is right in itself (shapes, ranges, finite numbers); whether it fits the pool's state is
the receiver's question.
"""

from dataclasses import dataclass
from enum import StrEnum

from equipoise.planning.arrays import Checksums, ExpertTable
from equipoise.planning.counters import LoadReport
from equipoise.planning.layout import Layout
from equipoise.planning.moves import Move
from equipoise.planning.topology import ModelShape

PROTOCOL_VERSION = 2
"""Version of the contract that this code speaks; `wire` writes it and refuses any other."""

"""BLAKE2b-128 of the expert in each own slot, uint8 [layers, slots_per_rank, 16]."""


# From a worker ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunningState:
    """What a reconnecting worker runs: the truth that the balancer reconciles with.

    `staged_generation` is verified but not switched to; 0 if there is none. `layout` is the one
    in use. `checksums` is uint8 [layers, slots_per_rank, 16], read-only. `steps` is Serving's.
    """

    epoch: int
    rank: int
    staged_generation: int
    layout: Layout
    checksums: Checksums
    steps: str = ""

    @property
    def generation(self) -> int:
        """Generation in use."""
        return self.layout.generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a stream: who the worker is and what it has memory for.

    It also fixes the shapes of everything else on the stream, so both sides keep it. `node` is the
    fast domain that plans go by; the machine `host`, its `zone`, and the `device` and `kernels` it
    computes with are for people. `backends` are all that it could compute with, "operation=a|b"
    an operation, of which a pool's workers must share one each; empty if it did not tell.
    `cache_token_bytes` is what a token takes in its latent cache, for people; 0 if it did not tell.
    `highest_term` is that of any balancer the worker heard of; 0 if there was none. `group_lost`
    is set, in place of `running`, while the worker waits for a new group.
    """

    pool: str
    worker: str
    boot_id: str
    node: str
    address: str
    rendezvous_address: str
    model: ModelShape
    slots_per_rank: int
    num_ranks: int
    checkpoint_fingerprint: str
    running: RunningState | None = None
    highest_term: int = 0
    group_lost: "GroupLost | None" = None
    host: str = ""
    zone: str = ""
    device: str = ""
    kernels: str = ""
    backends: tuple[str, ...] = ()
    cache_token_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Serving:
    """The worker holds its part of a layout and takes part in steps.

    `steps` says how these run and how rows travel between ranks, for people; it may be empty.
    """

    epoch: int
    rank: int
    generation: int
    checksums: Checksums
    steps: str = ""


class Wait(StrEnum):
    """A wait of a worker that has a bound."""

    STEP = "step"
    """A collective of a step: for peers."""

    PULL = "pull"
    """An expert from one source; the next source follows."""

    ACK = "ack"
    """Any word of the balancer; another connection follows."""

    OUTAGE = "outage"
    """Requests here while the ranks form anew; then they end with an error."""

    DRAIN = "drain"
    """Requests here when the worker is asked to stop; those left are handed back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBound:
    """A wait on a worker: at most `bound_s` seconds, reached so often, the last time in words.

    `name` is a `Wait`, or one that only a newer release knows.
    """

    name: str
    bound_s: float
    reached: int = 0
    latest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStats:
    """What a rank did since boot, and does now. `median_step_us` is 0 if it made no step.

    `steps` and `busy_us`, the time in them without waits for peers, are of the epoch. The latent
    cache has room for `cache_tokens`; active requests hold `cache_tokens_used` of them.
    """

    steps: int
    tokens_processed: int
    tokens_generated: int
    median_step_us: int
    active_requests: int
    queued_requests: int
    busy_us: int = 0
    bounds: tuple[WorkerBound, ...] = ()
    cache_tokens: int = 0
    cache_tokens_used: int = 0
    prefix_tokens_sought: int = 0
    prefix_tokens_found: int = 0
    requests_paused: int = 0
    drafts: int = 0
    drafts_accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Cumulative counters of one generation, with the rank's statistics.

    A `heartbeat` that is due goes along.
    """

    load: LoadReport
    stats: RankStats
    heartbeat: "Heartbeat | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Every slot that a generation changes on this rank holds verified bytes."""

    epoch: int
    rank: int
    generation: int
    peer_bytes: int
    checkpoint_bytes: int
    duration_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The worker keeps what it has; `reason` is one sentence."""

    epoch: int
    rank: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Switched:
    """The rank uses `generation` from `step` on, which is the same step on all ranks.

    `stall_us` is the time of the switch itself, `median_step_us` that of the steps before it.
    """

    epoch: int
    rank: int
    generation: int
    step: int
    stall_us: int
    median_step_us: int
    checksums: Checksums


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Proof of life. `epoch` and `generation` are 0 before the worker has one.

    `draining`: it was asked to stop, and takes no new request.
    """

    epoch: int
    generation: int
    staged_generation: int
    sequence: int
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The worker is about to stop by its own will."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupLost:
    """The group of an epoch is over for this worker, which lives on and waits for another.

    `expert_of_slot` is int32 [layers, slots_per_rank]: what its slots hold; None for nothing.
    `generation` is the highest that it ran or staged, 0 for none: its number is used up.
    """

    epoch: int
    reason: str
    expert_of_slot: ExpertTable | None
    generation: int = 0


WorkerMessage = (
    Hello | Serving | Report | Staged | Refused | Switched | Heartbeat | Leaving | GroupLost
)


# From the balancer --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One rank of an epoch: where it is reached and what people call it."""

    rank: int
    address: str
    node: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinEpoch:
    """Makes a worker a rank of an epoch. `peers` are all ranks in rank order, it included.

    `moves` say where to pull what its slots lack of `layout`; sources are ranks of this epoch with
    what they held before it. Slots without one come from the checkpoint. The ranks must have met
    within `meet_timeout_s`. `term`, here and below, is the fencing number of the balancer that
    speaks.
    """

    epoch: int
    rank: int
    peers: tuple[Peer, ...]
    rendezvous_address: str
    layout: Layout
    report_interval_s: float
    heartbeat_interval_s: float
    term: int = 0
    moves: tuple[Move, ...] = ()
    meet_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Fill staging memory for `layout`. `moves` fill the receiver's slots only; may be empty.

    `traceparent` is W3C's name of the rollout's span, below which the worker's belong; empty where
    nobody traces.

    `base` is the layout of `base_generation`, if it is known that the receiver runs it: then only
    what changes is sent.
    """

    epoch: int
    layout: Layout
    base_generation: int
    moves: tuple[Move, ...]
    timeout_s: float
    base: Layout | None = None
    term: int = 0
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Drop a staged generation, unless it was switched to already."""

    epoch: int
    generation: int
    reason: str
    term: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAck:
    """The balancer heard the heartbeat with this sequence number."""

    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Closes the door on a worker (`fatal`, the stream ends) or on one message.

    `not_leading`: nothing is wrong, but this balancer does not lead; the one at `leader_address`
    does, if that is known.
    """

    reason: str
    fatal: bool
    not_leading: bool = False
    leader_address: str | None = None


BalancerMessage = JoinEpoch | Stage | Abort | HeartbeatAck | Rejection
