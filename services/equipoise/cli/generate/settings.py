"""`GenerateSettings`: what a person may ask of `equipoise generate`. Starts nothing."""

from dataclasses import dataclass, field
from pathlib import Path

from equipoise.cli.offline.settings import ToolInputError
from equipoise.cli.options import ARGUMENT, REPEATED
from equipoise.formats.packaged import packaged_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateSettings:
    """A prompt, who goes on with it, and how.

    Raises:
        ToolInputError: a value is outside its range.
    """

    prompt: str = field(default="", metadata={ARGUMENT: True})
    """Text to go on with; - reads it from standard input."""

    url: str = ""
    """Where a server of OpenAI's form listens, like http://127.0.0.1:8080; unless given, the
    checkpoint's model runs in this process."""

    checkpoint: Path = field(default_factory=packaged_checkpoint)
    """Folder of the model that runs in this process; the tiny model that comes with the package
    unless given."""

    model: str = ""
    """Name of the server's model; the first that it lists unless given."""

    api_key: str = ""
    """The server's API key; the environment's OPENAI_API_KEY unless given."""

    max_tokens: int = 128
    """Most tokens to generate."""

    temperature: float = 0.0
    """Divides the logits: 0 takes the most likely token always, 1 samples from the model's own
    distribution."""

    top_p: float = 1.0
    """Sample only from the likeliest tokens that reach this share of probability together."""

    top_k: int = 0
    """Sample only from so many likeliest tokens; 0 is all."""

    min_p: float = 0.0
    """Sample only from tokens this probable, as a share of the likeliest one's probability."""

    repetition_penalty: float = 1.0
    """Divides the logits of tokens in prompt and output; 1 is none."""

    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output, from -2 to 2."""

    frequency_penalty: float = 0.0
    """The same for every time that the output has them."""

    seed: int | None = None
    """The same seed gives the same text; another one each time unless given."""

    stop: tuple[str, ...] = field(default=(), metadata={REPEATED: True})
    """A text at which to end; it is not shown. May be given several times."""

    ignore_eos: bool = False
    """Go on behind the model's own end."""

    timeout_s: float = 60.0
    """Seconds to wait for a server, and from one of its words to the next."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ToolInputError("a prompt is needed: equipoise generate 'def f('")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ToolInputError(f"--url must begin with http:// or https://, not {self.url!r}")
        if self.max_tokens < 1:
            raise ToolInputError(f"--max-tokens must be at least 1, not {self.max_tokens}")
        if not 0 < self.timeout_s <= 3600:
            raise ToolInputError(
                f"--timeout-s must be above 0 and at most 3600, not {self.timeout_s:g}"
            )
        if not all(self.stop):
            raise ToolInputError("--stop must not be empty")
