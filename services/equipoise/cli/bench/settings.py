"""`BenchServeSettings`: the options of `equipoise bench serve`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import HOUR_S, Range, check_ranges

_MAX = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServeSettings:
    """A server, the requests to send, and where the measurements go.

    Raises:
        InvalidSettingsError: a value is invalid.
    """

    url: str = "http://127.0.0.1:8080"
    """URL of an OpenAI-compatible server with streaming /v1/completions."""

    model: str = ""
    """Model name. Default: the first that the server lists."""

    api_key: str = ""
    """API key. Default: $OPENAI_API_KEY."""

    requests: Annotated[int, Range(1, _MAX)] = 200
    """Number of requests to measure."""

    request_rate: Annotated[float, Range(0, is_open=True)] = math.inf
    """Request arrivals per second (a Poisson process). inf starts each as soon as --concurrency
    allows."""

    concurrency: Annotated[int, Range(1, _MAX)] = 32
    """Maximum number of requests in flight."""

    warm_up: Annotated[int, Range(0, _MAX)] = 8
    """Number of requests to send before measuring."""

    mix: tuple[str, ...] = ("code=1", "english=1", "arithmetic=1")
    """Kinds of text that prompts are taken from, with their weights."""

    input_length: tuple[str, ...] = ("48", "96")
    """Shortest and longest prompt, in characters. The tiny model has one token per character."""

    output_length: tuple[str, ...] = ("32", "64")
    """Smallest and largest number of tokens to request."""

    ignore_eos: bool = False
    """Generate past the end-of-sequence token, so that every output has the requested length. Not
    every server supports this field."""

    temperature: Annotated[float, Range(0, 2)] = 0.0
    """Sampling temperature. 0 is greedy."""

    seed: Annotated[int, Range(0, _MAX)] = 0
    """The same seed gives the same prompts, lengths and arrival times."""

    timeout_s: Annotated[float, Range(0, HOUR_S, is_open=True)] = 120.0
    """Seconds after which an incomplete request fails."""

    plot: Path | None = None
    """Image of the latencies to write, .svg or .png."""

    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.url.startswith(("http://", "https://")):
            raise InvalidSettingsError(
                f"--url must begin with http:// or https://, not {self.url!r}"
            )
        if self.plot is not None and self.plot.suffix not in {".svg", ".png"}:
            raise InvalidSettingsError(f"--plot must end in .svg or .png, not {str(self.plot)!r}")
        _ = self.shares, self.input_chars, self.output_tokens

    @property
    def shares(self) -> dict[str, float]:
        """The share of each kind of text; shares sum to 1."""
        parts: dict[str, float] = {}
        for one in self.mix:
            name, _, part = one.partition("=")
            try:
                parts[name] = float(part or 1)
            except ValueError:
                raise InvalidSettingsError(f"--mix {one}: {part!r} is not a number") from None
            if not math.isfinite(parts[name]) or parts[name] < 0:
                raise InvalidSettingsError(f"--mix {one}: a weight must be at least 0")
        if not sum(parts.values()):
            raise InvalidSettingsError("--mix needs a weight above 0")
        return {name: part / sum(parts.values()) for name, part in parts.items()}

    @property
    def input_chars(self) -> tuple[int, int]:
        """Shortest and longest prompt, in characters."""
        return _range("input-length", self.input_length)

    @property
    def output_tokens(self) -> tuple[int, int]:
        """Smallest and largest number of tokens to request."""
        return _range("output-length", self.output_length)


def _range(name: str, words: tuple[str, ...]) -> tuple[int, int]:
    if not 1 <= len(words) <= 2 or not all(word.isdigit() for word in words):
        raise InvalidSettingsError(f"--{name} must be one number, or two separated by a comma")
    least, most = int(words[0]), int(words[-1])
    if not 1 <= least <= most <= _MAX:
        raise InvalidSettingsError(
            f"--{name} {','.join(words)}: must be from 1 to {_MAX}, smaller first"
        )
    return least, most
