"""`WorkerSettings`: the worker's command-line options. Imports no torch."""

import math
import socket
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from equipoise.formats.packaged import packaged_checkpoint
from equipoise.planning.phase import Phase
from equipoise.settings.address import dial_address, listen_address, parse_address
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import HOUR_S, Range, check_ranges
from equipoise.telemetry.logs import LogFormat
from equipoise.telemetry.metrics_settings import MetricsPort
from equipoise.telemetry.spans_settings import check_endpoint
from equipoise.trust.settings import BALANCER_NAME, WORKER_NAME, Tls, or_environment
from equipoise.worker.hops import Hops

ROW_BLOCK = 16
"""Rows of every matrix product in batch-invariant mode."""

PORT_STEP = 10
"""How much higher the ports of each of several local ranks are than those of the previous one."""


class ReplicaChoice(StrEnum):
    """How a row's replica of an expert is chosen."""

    HASHED = "hashed"
    """By the layout's shares, without regard to what else is in the step."""

    BALANCED = "balanced"
    """By what all ranks route to each expert in the step, so that ranks get even loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One worker: its identity, the model it serves, and its limits.

    Raises:
        InvalidSettingsError: a value is out of range.
        TrustError: the certificates do not allow an address.
    """

    balancer: str = "127.0.0.1:7070"
    """host:port of the balancer, which assigns the rank and the layout. Separate several balancers,
    of which one leads, with commas."""

    pool: str = "default"
    """Name of the pool to join."""

    phase: Phase = Phase.MIXED
    """What the pool serves, the same for all its workers: `prefill` runs prompts, `decode`
    generates, `mixed` does both. The loads of the pool, and so its layouts, are those of its
    phase."""

    worker: str = "worker-0"
    """Name of this worker, unique in its pool. It gives a restarted worker its rank back."""

    node: str = ""
    """Domain of fast interconnect that this worker is in. Plans keep expert groups within a node.
    Default: the host."""

    host: str = field(default_factory=socket.gethostname)
    """Machine that this worker runs on."""

    zone: str = ""
    """Zone of that machine, for display."""

    node_label: str = ""
    """Label of this machine's Kubernetes Node that holds --node, read at startup; for example
    nvidia.com/gpu.clique for machines joined by NVLink."""

    zone_label: str = ""
    """Label of that Kubernetes Node that holds --zone."""

    listen: str = "127.0.0.1:0"
    """host:port for peers and clients. Port 0 picks a free port."""

    advertise_host: str = "127.0.0.1"
    """Host that peers and clients use to reach this worker, with the port of --listen."""

    rendezvous_port: Annotated[int, Range(0, 65535)] = 0
    """Port where the ranks meet when this worker is rank 0. Port 0 picks a free port."""

    checkpoint: Path = field(default_factory=packaged_checkpoint)
    """Folder with config.json and model.safetensors. Default: the packaged tiny model."""

    num_ranks: Annotated[int, Range(1)] = 1
    """Workers in the complete pool."""

    local_ranks: Annotated[int, Range(1, 64)] = 1
    """Ranks that this command runs, each in a process of its own, so that they share a machine's or
    a pod's GPUs. The process of rank i is worker NAME-i with GPU i (LOCAL_RANK) and ports 10 * i
    higher. A process that ends is started again; the port of --probes-listen is ready while all
    are."""

    slots_per_rank: Annotated[int, Range(1)] = 32
    """Physical slots per MoE layer that this worker has memory for; with --places, the most experts
    of one layer that it can hold."""

    places: Annotated[int, Range(0)] = 0
    """Experts that this worker has memory for, over all MoE layers, at most --slots-per-rank for
    each. Layers share the places: those that need more replicas get them from layers that need
    fewer, unless planning.slots is perLayer in the policy. 0 is one in each slot. Workers of a pool
    may have different numbers, if all have some."""

    shared_as_routed: bool = False
    """Place the shared expert of each layer in slots, as if it were one more routed expert: it is
    replicated, moved and balanced with them, and only ranks with a slot for it hold it. Needs a
    model with one shared expert per layer, and all workers of the pool with the same setting; pools
    that exchange latents may differ."""

    max_requests: Annotated[int, Range(1)] = 16
    """Maximum number of requests generated concurrently, if the latent cache has room for them."""

    peer_pools: tuple[str, ...] = ()
    """Pools of the same model whose workers exchange latents with this one: the decode pools of a
    prefill worker, and the reverse. Default: none."""

    hold_s: Annotated[float, Range(0, HOUR_S, is_open=True)] = 30.0
    """Seconds that latents of a prompt are held for a worker of a peer pool to fetch. Must be
    less than the gateways' --first-token-timeout-s: a rank whose cache is full starts no prompt."""

    latent_mib_per_s: Annotated[float, Range(0, is_open=True)] = math.inf
    """Maximum MiB of latents to pull per second."""

    max_queued_requests: Annotated[int, Range(0)] = 64
    """Requests that may wait; more are rejected."""

    context_length: Annotated[int, Range(2)] = 256
    """Maximum number of tokens of prompt and output together in one request."""

    cache_tokens: Annotated[int, Range(0)] = 0
    """Tokens that the latent cache has room for, in whole blocks. 0 makes room for --max-requests
    requests of --context-length tokens. With less, requests wait for room or are
    preempted and resumed. Unused room caches the prefixes of past requests."""

    max_step_tokens: Annotated[int, Range(1)] = 64
    """Maximum number of tokens per step: first one for each generating request and its draft
    tokens, then chunks of prompts."""

    micro_batches: Annotated[int, Range(1, 2)] = 1
    """Micro-batches that this rank cuts steps into: with 2, one computes while the other's rows
    travel between ranks. Tokens are the same. A step is cut if any rank cuts it. Prefill and mixed
    pools keep up to two exchanges open at once, decode pools one."""

    cut_from_tokens: Annotated[int, Range(2)] = 2
    """With --micro-batches 2, least number of this rank's tokens in a step that it cuts."""

    hops: Hops = Hops.AUTO
    """How rows travel to other nodes: `one` sends them to each rank that needs them; `two` sends
    them once to each node, to a rank that forwards them there; `auto` is two if that sends less
    than two thirds of the rows and outputs between nodes, as with --sums-on-nodes. Tokens are the
    same. The majority of ranks decides. FP8 weights have two hops over torch.distributed only."""

    sums_on_nodes: bool = False
    """With two hops, sum a row's outputs on their node before they return: fewer rows between
    nodes, but the last bits of a result then depend on the layout. Needs --no-batch-invariant, the
    same on all workers of a pool."""

    replica_choice: ReplicaChoice = ReplicaChoice.HASHED
    """How replicas are chosen: `hashed` by shares of the layout; `balanced` by what all ranks route
    to each expert in a step, so that their loads are even, for one more exchange in each layer.
    Tokens are the same. The majority of ranks decides. Steps captured as CUDA graphs are hashed."""

    speculate: Annotated[int, Range(0)] = 0
    """Draft tokens per generated token, from the checkpoint's multi-token-prediction modules; at
    most the number of modules. The output is the same with and without. The modules are further
    MoE layers, whose experts are placed and balanced like others; workers with and without them do
    not form a pool."""

    speculate_up_to: Annotated[int, Range(1)] = 4
    """Maximum number of concurrently generated requests with which draft tokens are used. With
    more, steps are bound by compute rather than memory and drafts cost more than they gain. 4 suits
    a CPU core; hardware with spare compute gains at higher values."""

    device: str = "auto"
    """Device of the model: cpu, cuda, cuda:N, or auto for a CUDA device if there is one. cuda
    without a number is the device of LOCAL_RANK, or the first."""

    weights: str = "auto"
    """Form of the weights: bf16, held and multiplied by torch in bfloat16 on a GPU, and in float32
    (twice the memory) on a CPU, where bfloat16 is several times slower; or fp8, computed by the
    kernel suite with the backends of EQUIPOISE_KERNELS. auto is fp8 for an FP8 checkpoint on a GPU,
    which needs --no-batch-invariant, else bf16."""

    latents: str = "bf16"
    """Form of the latent cache: bf16 (what the model computes in), or fp8 with a scale for each
    128 numbers, which needs little more than half the memory and FP8 weights."""

    block_tokens: int = 0
    """Positions per block of the latent cache: 16, 32 or 64. Requests with a common prefix share
    whole blocks, so smaller blocks share more. 0 is 64 where FP8 kernels attend, which are a fifth
    faster with it or need it (FlashMLA), and 16 elsewhere."""

    spare_slots: Annotated[int, Range(0)] = 2
    """Extra slots per MoE layer (with --places, in all), in which FP8 experts are staged. A switch
    to a staged expert then changes a table; moves that exceed them are copied at the switch."""

    max_graph_rows: Annotated[int, Range(0)] = 512
    """Rows of the largest decode step that is captured as a CUDA graph, at most --max-requests. 0
    captures none."""

    device_memory_gib: Annotated[float, Range(0)] = 0.0
    """GiB of the device's memory that this worker may use. 0 is what is free when it starts; it
    exits with the reason if its settings need more."""

    profile_steps: Annotated[int, Range(0, 20)] = 0
    """Steps to profile, once, after the first one: PyTorch's profiler runs for them, or for a
    minute, and writes a trace that `equipoise overlap` reads. 0 profiles none."""

    profile_folder: Path | None = None
    """Folder for the trace, POOL-WORKER.trace.json.gz. Created if necessary; an earlier trace is
    replaced."""

    pace_us_per_row: Annotated[float, Range(0, 1_000_000)] = 0.0
    """For experiments on CPUs: minimum time in microseconds that the experts of a layer take per
    assignment to this rank, which sleeps for the remainder. Ranks that share cores then behave like
    ranks that have a GPU each. 0 turns it off."""

    explain: bool = False
    """Print the memory that these settings need, term by term, and exit: with status 1 if it is
    more than the device has, or than --device-memory-gib. Needs only the checkpoint's config.json,
    and no GPU."""

    json: bool = False
    """Print JSON with --explain."""

    batch_invariant: bool = True
    """Make tokens bitwise independent of batch, rank and layout."""

    step_timeout_s: Annotated[float, Range(0, HOUR_S, is_open=True)] = 4.0
    """Seconds that any collective of a step may wait for a peer. After that the peer counts as hung
    and the ranks re-form without it."""

    outage_timeout_s: Annotated[float, Range(0, HOUR_S, is_open=True)] = 30.0
    """Seconds that requests wait while the ranks re-form. After that they fail with the reason, and
    new requests are rejected until the worker serves again."""

    drain_timeout_s: Annotated[float, Range(0, HOUR_S)] = 5.0
    """Seconds that requests have to finish during a graceful shutdown. The rest fail with an error
    that lets the gateway resume them on another rank."""

    pull_mib_per_s: Annotated[float, Range(0, is_open=True)] = math.inf
    """Maximum MiB of experts to pull per second. A limit slows staging down and disturbs steps
    less; set it where both share a core or a network."""

    scrub_mib_per_s: Annotated[float, Range(0)] = 8.0
    """MiB of held experts to hash again per second, at most ten slots per second, to find bytes
    that changed in memory. 0 turns it off."""

    metrics: MetricsPort = field(default_factory=MetricsPort)
    """The port of the metrics; none by default."""

    probes_listen: str = ""
    """host:port of an HTTP server for the probes /livez and /readyz, where gRPC probes cannot
    present a certificate. Disabled by default."""

    log_format: LogFormat = LogFormat.TEXT
    """Log format: human-readable `text`, or `json`, one object per line with pool, worker, rank,
    epoch and generation."""

    tracing_endpoint: str = ""
    """http://host:port of an OTLP collector (gRPC, usually port 4317) that receives spans of
    staging and switching. OTEL_EXPORTER_OTLP_ENDPOINT is the default; without either, tracing is
    disabled. Needs equipoise[tracing]."""

    tls: Tls = field(default_factory=Tls)
    """Certificates. Without them ports must be on loopback."""

    tls_worker_name: str = or_environment("EQUIPOISE_TLS_WORKER_NAME", default=WORKER_NAME)
    """DNS name in every worker's certificate and in no other; verified instead of the address."""

    tls_balancer_name: str = or_environment("EQUIPOISE_TLS_BALANCER_NAME", default=BALANCER_NAME)
    """DNS name in every balancer's certificate and in no other; verified instead of the
    address."""

    signing_key: str = or_environment("EQUIPOISE_SIGNING_KEY")
    """PEM file with the Ed25519 key that signs a token for each call to a balancer or peer.
    Reloaded when it changes."""

    accepted_keys: str = ""
    """File of the public keys of peers and gateways, in the balancer's format. Calls then need a
    token that is signed for this worker."""

    def __post_init__(self) -> None:
        for name in ("pool", "worker", "host", "advertise_host"):
            if not getattr(self, name):
                raise InvalidSettingsError(f"{name} must not be empty")
        balancers = self.balancer.split(",")
        for address in balancers:
            dial_address("balancer", address)
        for address in balancers:
            self.tls.check_dial(address)
        listen_address("listen", self.listen)
        self.tls.check_listen(self.listen)
        self.metrics.check(has_certificate=self.tls.serves_tls)
        if self.probes_listen:
            listen_address("probes_listen", self.probes_listen)
        listen_address("advertise_host with a port", f"{self.advertise_host}:0")
        check_ranges(self)
        if self.local_ranks > 1:
            self._check_local_ranks()
        self._check_tokens()
        if self.pool in self.peer_pools:
            raise InvalidSettingsError(
                f"peer_pools lists this worker's own pool {self.pool}: name other pools"
            )
        if self.sums_on_nodes and self.batch_invariant:
            raise InvalidSettingsError(
                "sums_on_nodes needs no_batch_invariant: it makes results depend on the layout"
            )
        if self.profile_steps and self.profile_folder is None:
            raise InvalidSettingsError("profile_steps needs profile_folder, where the trace goes")
        check_endpoint(self.tracing_endpoint)

    @property
    def row_block(self) -> int | None:
        """Rows of every matrix product; None outside of batch-invariant mode."""
        return ROW_BLOCK if self.batch_invariant else None

    @property
    def graph_rows(self) -> int:
        """Rows of the largest captured decode step: one for each request and its draft tokens."""
        drafting = min(self.max_requests, self.speculate_up_to) * (1 + self.speculate)
        return min(self.max_graph_rows, max(self.max_requests, drafting))

    def _check_local_ranks(self) -> None:
        """Check that the processes have a GPU each, and ports that differ."""
        if self.device.startswith("cuda:"):
            raise InvalidSettingsError(
                f"device {self.device} is one GPU: set it to cuda, so that each of the "
                f"{self.local_ranks} local_ranks has its own"
            )
        first = {"listen": parse_address(self.listen).port, "rendezvous_port": self.rendezvous_port}
        if self.metrics.metrics_listen:
            first["metrics_listen"] = parse_address(self.metrics.metrics_listen).port
        if self.probes_listen:
            first["probes_listen"] = parse_address(self.probes_listen).port
            if not first["probes_listen"]:
                raise InvalidSettingsError(
                    "probes_listen needs a port other than 0 with local_ranks"
                )
        taken: dict[int, str] = {}
        for name, port in first.items():
            # The process that starts the others answers probes, too.
            last = port + PORT_STEP * (self.local_ranks - (name != "probes_listen"))
            if last > 65535:
                raise InvalidSettingsError(
                    f"{name} of the last rank is port {last}, because each rank's is {PORT_STEP} "
                    "higher: choose a lower port"
                )
            for one in range(port, last + 1, PORT_STEP) if port else ():
                if one in taken:
                    raise InvalidSettingsError(
                        f"port {one} is both {taken[one]}'s and {name}'s, because each rank's "
                        f"ports are {PORT_STEP} higher: choose ports with different last digits"
                    )
                taken[one] = name

    def _check_tokens(self) -> None:
        if 0 < self.cache_tokens < self.context_length:
            raise InvalidSettingsError(
                f"cache_tokens ({self.cache_tokens}) must be at least context_length "
                f"({self.context_length}), the length of one request, or 0"
            )
        if self.block_tokens not in _BLOCK_TOKENS:
            raise InvalidSettingsError(
                f"block_tokens must be one of {', '.join(map(str, _BLOCK_TOKENS))}, not "
                f"{self.block_tokens}"
            )
        if self.max_step_tokens < self.max_requests:
            raise InvalidSettingsError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_requests "
                f"({self.max_requests}), because each generating request needs one token per step"
            )
        drafting = min(self.max_requests, self.speculate_up_to)
        if self.max_step_tokens < drafting * (1 + self.speculate):
            raise InvalidSettingsError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least {drafting} (the lesser "
                f"of max_requests and speculate_up_to) times 1 + speculate ({self.speculate}), "
                "because each generating request needs one token and its draft tokens per step"
            )


_BLOCK_TOKENS = (0, 16, 32, 64)
