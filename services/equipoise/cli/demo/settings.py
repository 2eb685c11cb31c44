"""`DemoSettings`: everything a person may choose about the demo. Starts nothing."""

from dataclasses import dataclass, field
from pathlib import Path

from equipoise.formats.packaged import packaged_checkpoint
from equipoise_model.train.data import DOMAINS, Domain


class DemoError(RuntimeError):
    """The demo cannot be run as asked; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """One demo: the fleet, its traffic, and where the results go.

    Raises:
        DemoError: a value is outside its range.
    """

    workers: int = 4
    """Worker processes, one expert-parallel rank each."""

    nodes: int = 2
    """Nodes the workers pretend to run on, in equal shares."""

    slots_per_rank: int = 11
    """Physical slots per MoE layer and rank; all ranks together need one per logical expert."""

    interval_s: float = 6.0
    """Seconds between the balancer's decisions; also the length of a window."""

    domains: tuple[Domain, ...] = ("code", "arithmetic", "english")
    """Traffic, one domain after the other."""

    seconds_per_domain: float = 35.0
    """Least seconds of each domain's traffic; the next begins when the window closes."""

    clients_per_rank: int = 12
    """Requests that are generated on each rank at a time."""

    prompts_per_domain: int = 32
    """Distinct prompts; clients take them in turn."""

    min_output_tokens: int = 8
    """Shortest output asked for."""

    max_output_tokens: int = 24
    """Longest output asked for."""

    checkpoint: Path = field(default_factory=packaged_checkpoint)
    """Model to serve; the tiny one that comes with the package unless given."""

    listen: str = "127.0.0.1:7070"
    """Where the balancer listens, for `equipoise status` too; a free port if it is in use."""

    web_listen: str = "127.0.0.1:7080"
    """Where the balancer shows the fleet in a browser; a free port if it is in use."""

    plain: bool = False
    """Print lines even to a terminal."""

    json: Path | None = None
    """File that gets the figures."""

    logs: Path | None = None
    """Folder that keeps the processes' output; a temporary one unless given."""

    seed: int = 0
    """Chooses the prompts and their lengths."""

    def __post_init__(self) -> None:
        for name in (
            "workers", "nodes", "slots_per_rank", "clients_per_rank", "prompts_per_domain",
            "min_output_tokens",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise DemoError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.workers % self.nodes:
            raise DemoError(
                f"nodes ({self.nodes}) must divide workers ({self.workers}), so that each node "
                f"has as many"
            )
        if self.max_output_tokens < self.min_output_tokens:
            raise DemoError(
                f"max_output_tokens ({self.max_output_tokens}) must be at least "
                f"min_output_tokens ({self.min_output_tokens})"
            )
        for name in ("interval_s", "seconds_per_domain"):
            if not 0 < getattr(self, name) <= 3600:
                raise DemoError(
                    f"{name} must be above 0 and at most 3600, not {getattr(self, name)}"
                )
        if not self.domains or not set(self.domains) <= set(DOMAINS):
            raise DemoError(
                f"domains must name one or more of {', '.join(DOMAINS)}, not {self.domains!r}"
            )
