"""`DemoSettings`: the options of `equipoise demo`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from equipoise.formats.packaged import packaged_checkpoint
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import HOUR_S, Range, check_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """The demo's fleet, its traffic, and where the figures go.

    Raises:
        InvalidSettingsError: a value is out of range, or values contradict each other.
    """

    workers: Annotated[int, Range(1)] = 4
    """Number of worker processes, one expert-parallel rank each."""

    nodes: Annotated[int, Range(1)] = 2
    """Number of simulated nodes, with the same number of workers each."""

    slots_per_rank: Annotated[int, Range(1)] = 11
    """Physical slots per MoE layer and rank. All ranks together must hold every expert."""

    interval_s: Annotated[float, Range(0, HOUR_S, is_open=True)] = 6.0
    """Seconds between the balancer's decisions, which is the length of a window."""

    domains: tuple[str, ...] = ("code", "arithmetic", "english")
    """Kinds of text to send, one after the other."""

    seconds_per_domain: Annotated[float, Range(0, HOUR_S, is_open=True)] = 35.0
    """Minimum seconds of traffic per kind of text. The next starts when a window closes."""

    clients_per_rank: Annotated[int, Range(1)] = 12
    """Concurrent requests per rank."""

    prompts_per_domain: Annotated[int, Range(1)] = 32
    """Distinct prompts per kind of text, which clients take in turn."""

    min_output_tokens: Annotated[int, Range(1)] = 8
    """Shortest output to request."""

    max_output_tokens: Annotated[int, Range(1)] = 24
    """Maximum length of an output to request."""

    checkpoint: Path = field(default_factory=packaged_checkpoint)
    """Checkpoint folder to serve. Default: the tiny model in the package."""

    listen: str = "127.0.0.1:7070"
    """host:port of the balancer, also for `equipoise status`. If it is in use,
    a free port replaces it."""

    web_listen: str = "127.0.0.1:7080"
    """host:port of the balancer's web page. If it is in use, a free port replaces it."""

    disaggregated: bool = False
    """Show a prefill and a decode pool behind a gateway instead: each has half of the workers, with
    twice the slots. The first kind of text is mostly read, the last one mostly generated."""

    plain: bool = False
    """Print lines even on a terminal."""

    json: Path | None = None
    """File to write the figures to."""

    logs: Path | None = None
    """Folder to keep the processes' output in. Default: a temporary folder."""

    seed: int = 0
    """Seed of the prompts and their lengths."""

    def __post_init__(self) -> None:
        from equipoise_model.train.data import DOMAINS  # Imports numpy.

        check_ranges(self)
        if self.workers % self.nodes:
            raise InvalidSettingsError(f"nodes ({self.nodes}) must divide workers ({self.workers})")
        if self.disaggregated and self.workers % (2 * self.nodes):
            raise InvalidSettingsError(
                f"disaggregated needs two pools of the same size on {self.nodes} nodes each: "
                f"workers ({self.workers}) must be a multiple of {2 * self.nodes}"
            )
        if self.max_output_tokens < self.min_output_tokens:
            raise InvalidSettingsError(
                f"max_output_tokens ({self.max_output_tokens}) must be at least "
                f"min_output_tokens ({self.min_output_tokens})"
            )
        if not self.domains or not set(self.domains) <= set(DOMAINS):
            raise InvalidSettingsError(
                f"domains must be one or more of {', '.join(DOMAINS)}, not {self.domains!r}"
            )
        if self.disaggregated and self.domains[0] == self.domains[-1]:
            raise InvalidSettingsError(
                f"disaggregated needs domains that begin and end with different kinds of text, "
                f"not {self.domains!r}"
            )
