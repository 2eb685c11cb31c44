"""The messages of workers to the balancer, as values of planning's types.

Those in the other direction are in `balancer_messages`. Both sides use these, independent of
protobuf. Values that come out of `wire` have valid shapes and ranges and finite numbers. Whether
they match the pool's state is for the receiver to check.
"""

from dataclasses import dataclass
from enum import StrEnum

from equipoise.planning.arrays import Checksums, ExpertTable
from equipoise.planning.counters import LoadReport
from equipoise.planning.layout import Layout
from equipoise.planning.node_traffic import NodeCounts
from equipoise.planning.phase import Phase
from equipoise.planning.topology import ModelShape

PROTOCOL_VERSION = 3
"""Version of the contract; a Hello with another version is rejected."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunningState:
    """What a reconnecting worker runs. The balancer reconciles its state with it."""

    epoch: int
    """Epoch of the worker's group."""

    rank: int
    """The worker's rank in it."""

    workers: tuple[str, ...]
    """The workers of that epoch, in rank order."""

    staged_generation: int
    """Generation that is verified but not switched to; 0 for none."""

    layout: Layout
    """Layout in use."""

    checksums: Checksums
    """Of the expert in each own slot; uint8 [layers, slots_per_rank, 16], read-only."""

    steps: str = ""
    """As `Serving.steps`."""

    expert_checksums: Checksums | None = None
    """As `Serving.expert_checksums`."""

    @property
    def generation(self) -> int:
        """Generation in use."""
        return self.layout.generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a stream: what the worker is and what it has memory for.

    It determines the shapes of all later messages of the stream, so both sides keep it.
    """

    pool: str
    """Pool to join."""

    worker: str
    """Name of the worker, stable across restarts."""

    boot_id: str
    """Changes with every start of the process."""

    node: str
    """Domain of fast interconnect, used for planning."""

    address: str
    """host:port for peers and clients."""

    rendezvous_address: str
    """host:port where the ranks meet if this worker is rank 0."""

    model: ModelShape
    """Shape of the model."""

    slots_per_rank: int
    """Physical slots per MoE layer; with `num_places`, the most experts of one layer."""

    num_ranks: int
    """Workers that the pool waits for at its first start."""

    checkpoint_fingerprint: str
    """Hex digest of config and checkpoint, the same for all workers of a pool."""

    experts_digest: bytes
    """Digest of the checkpoint's `expert_checksums`, 16 bytes."""

    running: RunningState | None = None
    """What a reconnecting worker runs; None at its first start."""

    highest_term: int = 0
    """Highest term that the worker obeys; 0 for none. A claim, which ends no balancer's term."""

    group_lost: "GroupLost | None" = None
    """Set instead of `running` while the worker waits for a new group."""

    host: str = ""
    """Machine of the worker, for display."""

    zone: str = ""
    """Zone of the machine, for display."""

    device: str = ""
    """Device that the model computes on, for display."""

    kernels: str = ""
    """Kernel backends in use, for display."""

    backends: tuple[str, ...] = ()
    """Backends that the worker supports, as "operation=a|b" per operation. A pool's workers must
    share a backend for each. Empty if unknown."""

    engine: str = ""
    """Name and version of the engine of another project that the rank is part of; empty for our
    worker. Such ranks keep their epoch and rank, serve replicas with even shares only, and read no
    checkpoint."""

    max_replicas: int = 0
    """Most replicas of an expert that the engine has room for; 0 for no limit of its own."""

    weights_version: int = 0
    """Number of the weights that the checksums belong to, growing with every update of an engine's
    weights in place; 0 if they never change."""

    cache_token_bytes: int = 0
    """Bytes of a token in the latent cache, for display; 0 if unknown."""

    highest_epoch: int = 0
    """Newest epoch that this process has taken up, whether or not it serves in it; 0 for none. It
    takes up later epochs only."""

    highest_generation: int = 0
    """Highest generation that this process has started in, run or staged; 0 for none."""

    phase: Phase = Phase.MIXED
    """Phase that the worker serves, the same for all workers of a pool."""

    latent_form: str = ""
    """What a token's latents look like in its cache; workers exchange them only if theirs are
    equal. Empty if unknown."""

    block_tokens: int = 0
    """Positions per block of the latent cache; 0 if unknown."""

    num_places: int = 0
    """Experts that the worker has memory for, over all MoE layers; 0 for one in each slot."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMessage:
    """What a rank reports about a generation."""

    epoch: int
    """Epoch of the rank."""

    rank: int
    """The rank."""

    generation: int
    """The generation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Serving(RankMessage):
    """The worker has loaded its slots of a layout and takes part in steps."""

    checksums: Checksums
    """Of the expert in each own slot; uint8 [layers, slots_per_rank, 16], read-only."""

    steps: str = ""
    """How steps run and rows travel between ranks, for display; may be empty."""

    layout_digest: bytes = b""
    """`Layout.digest` of the layout; empty if not reported."""

    expert_checksums: Checksums | None = None
    """Of all experts' payloads in the checkpoint, uint8 [layers, experts, 16], read-only; sent by
    rank 0 only."""


class Wait(StrEnum):
    """A wait of a worker that has a timeout."""

    STEP = "step"
    """For peers, in a collective of a step."""

    PULL = "pull"
    """For an expert from one source; the next source is tried after it."""

    READ = "read"
    """For an expert from the checkpoint; the worker stops after it."""

    ACK = "ack"
    """For any message from the balancer; the worker reconnects after it."""

    OUTAGE = "outage"
    """Of requests while the ranks re-form; they fail after it."""

    DRAIN = "drain"
    """For requests in flight during a graceful shutdown; the rest fail after it."""

    LATENTS = "latents"
    """For the latents of a prompt from another pool; what is missing after it is prefilled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimeout:
    """The timeout of a wait on a worker, and how often it was reached."""

    name: str
    """A `Wait`, or one of a newer release."""

    timeout_s: float
    """The timeout in seconds."""

    reached: int = 0
    """Times that it was reached."""

    latest: str = ""
    """What happened the last time, human-readable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStats:
    """Statistics of a rank."""

    steps: int
    """Steps in this epoch."""

    tokens_processed: int
    """Tokens run through the model since boot, prompt and generated."""

    tokens_generated: int
    """Tokens generated since boot."""

    median_step_us: int
    """Median duration of the steps since the previous report, microseconds; 0 for no step."""

    active_requests: int
    """Requests being generated now."""

    queued_requests: int
    """Requests waiting now."""

    busy_us: int = 0
    """Time in this epoch's steps without waits for peers, microseconds."""

    timeouts: tuple[WorkerTimeout, ...] = ()
    """Every wait that has a timeout."""

    cache_tokens: int = 0
    """Tokens that the latent cache has room for."""

    cache_tokens_used: int = 0
    """Tokens in the cache that active requests use."""

    prefix_tokens_sought: int = 0
    """Tokens of admitted requests since boot."""

    prefix_tokens_found: int = 0
    """Those of them that were cache hits."""

    requests_preempted: int = 0
    """Times since boot that a request was preempted for lack of cache room."""

    drafts: int = 0
    """Draft tokens verified since boot."""

    drafts_accepted: int = 0
    """Those of them that were accepted."""

    max_requests: int = 0
    """Requests that may be generated at a time; 0 if not reported."""

    pending_prompt_tokens: int = 0
    """Tokens of prompts, active and queued, that have not run yet."""

    pending_prompt_pairs: int = 0
    """Pairs of one of them and an earlier position of its prompt, which attention computes."""

    parity_tokens: int = 0
    """Pairs that take as long as one token does without attention, fitted to this rank's steps; 0
    if not reported."""

    step_us: int = 0
    """Duration of this epoch's steps, waits included, microseconds."""

    nodes: NodeCounts | None = None
    """How this epoch's rows spread over nodes; None on a single node, or if not reported."""

    handed_over_prompts: int = 0
    """Prompts that another pool had prefilled, admitted since boot."""

    handed_over_tokens: int = 0
    """Tokens of their full blocks."""

    missing_tokens: int = 0
    """Those of them whose latents had not arrived, which ran again."""

    held_prompts: int = 0
    """Prompts whose latents were held for other pools since boot."""

    held_tokens: int = 0
    """Tokens of those held now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A load report with the rank's statistics."""

    load: LoadReport
    """Cumulative counters of one generation."""

    stats: RankStats
    """Statistics of the rank."""

    heartbeat: "Heartbeat | None" = None
    """A heartbeat that is due, which saves a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged(RankMessage):
    """All experts that a generation changes on this rank are staged and verified."""

    peer_bytes: int
    """Bytes pulled from peers."""

    checkpoint_bytes: int
    """Bytes read from the checkpoint."""

    duration_us: int
    """Duration of staging, microseconds."""

    layout_digest: bytes = b""
    """`Layout.digest` of the staged layout; empty if not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRejected(RankMessage):
    """The worker did not stage a generation, or did not join an epoch, and changed nothing."""

    reason: str
    """One sentence, human-readable."""

    highest_epoch: int = 0
    """Epoch that the worker has taken up instead of the rejected one; 0 if that is not why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Switched(RankMessage):
    """The rank has switched to a staged generation."""

    step: int
    """First step with it, the same on all ranks."""

    stall_us: int
    """Duration of the switch itself, microseconds."""

    median_step_us: int
    """Median duration of the steps before it, microseconds."""

    checksums: Checksums
    """Of the expert in each own slot; uint8 [layers, slots_per_rank, 16], read-only."""

    layout_digest: bytes = b""
    """`Layout.digest` of the layout in use; empty if not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Shows that the worker is alive."""

    epoch: int
    """Epoch of the worker; 0 before its first."""

    generation: int
    """Generation in use; 0 before the first."""

    staged_generation: int
    """Generation that is verified but not switched to; 0 for none."""

    sequence: int
    """Number of the heartbeat, repeated in the HeartbeatAck."""

    draining: bool = False
    """Whether the worker is shutting down gracefully and accepts no new request."""

    layout_digest: bytes = b""
    """`Layout.digest` of the layout in use; empty if not reported."""

    idle: bool = False
    """Whether the engine takes no forward passes now, so that its ranks cannot switch."""

    weights_version: int = 0
    """Number of the weights in the slots now; as in the Hello, unless they were updated since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The worker is about to stop."""

    reason: str
    """Why, human-readable."""

    failed: bool = False
    """Whether a fault ends its process; otherwise it stops in order, and nobody expects it back."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupLost:
    """The worker's process group has failed; the worker is alive and waits for a new epoch."""

    epoch: int
    """Epoch whose group failed."""

    reason: str
    """Why, human-readable."""

    expert_of_slot: ExpertTable | None
    """Experts in its slots, int32 [layers, slots_per_rank]; None for empty slots."""

    generation: int = 0
    """Highest generation that it started in, ran or staged, which must not be reused; 0 for
    none."""

    unreached: tuple[str, ...] = ()
    """Other workers of the epoch that it could not connect to after the ranks had not formed a
    group; empty if it reached all of them, or had formed the group."""


WorkerMessage = (
    Hello | Serving | Report | Staged | LayoutRejected | Switched | Heartbeat | Leaving | GroupLost
)
