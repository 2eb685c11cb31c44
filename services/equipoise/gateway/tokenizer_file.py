"""`read_tokenizer_file`: Hugging Face's tokenizer.json, as bytes of tokens.

Owns what that format says about bytes. It is read by the `tokenizers` library; tokens are spelled
by ourselves, because the library's decoder has no notion of a text that is still being written.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HubTokenizer

from equipoise.gateway.errors import GatewayError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpelledFile:
    """The bytes of each token, and how a text becomes tokens; see `tokenizer.Tokenizer`."""

    bytes_of: tuple[bytes, ...]
    encode_text: Callable[[str, bool], Sequence[int]]


def read_tokenizer_file(folder: Path, *, vocab_size: int) -> SpelledFile:
    """Read tokenizer.json of byte-level BPE, and what tokenizer_config.json says to begin with.

    Raises:
        GatewayError: a file is damaged, of another kind, or has tokens that the model has not.
    """
    path = folder / "tokenizer.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        tokenizer = HubTokenizer.from_str(json.dumps(document))
    # The library raises nothing narrower for what it cannot read.
    except Exception as error:  # noqa: BLE001
        raise GatewayError(f"{path}: this is no tokenizer: {error}") from None
    decoder = document.get("decoder") or {}
    if not _is_byte_level(decoder):
        raise GatewayError(
            f"{path}: decoder {decoder.get('type')!r} is not supported: this gateway spells "
            f"byte-level tokens (ByteLevel)"
        )
    added = tokenizer.get_added_tokens_decoder()
    spelled = dict.fromkeys(range(vocab_size), b"")
    for piece, token in tokenizer.get_vocab(with_added_tokens=False).items():
        spelled[token] = _bytes_of(piece)
    for token, one in added.items():
        spelled[token] = b"" if one.special else one.content.encode()
    if len(spelled) > vocab_size:
        raise GatewayError(
            f"{path}: it has token {max(spelled)}, but the model's config says that there are "
            f"{vocab_size}: these are files of two models"
        )
    begin = _begin_token(folder, tokenizer)

    def encode(text: str, begins: bool) -> Sequence[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=begins).ids
        return [begin, *ids] if begins and begin is not None and ids[:1] != [begin] else ids

    return SpelledFile(
        bytes_of=tuple(spelled[token] for token in range(vocab_size)), encode_text=encode
    )


def _is_byte_level(decoder: dict[str, Any]) -> bool:
    if decoder.get("type") == "Sequence":
        return any(_is_byte_level(one) for one in decoder.get("decoders", ()))
    return decoder.get("type") == "ByteLevel"


def _begin_token(folder: Path, tokenizer: HubTokenizer) -> int | None:
    """The token that begins every text, where tokenizer_config.json wants one."""
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise GatewayError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise GatewayError(f"{path}: this is no object")
    if not config.get("add_bos_token"):
        return None
    begin = config.get("bos_token")
    text = begin.get("content") if isinstance(begin, dict) else begin
    found: int | None = tokenizer.token_to_id(text) if isinstance(text, str) else None
    if found is None:
        raise GatewayError(f"{path}: bos_token {begin!r} is no token of tokenizer.json")
    return found


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones are themselves, others follow behind U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_of_letter()


def _bytes_of(piece: str) -> bytes:
    """A token's bytes; one with a letter that stands for no byte is text as it is."""
    if all(letter in _BYTE_OF_LETTER for letter in piece):
        return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
    return piece.encode()
