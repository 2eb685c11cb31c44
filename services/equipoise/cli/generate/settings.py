"""`GenerateSettings`: the options of `equipoise generate`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from equipoise.cli.options import ARGUMENT, REPEATED
from equipoise.formats.packaged import packaged_checkpoint
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import HOUR_S, Range, check_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateSettings:
    """A prompt, the model that completes it, and sampling parameters.

    Raises:
        InvalidSettingsError: a value is invalid.
    """

    prompt: str = field(metadata={ARGUMENT: True})
    """Text to complete. - reads standard input."""

    url: str = ""
    """URL of an OpenAI-compatible server, like http://127.0.0.1:8080. Default: run the checkpoint
    in this process."""

    checkpoint: Path = field(default_factory=packaged_checkpoint)
    """Checkpoint folder to run in this process. Default: the tiny model in the package."""

    model: str = ""
    """Model name on the server. Default: the first that it lists."""

    api_key: str = ""
    """API key. Default: $OPENAI_API_KEY."""

    max_tokens: Annotated[int, Range(1)] = 128
    """Maximum number of tokens to generate."""

    temperature: float = 0.0
    """Sampling temperature. 0 always takes the most likely token; 1 samples from the model's
    distribution."""

    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities add up to this."""

    top_k: int = 0
    """Sample from this number of most likely tokens. 0 is all."""

    min_p: float = 0.0
    """Sample from tokens at least this probable, relative to the most likely token."""

    repetition_penalty: float = 1.0
    """Divisor for the logits of tokens in prompt and output. 1 is off."""

    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output, from -2 to 2. 0 is off."""

    frequency_penalty: float = 0.0
    """Like --presence-penalty, once per occurrence."""

    seed: int | None = None
    """The same seed gives the same text. Default: random."""

    stop: tuple[str, ...] = field(default=(), metadata={REPEATED: True})
    """Stop at this text, which is not printed. Repeatable."""

    ignore_eos: bool = False
    """Generate past the end-of-sequence token."""

    timeout_s: Annotated[float, Range(0, HOUR_S, is_open=True)] = 60.0
    """Seconds to wait for the server's first and each further piece of text."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.prompt:
            raise InvalidSettingsError("the prompt is empty")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise InvalidSettingsError(
                f"--url must begin with http:// or https://, not {self.url!r}"
            )
        if not all(self.stop):
            raise InvalidSettingsError("--stop must not be empty")
