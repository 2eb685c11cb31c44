"""Text to tokens and back: the one place that knows what a token stands for.

Every token stands for bytes, so text comes back by one rule for all models: their bytes in order,
read as UTF-8. Where the model's folder has no tokenizer.json, tokens 0 to 255 are bytes themselves.
"""

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.gateway.errors import GatewayError
from equipoise.gateway.tokenizer_file import read_tokenizer_file

_NUM_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer:
    """The tokens of one model.

    `bytes_of` has the bytes of each token, empty for those without text (special ones), and its
    length is the size of the vocabulary. `encode` gives a text's tokens; its second argument says
    whether those that begin every text come first. `end_tokens` are what the model says when it is
    done.
    """

    bytes_of: tuple[bytes, ...]
    end_tokens: frozenset[int]
    encode_text: Callable[[str, bool], Sequence[int]]

    @classmethod
    def of_checkpoint(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of the model whose config.json lies in `folder`.

        Raises:
            GatewayError: a file is missing or damaged, or its model's tokens cannot be spelled.
        """
        path = folder / "config.json"
        vocab_size, end_tokens = _vocabulary(path)
        if (folder / "tokenizer.json").exists():
            spelled = read_tokenizer_file(folder, vocab_size=vocab_size)
            return cls(
                bytes_of=spelled.bytes_of, end_tokens=end_tokens, encode_text=spelled.encode_text
            )
        if vocab_size not in range(_NUM_BYTES, 2 * _NUM_BYTES):
            raise GatewayError(
                f"{folder}: there is no tokenizer.json, and vocab_size {vocab_size} is not that of "
                f"a model whose tokens are bytes: put the model's tokenizer.json there"
            )
        special = (b"",) * (vocab_size - _NUM_BYTES)
        return cls(
            bytes_of=(*(bytes([byte]) for byte in range(_NUM_BYTES)), *special),
            end_tokens=end_tokens,
            encode_text=lambda text, _: text.encode(),
        )

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return len(self.bytes_of)

    def encode(self, text: str, *, begins: bool = True) -> tuple[int, ...]:
        """Tokens of a text; those that begin every text come first if `begins`.

        Raises:
            UnicodeEncodeError: half of a surrogate pair, which is no character.
        """
        text.encode()
        return tuple(self.encode_text(text, begins))

    def spelling(self) -> "Spelling":
        """A new reader of generated tokens."""
        return Spelling(self.bytes_of)

    def spell(self, tokens: Sequence[int]) -> str:
        """The whole text of tokens."""
        return self.spelling().read(tokens, final=True)


class Spelling:
    """Text of tokens as they come; never half a character. Bytes that are no UTF-8 read as U+FFFD.

    The text of a request is the same however its tokens are grouped.
    """

    def __init__(self, bytes_of: Sequence[bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, tokens: Sequence[int], *, final: bool) -> str:
        """What these tokens complete; with `final` also what no token will complete any more."""
        data = b"".join(self._bytes_of[token] for token in tokens)
        return self._decoder.decode(data, final=final)


def _vocabulary(path: Path) -> tuple[int, frozenset[int]]:
    """The size of the vocabulary and the tokens that end a text, as config.json has them."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        vocab_size, end = config["vocab_size"], config.get("eos_token_id")
    except OSError as error:
        raise GatewayError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise GatewayError(f"{path}: this is no model's config with a vocab_size") from None
    if not _is_whole(vocab_size) or vocab_size < 1:
        raise GatewayError(f"{path}: vocab_size {vocab_size!r} is no number of tokens")
    ends = [] if end is None else end if isinstance(end, list) else [end]
    for token in ends:
        if not _is_whole(token) or not 0 <= token < vocab_size:
            raise GatewayError(f"{path}: eos_token_id {token!r} is out of the vocabulary")
    return vocab_size, frozenset(ends)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
