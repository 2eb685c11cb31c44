"""`BenchServeSettings`: what a person may ask of `equipoise bench serve`. Starts nothing."""

import math
from dataclasses import dataclass
from pathlib import Path

from equipoise.cli.offline.settings import ToolInputError

_MAX = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServeSettings:
    """A server, the requests that it is given, and what becomes of the measurements.

    Raises:
        ToolInputError: a value is outside its range.
    """

    url: str = "http://127.0.0.1:8080"
    """Where a server of OpenAI's form listens; any that has /v1/completions with streams."""

    model: str = ""
    """Name of the server's model; the first that it lists unless given."""

    api_key: str = ""
    """The server's API key; the environment's OPENAI_API_KEY unless given."""

    requests: int = 200
    """Requests that are measured."""

    request_rate: float = math.inf
    """Requests that begin in a second, at random times (a Poisson process); inf begins each as soon
    as `concurrency` lets it."""

    concurrency: int = 32
    """Most requests that are open at a time."""

    warm_up: int = 8
    """Requests before those that are measured."""

    mix: tuple[str, ...] = ("code=1", "english=1", "arithmetic=1")
    """Kinds of text that prompts are cut from, and the part that each has."""

    input_length: tuple[str, ...] = ("48", "96")
    """Shortest and longest prompt in characters, which are the tiny model's tokens."""

    output_length: tuple[str, ...] = ("32", "64")
    """Fewest and most tokens that a request asks for."""

    ignore_eos: bool = False
    """Have answers go on behind the model's own end, so that all are as long as asked; not every
    server knows this field."""

    temperature: float = 0.0
    """Temperature of every request; 0 is greedy."""

    seed: int = 0
    """The same seed gives the same prompts, lengths and times."""

    timeout_s: float = 120.0
    """Seconds after which a request that is not answered to its end has failed."""

    plot: Path | None = None
    """Picture to draw of the latencies, .svg or .png."""

    json: bool = False
    """Print JSON for programs."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ToolInputError(f"--url must begin with http:// or https://, not {self.url!r}")
        for name, least in (("requests", 1), ("concurrency", 1), ("warm_up", 0), ("seed", 0)):
            value = getattr(self, name)
            if not least <= value <= _MAX:
                raise ToolInputError(
                    f"--{name.replace('_', '-')} must be from {least} to {_MAX}, not {value}"
                )
        if not self.request_rate > 0:
            raise ToolInputError(f"--request-rate must be above 0, not {self.request_rate:g}")
        if not 0 < self.timeout_s <= 3600:
            raise ToolInputError(
                f"--timeout-s must be above 0 and at most 3600, not {self.timeout_s:g}"
            )
        if not 0 <= self.temperature <= 2:
            raise ToolInputError(f"--temperature must be from 0 to 2, not {self.temperature:g}")
        if self.plot is not None and self.plot.suffix not in {".svg", ".png"}:
            raise ToolInputError(f"--plot must end in .svg or .png, not {str(self.plot)!r}")
        _ = self.shares, self.input_chars, self.output_tokens

    @property
    def shares(self) -> dict[str, float]:
        """The part of each kind of text; they sum to 1."""
        parts: dict[str, float] = {}
        for one in self.mix:
            name, _, part = one.partition("=")
            try:
                parts[name] = float(part or 1)
            except ValueError:
                raise ToolInputError(f"--mix {one}: {part!r} is no number") from None
            if not math.isfinite(parts[name]) or parts[name] < 0:
                raise ToolInputError(f"--mix {one}: a part must be 0 or more")
        if not sum(parts.values()):
            raise ToolInputError("--mix must have a part above 0")
        return {name: part / sum(parts.values()) for name, part in parts.items()}

    @property
    def input_chars(self) -> tuple[int, int]:
        """Shortest and longest prompt."""
        return _range("input-length", self.input_length)

    @property
    def output_tokens(self) -> tuple[int, int]:
        """Fewest and most tokens asked for."""
        return _range("output-length", self.output_length)


def _range(name: str, words: tuple[str, ...]) -> tuple[int, int]:
    if not 1 <= len(words) <= 2 or not all(word.isdigit() for word in words):
        raise ToolInputError(f"--{name} must be one number or two with a comma between them")
    least, most = int(words[0]), int(words[-1])
    if not 1 <= least <= most <= _MAX:
        raise ToolInputError(f"--{name} {','.join(words)}: from 1 to {_MAX}, the smaller one first")
    return least, most
