"""`GatewaySettings`: the gateway's command-line options. Starts nothing."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from equipoise.formats.packaged import packaged_checkpoint
from equipoise.gateway.reasoning import ReasoningParser
from equipoise.gateway.tool_formats import ToolCallParser
from equipoise.settings.address import dial_address, listen_address
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import HOUR_S, Range, check_ranges
from equipoise.telemetry.logs import LogFormat
from equipoise.telemetry.metrics_settings import MetricsPort
from equipoise.trust.settings import BALANCER_NAME, WORKER_NAME, Tls, or_environment

_Seconds = Annotated[float, Range(0.001, HOUR_S)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """One gateway: its clients, its ranks, and the timeout of every wait.

    Raises:
        InvalidSettingsError: a value is out of range.
        TrustError: the certificates do not allow an address.
    """

    listen: str = "127.0.0.1:8080"
    """host:port of the HTTP server. Port 0 picks a free port, shown in the first log line."""

    balancer: tuple[str, ...] = ("127.0.0.1:7070",)
    """host:port of the balancers that list the ranks, tried in order. While no balancer answers,
    the gateway keeps using the ranks it last saw."""

    pool: str = "default"
    """Pool to serve from."""

    prefill_pool: str = ""
    """Pool that prefills prompts for --pool, which then generates: workers with --phase prefill
    that list --pool in --peer-pools, and are listed by its workers. Default: --pool does both."""

    workers: tuple[str, ...] = ()
    """host:port of the ranks, to serve without a balancer."""

    checkpoint: Path = field(default_factory=packaged_checkpoint)
    """Folder with the model's config.json and tokenizer. Default: the packaged tiny model."""

    model: str = ""
    """Model name for clients. Default: the name of the checkpoint folder."""

    reasoning_parser: ReasoningParser = ReasoningParser.NONE
    """How chat answers are split into reasoning_content and content: deepseek_r1 at </think>."""

    tool_call_parser: ToolCallParser = ToolCallParser.NONE
    """How the model writes tool calls: deepseek_v3 for V3 and R1, deepseek_v31 for V3.1,
    deepseek_v32 for V3.2, or hermes for JSON in <tool_call> tags. Without it, a model calls tools
    only when `tool_choice` forces it."""

    api_keys: Path | None = None
    """File of accepted API keys, one per line; reloaded when it changes. Default: no
    authentication."""

    max_body_bytes: Annotated[int, Range(1, 2**30)] = 2**20
    """Maximum size of a request body."""

    max_prompt_tokens: Annotated[int, Range(1, 2**20)] = 8192
    """Maximum length of a prompt. Workers may have a lower limit and then reject the request."""

    max_tokens: Annotated[int, Range(1, 2**20)] = 8192
    """Maximum number of tokens that a request may generate."""

    context_length: Annotated[int, Range(0, 2**20)] = 0
    """Tokens of prompt and output together. A chat request without a token limit may use what
    remains after the prompt. Default: 0, the shortest context of the ranks."""

    max_open_requests: Annotated[int, Range(1, 2**20)] = 1024
    """Requests in flight at a time; more are answered with 429."""

    max_queued_requests: Annotated[int, Range(0, 2**20)] = 256
    """Requests that may wait for a rank; more are answered with 503."""

    queue_timeout_s: _Seconds = 30.0
    """Seconds that a request may wait for a rank before it is answered with 503."""

    max_attempts: Annotated[int, Range(1, 1000)] = 4
    """Ranks that may fail during a request before the request fails."""

    accept_timeout_s: _Seconds = 5.0
    """Seconds within which a rank must queue a request."""

    first_token_timeout_s: _Seconds = 60.0
    """Seconds from then to the first token. Restarts whenever the rank reports that it runs other
    requests first."""

    rank_queue_timeout_s: _Seconds = 300.0
    """Seconds that a request may wait in a rank's queue before it is answered with 503."""

    silence_timeout_s: _Seconds = 15.0
    """Seconds between two tokens after which a rank counts as failed. Keep it above the workers'
    --step-timeout-s, so that a worker can report the reason first."""

    client_timeout_s: _Seconds = 30.0
    """Seconds that a client may take to send a request's header, to send its body, and to read
    each part of the response."""

    idle_timeout_s: Annotated[float, Range(1, HOUR_S)] = 60.0
    """Seconds that a client connection may stay idle between two requests."""

    drain_timeout_s: Annotated[float, Range(0, HOUR_S)] = 10.0
    """Seconds that open requests have to finish after Ctrl-C or SIGTERM."""

    metrics: MetricsPort = field(default_factory=MetricsPort)
    """The port of the metrics; separate from the client port; none by default."""

    log_format: LogFormat = LogFormat.TEXT
    """Log format: human-readable `text`, or `json`, one object per line."""

    tls: Tls = field(default_factory=Tls)
    """Certificates for connections to balancers and ranks. The HTTP port does not use them."""

    tls_worker_name: str = or_environment("EQUIPOISE_TLS_WORKER_NAME", default=WORKER_NAME)
    """DNS name in every worker's certificate and in no other; verified instead of the address."""

    tls_balancer_name: str = or_environment("EQUIPOISE_TLS_BALANCER_NAME", default=BALANCER_NAME)
    """DNS name in every balancer's certificate and in no other; verified instead of the
    address."""

    signing_key: str = or_environment("EQUIPOISE_SIGNING_KEY")
    """PEM file with the Ed25519 key that signs a token for each call. Reloaded when it changes.
    Needs a balancer, which names the workers that tokens are for."""

    def __post_init__(self) -> None:
        listen_address("listen", self.listen)
        self.metrics.check(has_certificate=self.tls.serves_tls)
        for name in ("balancer", "workers"):
            addresses = getattr(self, name)
            for address in addresses:
                dial_address(name, address)
            if len(set(addresses)) < len(addresses):
                raise InvalidSettingsError(f"{name} lists an address twice")
        for address in self.workers or self.balancer:
            self.tls.check_dial(address)
        if not self.workers and not self.balancer:
            raise InvalidSettingsError("either balancer or workers must be set")
        if self.workers and self.signing_key:
            raise InvalidSettingsError(
                "signing_key needs the names of workers: set balancer instead of workers, or use "
                "certificates instead of tokens"
            )
        if self.prefill_pool and self.workers:
            raise InvalidSettingsError(
                "prefill_pool needs a balancer, which lists its ranks: remove workers"
            )
        if self.prefill_pool and self.prefill_pool == self.pool:
            raise InvalidSettingsError(f"prefill_pool must be another pool than pool {self.pool}")
        check_ranges(self)

    @property
    def model_name(self) -> str:
        """Name of the one model that is served."""
        return self.model or self.checkpoint.resolve().name
