"""`WorkerSettings`: everything a person may choose about one worker. Imports no torch."""

import math
import socket
from dataclasses import dataclass, field
from pathlib import Path

from equipoise.formats.packaged import packaged_checkpoint
from equipoise.telemetry.logs import LogFormat
from equipoise.telemetry.spans_settings import check_endpoint
from equipoise.trust.settings import Tls, or_environment


class InvalidSettingsError(ValueError):
    """A setting outside its range; the message names the setting, the value and the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One worker: who it is, what it serves, and how much of it.

    `listen` port 0 takes a free port; the real one is announced as `advertise_host`:port.
    `max_requests` are generated at a time, as far as the latent cache has room for them, up to
    `max_queued_requests` more wait; a step runs at most `max_step_tokens` tokens, one
    for each generated request first, then chunks of prompts. `step_timeout_s` bounds every
    collective of a step. `batch_invariant` makes tokens bitwise independent of batch and layout.

    Raises:
        InvalidSettingsError: a value is outside its range.
    """

    balancer: str = "127.0.0.1:7070"
    """host:port of the balancer, which tells the rank and the layout; with commas between them,
    those of all balancers, of which one leads."""

    pool: str = "default"
    """Pool to serve in; the balancer knows pools by this name."""

    worker: str = "worker-0"
    """Name of this worker, unique in its pool; after a restart it gets its rank back by it."""

    node: str = ""
    """Fast domain this worker runs on: ranks of one node are near to each other, and plans keep
    expert groups within one. The host unless given."""

    host: str = field(default_factory=socket.gethostname)
    """Machine this worker runs on."""

    zone: str = ""
    """Zone of that machine, for people."""

    node_label: str = ""
    """Label of the Kubernetes Node named by host that has the node, read at the start; for example
    nvidia.com/gpu.clique, whose machines NVLink joins."""

    zone_label: str = ""
    """Label of that Node that has the zone."""

    listen: str = "127.0.0.1:0"
    """host:port that peers and clients are served on; port 0 takes a free one."""

    advertise_host: str = "127.0.0.1"
    """Host by which peers and clients reach this worker."""

    rendezvous_port: int = 0
    """Port at which ranks meet when this one is rank 0; 0 takes a free one."""

    checkpoint: Path = field(default_factory=packaged_checkpoint)
    """Folder of config.json and model.safetensors; the tiny model that comes with the package
    unless given."""

    num_ranks: int = 1
    """Workers that the pool has when it is complete."""

    slots_per_rank: int = 32
    """Physical slots per MoE layer that this worker has memory for."""

    max_requests: int = 16
    """Requests generated at a time, at most."""

    max_queued_requests: int = 64
    """Requests that may wait; more are turned away."""

    context_length: int = 256
    """Tokens of prompt and output together that one request may have."""

    cache_tokens: int = 0
    """Tokens that the latent cache has room for, in whole blocks; 0 is enough for `max_requests`
    of `context_length`. With less, requests that find no room wait, or are paused and go on later;
    what is left over keeps the beginnings of past requests, which the next to begin alike use."""

    max_step_tokens: int = 64
    """Most tokens of a step: one for each generated request first, and the guesses behind it, then
    chunks of prompts."""

    speculate: int = 0
    """Tokens to guess behind each generated one by the checkpoint's multi-token-prediction modules,
    at most as many as there are: what the model finds right in its next step is a token more. The
    tokens are the same without. Every worker holds the modules with all their experts."""

    speculate_up_to: int = 4
    """Requests generated at a time up to which tokens are guessed. With more, a step waits for
    arithmetic and not for memory, so that guesses cost more than they bring. Four is where a CPU
    core gains; hardware with arithmetic to spare gains longer."""

    device: str = "auto"
    """Where the model computes: cpu, cuda, cuda:N, or auto for a CUDA device where there is one. Of
    several without a number the first, or that of LOCAL_RANK."""

    weights: str = "auto"
    """How weights are held: bf16, computed with by torch, or fp8 on the kernel suite, of which
    EQUIPOISE_KERNELS chooses the backends; auto is fp8 where the checkpoint is, on a GPU that the
    kernels are for, without batch_invariant."""

    latents: str = "bf16"
    """How past tokens' latents are kept: bf16 (what the model computes in), or fp8 with a scale for
    each 128 numbers, in little more than half the memory; with weights in FP8 only."""

    block_tokens: int = 0
    """Positions of a block of the latent cache: 16, 32 or 64. Requests that begin alike share whole
    blocks, so small ones serve them best; 0 is 64 where FlashMLA attends, which takes no others,
    and 16 elsewhere."""

    spare_slots: int = 2
    """Places per MoE layer beyond `slots_per_rank` into which experts in FP8 are staged; the switch
    then changes a table. Of more moves at a time, the rest is copied at the switch."""

    batch_invariant: bool = True
    """Make tokens bitwise independent of batch, rank and layout."""

    step_timeout_s: float = 4.0
    """Seconds after which a step that waits for a peer is given up: the peer hangs, and the ranks
    form anew without it."""

    outage_timeout_s: float = 30.0
    """Seconds for which requests wait while the ranks form anew; then they end with an error that
    says why, and others are turned away until the worker serves again."""

    drain_timeout_s: float = 5.0
    """Seconds for which a worker that is asked to stop goes on with the requests it has; those left
    then are handed back with an error."""

    pull_mib_per_s: float = math.inf
    """Most MiB of experts that this worker pulls in a second. A limit makes staging last longer
    and steps meanwhile suffer less; give one where both share a core or a network."""

    metrics_listen: str = ""
    """host:port of an HTTP server that tells metrics at /metrics; none unless given."""

    log_format: LogFormat = LogFormat.TEXT
    """How log lines look: `text` for people, or `json`, an object a line with pool, worker, rank,
    epoch and generation."""

    tracing_endpoint: str = ""
    """http://host:port of an OTLP collector (gRPC, mostly port 4317), which is told how this worker
    stages and switches; none unless given, or OTEL_EXPORTER_OTLP_ENDPOINT is set. Needs
    equipoise[tracing]."""

    tls: Tls = field(default_factory=Tls)
    """Certificates; without them ports are for this machine only."""

    tls_worker_name: str = or_environment("EQUIPOISE_TLS_WORKER_NAME")
    """Name in the certificates of workers, where they are dialled by addresses that are not."""

    tls_balancer_name: str = or_environment("EQUIPOISE_TLS_BALANCER_NAME")
    """Name in the certificates of balancers, where they are dialled by addresses that are not: a
    follower sends on to the leader's address."""

    token_file: str = or_environment("EQUIPOISE_TOKEN_FILE")
    """File with the token that this worker shows to balancers and peers."""

    tokens: str = ""
    """File of the tokens that peers and gateways must show, as the balancer's."""

    def __post_init__(self) -> None:
        for name in ("balancer", "pool", "worker", "host", "listen", "advertise_host"):
            if not getattr(self, name):
                raise InvalidSettingsError(f"{name} must not be empty")
        _check_addresses(self)
        for address in self.balancer.split(","):
            self.tls.check_dial(address)
        self.tls.check_listen(self.listen)
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise InvalidSettingsError(
                    f"{name} must be at least {least}, not {getattr(self, name)}"
                )
        if not 0 <= self.drain_timeout_s <= _HOUR_S:
            raise InvalidSettingsError(
                f"drain_timeout_s must be from 0 to {_HOUR_S}, not {self.drain_timeout_s}"
            )
        for name, most in (
            ("step_timeout_s", _HOUR_S),
            ("outage_timeout_s", _HOUR_S),
            ("pull_mib_per_s", math.inf),
        ):
            if not 0 < getattr(self, name) <= most:
                raise InvalidSettingsError(
                    f"{name} must be above 0 and at most {most}, not {getattr(self, name)}"
                )
        self._check_tokens()
        check_endpoint(self.tracing_endpoint)

    def _check_tokens(self) -> None:
        if 0 < self.cache_tokens < self.context_length:
            raise InvalidSettingsError(
                f"cache_tokens ({self.cache_tokens}) must be at least context_length "
                f"({self.context_length}), because one request may be that long, or 0"
            )
        if self.block_tokens not in _BLOCK_TOKENS:
            raise InvalidSettingsError(
                f"block_tokens must be one of {', '.join(map(str, _BLOCK_TOKENS))}, not "
                f"{self.block_tokens}"
            )
        if self.max_step_tokens < self.max_requests:
            raise InvalidSettingsError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_requests "
                f"({self.max_requests}), because every generated request runs a token per step"
            )
        drafting = min(self.max_requests, self.speculate_up_to)
        if self.max_step_tokens < drafting * (1 + self.speculate):
            raise InvalidSettingsError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least {drafting} (the lesser "
                f"of max_requests and speculate_up_to) times 1 + speculate ({self.speculate}), "
                "because every generated request runs a token and its guesses per step"
            )


_HOUR_S = 3600
_BLOCK_TOKENS = (0, 16, 32, 64)
_LEAST = {
    "num_ranks": 1,
    "slots_per_rank": 1,
    "max_requests": 1,
    "max_step_tokens": 1,
    "max_queued_requests": 0,
    "cache_tokens": 0,
    "speculate": 0,
    "spare_slots": 0,
    "speculate_up_to": 1,
    "context_length": 2,  # a token of a prompt and a generated one
}


def _check_addresses(settings: WorkerSettings) -> None:
    for address in settings.balancer.split(","):
        _check_address("balancer", address)
    for name in ("listen", "metrics_listen"):
        _check_address(name, getattr(settings, name) or settings.listen)
    _check_address("rendezvous", f"{settings.advertise_host}:{settings.rendezvous_port}")


def _check_address(name: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidSettingsError(f"{name} must be host:port, not {address!r}")
