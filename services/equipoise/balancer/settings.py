"""`BalancerSettings`: everything a person may choose about the balancer. Starts nothing."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from equipoise.planning.policy import Policy


class InvalidSettingsError(ValueError):
    """A setting outside its range; the message names the setting, the value and the range."""


class LogLevel(StrEnum):
    """How much the balancer says on stderr."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerSettings:
    """One balancer: where it listens, what it remembers, and how it decides.

    Raises:
        InvalidSettingsError: a value is outside its range.
    """

    listen: str = "127.0.0.1:7070"
    """host:port of the gRPC server; port 0 takes a free one, which the first log line names.
    Only this machine can reach the default, because nothing is authenticated."""

    state: Path = Path("equipoise-state.sqlite")
    """The embedded store's file: committed layouts, averages, decisions. It is made when missing;
    one balancer uses it at a time."""

    log_level: LogLevel = LogLevel.INFO
    """Least severe messages that are written to stderr. `info` is one line a decision."""

    stop_grace_s: float = 3.0
    """Seconds that open calls may take to end after Ctrl-C or SIGTERM. Workers serve on without a
    balancer, so there is nothing to wait long for."""

    policy: Policy = field(default_factory=Policy)
    """How loads become layouts: intervals, half-lives, thresholds, bounds of every wait."""

    def __post_init__(self) -> None:
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise InvalidSettingsError(f"listen must be host:port, not {self.listen!r}")
        if not 0 <= self.stop_grace_s <= 60:
            raise InvalidSettingsError(
                f"stop_grace_s must be from 0 to 60 seconds, not {self.stop_grace_s}"
            )
