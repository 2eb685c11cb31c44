"""`GatewaySettings`: everything a person may choose about a gateway. Starts nothing."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from equipoise.formats.packaged import packaged_checkpoint
from equipoise.gateway.errors import InvalidSettingsError
from equipoise.telemetry.logs import LogFormat
from equipoise.trust.settings import Tls, or_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """One gateway: whom it serves, by which ranks, and the bound of every wait.

    Raises:
        InvalidSettingsError: a value is outside its range.
    """

    listen: str = "127.0.0.1:8080"
    """host:port of the HTTP server; port 0 takes a free one, which the first log line names."""

    balancer: tuple[str, ...] = ("127.0.0.1:7070",)
    """host:port of the balancers, which know the ranks; they are asked in turn. When all are away,
    the ranks known last serve on."""

    pool: str = "default"
    """Pool whose ranks serve."""

    workers: tuple[str, ...] = ()
    """host:port of the ranks, where no balancer is to be asked."""

    checkpoint: Path = field(default_factory=packaged_checkpoint)
    """Folder of the model's config.json, which says what tokens there are; the tiny model that
    comes with the package unless given."""

    model: str = ""
    """Name by which clients ask for the model; the checkpoint folder's name unless given."""

    api_keys: Path | None = None
    """File of the API keys that clients may have, one a line; it is read again when it changes.
    Unless given, everybody who reaches this gateway is served."""

    max_body_bytes: int = 2**20
    """Longest body of a request."""

    max_prompt_tokens: int = 8192
    """Longest prompt; workers may allow less, and then say so."""

    max_tokens: int = 8192
    """Most tokens that one request may ask for."""

    context_length: int = 256
    """Tokens of prompt and output together, as the workers have it: a chat that does not say how
    long its answer may be gets what the prompt leaves of them."""

    max_open_requests: int = 1024
    """Requests that are answered at a time; more hear 429."""

    max_queued_requests: int = 256
    """Requests that may wait for a rank; more are turned away."""

    queue_timeout_s: float = 30.0
    """Seconds that a request waits for a rank to take it before its client hears 503."""

    max_attempts: int = 4
    """Ranks that may break under one request before it is given up."""

    accept_timeout_s: float = 5.0
    """Seconds within which a rank must take a request into its line."""

    first_token_timeout_s: float = 60.0
    """Seconds from there to its first token, its wait in the rank's line included."""

    silence_timeout_s: float = 15.0
    """Seconds from one token to the next, after which a rank has broken. Above the workers'
    step_timeout_s, so that they can say first what is wrong."""

    client_timeout_s: float = 30.0
    """Seconds that a client may take for a request's header, for its body, and to read what is
    sent to it."""

    idle_timeout_s: float = 60.0
    """Seconds that a client may keep a connection open between two requests."""

    stop_grace_s: float = 10.0
    """Seconds that open requests have to end after Ctrl-C or SIGTERM."""

    metrics_listen: str = ""
    """host:port of an HTTP server that tells metrics at /metrics, apart from clients; none unless
    given."""

    log_format: LogFormat = LogFormat.TEXT
    """How log lines look: `text` for people, or `json`, an object a line."""

    tls: Tls = field(default_factory=Tls)
    """Certificates to dial balancers and ranks with; the HTTP port is not encrypted by them."""

    tls_worker_name: str = or_environment("EQUIPOISE_TLS_WORKER_NAME")
    """Name in the certificates of workers, where they are dialled by addresses that are not."""

    tls_balancer_name: str = or_environment("EQUIPOISE_TLS_BALANCER_NAME")
    """Name in the certificates of balancers, where they are dialled by addresses that are not."""

    token_file: str = or_environment("EQUIPOISE_TOKEN_FILE")
    """File with the token that this gateway shows to balancers and ranks."""

    def __post_init__(self) -> None:
        _check_address("listen", self.listen, least_port=0)
        _check_address("metrics_listen", self.metrics_listen or self.listen, least_port=0)
        for name in ("balancer", "workers"):
            _check_addresses(name, getattr(self, name))
        for address in self.workers or self.balancer:
            self.tls.check_dial(address)
        if not self.workers and not self.balancer:
            raise InvalidSettingsError("either balancer or workers must be given")
        for name, least, most in _RANGES:
            value = getattr(self, name)
            if not (math.isfinite(value) and least <= value <= most):
                raise InvalidSettingsError(f"{name} must be from {least} to {most}, not {value}")

    @property
    def model_name(self) -> str:
        """Name of the one model that is served."""
        return self.model or self.checkpoint.resolve().name


_LEAST_WAIT_S, _LONGEST_WAIT_S = 0.001, 3600

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_body_bytes", 1, 2**30),
    ("max_prompt_tokens", 1, 2**20),
    ("max_tokens", 1, 2**20),
    ("context_length", 2, 2**20),
    ("max_open_requests", 1, 2**20),
    ("max_queued_requests", 0, 2**20),
    ("max_attempts", 1, 1000),
    ("queue_timeout_s", _LEAST_WAIT_S, _LONGEST_WAIT_S),
    ("accept_timeout_s", _LEAST_WAIT_S, _LONGEST_WAIT_S),
    ("first_token_timeout_s", _LEAST_WAIT_S, _LONGEST_WAIT_S),
    ("silence_timeout_s", _LEAST_WAIT_S, _LONGEST_WAIT_S),
    ("client_timeout_s", _LEAST_WAIT_S, _LONGEST_WAIT_S),
    ("idle_timeout_s", 1, _LONGEST_WAIT_S),
    ("stop_grace_s", 0, _LONGEST_WAIT_S),
)


def _check_addresses(name: str, addresses: tuple[str, ...]) -> None:
    for address in addresses:
        _check_address(name, address, least_port=1)
    if len(set(addresses)) < len(addresses):
        raise InvalidSettingsError(f"{name} names an address twice")


def _check_address(name: str, address: str, *, least_port: int) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not least_port <= int(port) < 65536:
        raise InvalidSettingsError(f"{name} must be host:port, not {address!r}")
