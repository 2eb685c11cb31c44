"""`BalancerSettings`: everything a person may choose about the balancer. Starts nothing."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from equipoise.planning.policy import Policy
from equipoise.telemetry.logs import LogFormat
from equipoise.telemetry.spans_settings import check_endpoint
from equipoise.trust.settings import Tls, is_loopback

_ANY_HOST = {"0.0.0.0", "[::]", "::"}


class InvalidSettingsError(ValueError):
    """A setting outside its range; the message names the setting, the value and the range."""


class LogLevel(StrEnum):
    """How much the balancer says on stderr."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LeaseKind(StrEnum):
    """Who says which balancer leads."""

    STORE = "store"
    """The store: a Redis server that balancers share keeps the lease beside their state."""

    KUBERNETES = "kubernetes"
    """The cluster: a Lease of the pod's namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerSettings:
    """One balancer: where it listens, what it remembers, and how it decides.

    Raises:
        InvalidSettingsError: a value is outside its range.
    """

    listen: str = "127.0.0.1:7070"
    """host:port of the gRPC server; port 0 takes a free one, which the first log line names.
    Only this machine can reach the default; others need --tls-ca and what goes with it."""

    store: str = "equipoise-state.sqlite"
    """Where committed layouts, averages and decisions are kept: a file, which is made when missing
    and which one balancer uses at a time; or redis://[:password@]host:port/db, which several
    balancers may share, of which one leads."""

    store_wait_s: float = 0.0
    """Seconds for which a balancer that starts waits for a store that cannot be reached, as where
    both start together; then it gives up."""

    advertise: str = ""
    """host:port by which workers and other balancers reach this one; where it listens unless
    given."""

    lease: LeaseKind = LeaseKind.STORE
    """Where balancers that share a Redis store find out which of them leads."""

    lease_name: str = "equipoise"
    """Name of the Lease, for a lease that the Kubernetes cluster keeps."""

    lease_duration_s: float = 3.0
    """Seconds after which another balancer takes over from one that went silent. The silent one
    stops by itself after two thirds of them."""

    metrics_listen: str = ""
    """host:port of an HTTP server that tells metrics at /metrics; none unless given. Port 0 takes
    a free one, which a log line names."""

    web_listen: str = ""
    """host:port of an HTTP server that shows the fleet to people, read-only; none unless given.
    For this machine, because it asks nobody who he is. Port 0 takes a free one, which a log line
    names; it may be the address of the metrics."""

    log_format: LogFormat = LogFormat.TEXT
    """How log lines look: `text` for people, or `json`, an object a line with pool, rank, epoch
    and generation where they apply."""

    tracing_endpoint: str = ""
    """http://host:port of an OTLP collector (gRPC, mostly port 4317), which gets a trace of every
    plan and of the rollout that follows; none unless given, or OTEL_EXPORTER_OTLP_ENDPOINT is set.
    Needs equipoise[tracing]."""

    log_level: LogLevel = LogLevel.INFO
    """Least severe messages that are written to stderr. `info` is one line a decision."""

    stop_grace_s: float = 3.0
    """Seconds that open calls may take to end after Ctrl-C or SIGTERM. Workers serve on without a
    balancer, so there is nothing to wait long for."""

    tls: Tls = field(default_factory=Tls)
    """Certificates; without them the port is for this machine only."""

    tokens: str = ""
    """File of the tokens that callers must show, a line each: worker/POOL/WORKER, gateway, reader
    or admin/NAME, a space, and the token or sha256:HEX of it. Read again when it changes."""

    policy: Path | None = None
    """BalancePolicy file: what it says goes before the options below, for all pools or for single
    ones. Edits take effect within seconds, and one that is wrong changes nothing."""

    defaults: Policy = field(default_factory=Policy)
    """How loads become layouts: intervals, half-lives, thresholds, bounds of every wait."""

    def __post_init__(self) -> None:
        host = check_listen("listen", self.listen)
        self.tls.check_listen(self.listen)
        advertised_host, _, advertised_port = self.advertise.rpartition(":")
        if self.advertise and not (advertised_host and advertised_port.isdigit()):
            raise InvalidSettingsError(f"advertise must be host:port, not {self.advertise!r}")
        if self.is_shared and not self.advertise and host in _ANY_HOST:
            raise InvalidSettingsError(
                f"advertise must be given, because listening on {host} tells nobody where to go"
            )
        if self.metrics_listen:
            check_listen("metrics_listen", self.metrics_listen)
        self._check_web()
        check_endpoint(self.tracing_endpoint)
        if not self.store:
            raise InvalidSettingsError("store must be a file or redis://host:port/db")
        if self.lease is LeaseKind.KUBERNETES and not self.is_shared:
            raise InvalidSettingsError(
                "lease kubernetes needs a store that balancers share: --store=redis://host:port/db"
            )
        if not 1 <= self.lease_duration_s <= 60:
            raise InvalidSettingsError(
                f"lease_duration_s must be from 1 to 60 seconds, not {self.lease_duration_s}"
            )
        if not 0 <= self.store_wait_s <= 3600:
            raise InvalidSettingsError(
                f"store_wait_s must be from 0 to 3600 seconds, not {self.store_wait_s}"
            )
        if not 0 <= self.stop_grace_s <= 60:
            raise InvalidSettingsError(
                f"stop_grace_s must be from 0 to 60 seconds, not {self.stop_grace_s}"
            )

    @property
    def is_shared(self) -> bool:
        """Whether several balancers can use the store."""
        return self.store.startswith(("redis://", "rediss://"))

    def _check_web(self) -> None:
        if not self.web_listen:
            return
        check_listen("web_listen", self.web_listen)
        if not is_loopback(self.web_listen) and not self.tls.insecure:
            raise InvalidSettingsError(
                f"web_listen {self.web_listen}: the page asks nobody who he is: listen on "
                "127.0.0.1 and come by `kubectl port-forward` or `ssh -L`, or say --insecure"
            )


def check_listen(name: str, address: str) -> str:
    """The host of an address to listen on.

    Raises:
        InvalidSettingsError: it is not host:port.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidSettingsError(f"{name} must be host:port, not {address!r}")
    return host
