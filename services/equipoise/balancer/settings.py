"""`BalancerSettings`: the balancer's command-line options. Starts nothing."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from equipoise.balancer.leadership.lease import MAX_LEASE_S
from equipoise.planning.policy import Policy
from equipoise.settings.address import dial_address, listen_address
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import HOUR_S, Range, check_ranges
from equipoise.telemetry.logs import LogFormat
from equipoise.telemetry.metrics_settings import MetricsPort
from equipoise.telemetry.spans_settings import check_endpoint
from equipoise.trust.settings import Tls, or_environment

_ANY_HOST = {"0.0.0.0", "[::]", "::"}


class LogLevel(StrEnum):
    """Minimum severity of messages to log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LeaseKind(StrEnum):
    """Where the leader election takes place."""

    STORE = "store"
    """In the shared Redis store, beside the state."""

    KUBERNETES = "kubernetes"
    """In a Lease object in the pod's namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerSettings:
    """One balancer: where it listens, where it keeps its state, and how it decides.

    Raises:
        InvalidSettingsError: a value is out of range.
        TrustError: the certificates do not allow an address.
    """

    listen: str = "127.0.0.1:7070"
    """host:port of the gRPC server. Port 0 picks a free port, shown in the first log line. An
    address that other machines can reach requires --tls-cert and --tls-key, or --insecure."""

    store: str = "equipoise-state.sqlite"
    """Where to keep committed layouts, averages and decisions. A file path is an SQLite file for
    one balancer, created if missing. redis://[user@]host:port/db can be shared by several
    balancers, one of which leads."""

    store_password_file: str = or_environment("EQUIPOISE_STORE_PASSWORD_FILE")
    """File that contains the password of a Redis store. Read for every connection."""

    store_wait_s: Annotated[float, Range(0, HOUR_S)] = 0.0
    """Seconds to wait at startup for a store that cannot be reached, or accepts no writes, before
    exiting."""

    advertise: str = ""
    """host:port that workers and other balancers use to reach this one. Default: the listen
    address."""

    lease: LeaseKind = LeaseKind.STORE
    """Where balancers that share a Redis store elect their leader."""

    lease_name: str = "equipoise"
    """Name of the Lease object, for --lease=kubernetes."""

    lease_duration_s: Annotated[float, Range(1, MAX_LEASE_S)] = 3.0
    """Seconds without a renewal after which another balancer takes the lease. A leader that cannot
    renew steps down after two thirds of this time."""

    metrics: MetricsPort = field(default_factory=MetricsPort)
    """The port of the metrics; none by default."""

    probes_listen: str = ""
    """host:port of an HTTP server for the probes /livez and /readyz, where gRPC probes cannot
    present a certificate. Disabled by default."""

    web_listen: str = ""
    """host:port of an HTTP server for the read-only fleet page. Disabled by default. It does not
    authenticate, so it must listen on loopback unless --insecure is set. Port 0 picks a free port,
    shown in the log. It may be the metrics address."""

    log_format: LogFormat = LogFormat.TEXT
    """Log format: human-readable `text`, or `json`, one object per line with pool, rank, epoch and
    generation where they apply."""

    tracing_endpoint: str = ""
    """http://host:port of an OTLP collector (gRPC, usually port 4317) that receives a trace of each
    plan and its rollout. OTEL_EXPORTER_OTLP_ENDPOINT is the default; without either, tracing is
    disabled. Needs equipoise[tracing]."""

    log_level: LogLevel = LogLevel.INFO
    """Minimum severity of messages to write to stderr. `info` logs one line per decision."""

    drain_timeout_s: Annotated[float, Range(0, 60)] = 3.0
    """Seconds that open calls have to finish after Ctrl-C or SIGTERM. Workers keep serving without
    a balancer, so a short time is enough."""

    tls: Tls = field(default_factory=Tls)
    """Certificates. Without them the port must be on loopback."""

    accepted_keys: str = ""
    """File of accepted public keys, one per line: worker/POOL/WORKER, gateway, reader or
    admin/NAME, a space, and the base64 line of an Ed25519 public key in PEM. Calls then need a
    token signed with one of the keys. Reloaded when it changes."""

    policy: Path | None = None
    """BalancePolicy file. It overrides the options below, for all pools or for single pools. Edits
    take effect within seconds; an invalid edit is rejected and the last valid policy stays in
    force."""

    defaults: Policy = field(default_factory=Policy)
    """How loads become layouts: intervals, half-lives, thresholds and timeouts."""

    def __post_init__(self) -> None:
        host = listen_address("listen", self.listen).host
        self.tls.check_listen(self.listen)
        if self.advertise:
            dial_address("advertise", self.advertise)
        elif self.is_shared and host in _ANY_HOST:
            raise InvalidSettingsError(
                f"advertise must be set, because workers cannot connect to {host}: add "
                "--advertise=HOST:PORT"
            )
        self.metrics.check(has_certificate=self.tls.serves_tls)
        if self.probes_listen:
            listen_address("probes_listen", self.probes_listen)
        self._check_web()
        check_endpoint(self.tracing_endpoint)
        if not self.store:
            raise InvalidSettingsError("store must be a file or redis://host:port/db")
        if self.is_shared and _has_password(self.store):
            # The message must not contain the password.
            raise InvalidSettingsError(
                "store must not contain a password, because the list of processes shows it: write "
                "it to a file and set store_password_file"
            )
        if self.store_password_file and not self.is_shared:
            raise InvalidSettingsError(
                "store_password_file is for a Redis store: add --store=redis://host:port/db"
            )
        if self.lease is LeaseKind.KUBERNETES and not self.is_shared:
            raise InvalidSettingsError(
                "lease kubernetes needs a shared store: add --store=redis://host:port/db"
            )
        check_ranges(self)

    @property
    def is_shared(self) -> bool:
        """Whether several balancers can use the store."""
        return self.store.startswith(("redis://", "rediss://"))

    def _check_web(self) -> None:
        if not self.web_listen:
            return
        address = listen_address("web_listen", self.web_listen)
        if not address.is_loopback and not self.tls.insecure:
            raise InvalidSettingsError(
                f"web_listen {address}: the page does not authenticate: listen on 127.0.0.1 and "
                "use `kubectl port-forward` or `ssh -L`, or add --insecure"
            )
        if self.metrics.metrics_tls and self.metrics.metrics_listen == self.web_listen:
            raise InvalidSettingsError(
                f"metrics_listen and web_listen are both {address}, but the page is served without "
                "TLS: choose another address for one of them, or remove metrics_tls"
            )


def _has_password(url: str) -> bool:
    """Whether a Redis URL contains a password, even one that breaks the URL's form."""
    rest = url.partition("://")[2]
    return ":" in rest.rpartition("@")[0] or "password=" in rest
