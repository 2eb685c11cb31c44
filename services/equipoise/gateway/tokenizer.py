"""Text to tokens and back: the one place that knows what a token stands for.

The tiny model's tokens are bytes (0 to 255); those above are special and have no text.
"""

import codecs
import json
from collections.abc import Sequence
from pathlib import Path

from equipoise.gateway.errors import GatewayError

_NUM_BYTES = 256


class ByteTokenizer:
    """One token a byte of UTF-8.

    `vocab_size` bounds token ids; `end_token` is what the model says when it is done, None if it
    never does.
    """

    def __init__(self, *, vocab_size: int, end_token: int | None) -> None:
        self.vocab_size = vocab_size
        self.end_token = end_token

    @classmethod
    def of_checkpoint(cls, folder: Path) -> "ByteTokenizer":
        """The tokenizer of the model whose config.json lies in `folder`.

        Raises:
            GatewayError: there is no such file, or its model's tokens are not bytes.
        """
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            vocab_size, end_token = config["vocab_size"], config.get("eos_token_id")
        except OSError as error:
            raise GatewayError(f"{path}: {error.strerror}") from None
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise GatewayError(f"{path}: this is no model's config with a vocab_size") from None
        if not isinstance(vocab_size, int) or not _NUM_BYTES <= vocab_size < 2 * _NUM_BYTES:
            raise GatewayError(
                f"{path}: vocab_size {vocab_size!r} is not that of a model whose tokens are bytes, "
                f"which are all that this gateway can spell"
            )
        if end_token is not None and end_token not in range(vocab_size):
            raise GatewayError(f"{path}: eos_token_id {end_token!r} is out of the vocabulary")
        return cls(vocab_size=vocab_size, end_token=end_token)

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a text.

        Raises:
            UnicodeEncodeError: half of a surrogate pair, which is no character.
        """
        return tuple(text.encode())

    def spelling(self) -> "Spelling":
        """A new reader of generated tokens."""
        return Spelling()


class Spelling:
    """Text of tokens as they come; never half a character. Bytes that are no UTF-8 read as U+FFFD.

    The text of a request is the same however its tokens are grouped.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, tokens: Sequence[int], *, final: bool) -> str:
        """What these tokens complete; with `final` also what no token will complete any more."""
        return self._decoder.decode(
            bytes(token for token in tokens if token < _NUM_BYTES), final=final
        )


class StopText:
    """Lets text through up to the first stop string that is complete, which is not part of it.

    Text that may yet turn out to be the start of one is held back, so that the result does not
    depend on how the text comes.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops)
        self.stopped = False
        self._stops = stops
        self._held = ""

    def read(self, text: str, *, final: bool) -> str:
        """What is known to come before any stop string; nothing after one was met."""
        if self.stopped:
            return ""
        text, self._held = self._held + text, ""
        found = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if found:
            self.stopped = True
            _, start = min(found)
            return text[:start]
        if not final:
            held = max((_overlap(text, stop) for stop in self._stops), default=0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, less than all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
