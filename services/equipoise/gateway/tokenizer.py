"""`Tokenizer`: text to tokens and back.

Every token stands for bytes, so decoding follows one rule for all models: the bytes in order, read
as UTF-8. If the model's folder has no tokenizer.json, tokens 0 to 255 are the bytes themselves.
"""

import codecs
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from equipoise.formats.end_tokens import read_end_tokens
from equipoise.formats.errors import FormatError
from equipoise.gateway.errors import GatewayError
from equipoise.gateway.fields import is_whole
from equipoise.gateway.tokenizer_file import read_tokenizer_file

_NUM_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer:
    """The tokens of one model."""

    bytes_of: tuple[bytes, ...]
    """The bytes of each token of the vocabulary, empty for special tokens, which have no text."""

    end_tokens: frozenset[int]
    """The tokens with which the model ends a text."""

    encode_text: Callable[[str, bool], Sequence[int]]
    """A text's tokens; the second argument says whether to add those that begin every text."""

    special: Mapping[int, bytes] = field(default_factory=dict)
    """How special tokens are written, for clients that want to see them."""

    @classmethod
    def of_checkpoint(cls, folder: Path) -> "Tokenizer":
        """Load the tokenizer of the model whose config.json is in `folder`.

        Raises:
            GatewayError: a file is missing or damaged, or the kind of tokenizer is not supported.
        """
        path = folder / "config.json"
        vocab_size = _vocab_size(path)
        try:
            end_tokens = read_end_tokens(folder, vocab_size=vocab_size)
        except FormatError as error:
            raise GatewayError(str(error)) from None
        if (folder / "tokenizer.json").exists():
            read = read_tokenizer_file(folder, vocab_size=vocab_size)
            return cls(
                bytes_of=read.bytes_of,
                end_tokens=end_tokens,
                encode_text=read.encode_text,
                special=read.special,
            )
        if vocab_size not in range(_NUM_BYTES, 2 * _NUM_BYTES):
            raise GatewayError(
                f"{folder}: there is no tokenizer.json, and the tokens of a model with vocab_size "
                f"{vocab_size} are not bytes: add the model's tokenizer.json"
            )
        special = (b"",) * (vocab_size - _NUM_BYTES)
        return cls(
            bytes_of=(*(bytes([byte]) for byte in range(_NUM_BYTES)), *special),
            end_tokens=end_tokens,
            encode_text=lambda text, _: text.encode(),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self.bytes_of)

    def encode(self, text: str, *, begins: bool = True) -> tuple[int, ...]:
        """A text's tokens, after those that begin every text if `begins`.

        Raises:
            UnicodeEncodeError: the text contains an unpaired surrogate.
        """
        text.encode()
        return tuple(self.encode_text(text, begins))

    def decoder(
        self, *, with_special: bool = False, keeping: Collection[str] = ()
    ) -> "TokenDecoder":
        """A new incremental decoder. Special tokens have text if `with_special` or in `keeping`."""
        kept = {
            token: text
            for token, text in self.special.items()
            if with_special or (keeping and text.decode() in keeping)
        }
        return TokenDecoder(self.bytes_of, kept)

    def decode(self, tokens: Sequence[int]) -> str:
        """The whole text of tokens."""
        return self.decoder().read(tokens, final=True)


class TokenDecoder:
    """Decodes tokens as they arrive; never half a character. Invalid UTF-8 becomes U+FFFD.

    The text is the same however the tokens are grouped.
    """

    def __init__(
        self, bytes_of: Sequence[bytes], special: Mapping[int, bytes] | None = None
    ) -> None:
        self._bytes_of = bytes_of
        self._special = special or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, tokens: Sequence[int], *, final: bool) -> str:
        """The text that these tokens complete; with `final` also an incomplete character."""
        special = self._special
        data = b"".join(special.get(token) or self._bytes_of[token] for token in tokens)
        return self._decoder.decode(data, final=final)


def _vocab_size(path: Path) -> int:
    """The size of the vocabulary, from config.json."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        vocab_size = config["vocab_size"]
    except OSError as error:
        raise GatewayError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise GatewayError(f"{path}: not a model's config with a vocab_size") from None
    if not is_whole(vocab_size) or vocab_size < 1:
        raise GatewayError(f"{path}: vocab_size {vocab_size!r} is not a positive whole number")
    return int(vocab_size)
