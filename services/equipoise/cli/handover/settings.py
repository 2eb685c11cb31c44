"""`HandoverSettings`: the options of `equipoise handover`."""

from dataclasses import dataclass
from typing import Annotated

from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import HOUR_S, Range, check_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverSettings:
    """A gateway of two pools, and the prompt to send to it.

    Raises:
        InvalidSettingsError: a value is invalid.
    """

    url: str = "http://127.0.0.1:8080"
    """URL of the gateway."""

    model: str = ""
    """Model name. Default: the first that the gateway lists."""

    api_key: str = ""
    """API key. Default: $OPENAI_API_KEY."""

    prompt_tokens: Annotated[int, Range(0, 10**6)] = 0
    """Length of the prompt. Default: half of the context, 2048 at most."""

    json: bool = False
    """Print JSON."""

    timeout_s: Annotated[float, Range(0, HOUR_S, is_open=True)] = 60.0
    """Seconds to wait for each answer of the gateway."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.url.startswith(("http://", "https://")):
            raise InvalidSettingsError(
                f"--url must begin with http:// or https://, not {self.url!r}"
            )
