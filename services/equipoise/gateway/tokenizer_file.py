"""`read_tokenizer_file`: Hugging Face's tokenizer.json as the bytes of each token.

The `tokenizers` library encodes. Decoding is our own, because the library decodes to text only
(also incrementally, by `DecodeStream`), and logprobs report the bytes of each token.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HubTokenizer

from equipoise.gateway.errors import GatewayError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizerFile:
    """The fields of `tokenizer.Tokenizer` that a file determines."""

    bytes_of: tuple[bytes, ...]
    encode_text: Callable[[str, bool], Sequence[int]]
    special: dict[int, bytes]


def read_tokenizer_file(folder: Path, *, vocab_size: int) -> TokenizerFile:
    """Read tokenizer.json of byte-level BPE, and tokenizer_config.json for the first token.

    Raises:
        GatewayError: a file is damaged or of another kind, or has tokens that the model lacks.
    """
    path = folder / "tokenizer.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        tokenizer = HubTokenizer.from_str(json.dumps(document))
    # The library raises nothing narrower for an invalid file.
    except Exception as error:  # noqa: BLE001
        raise GatewayError(f"{path}: not a valid tokenizer: {error}") from None
    decoder = document.get("decoder") or {}
    if not _is_byte_level(decoder):
        raise GatewayError(
            f"{path}: decoder {decoder.get('type')!r} is not supported: this gateway decodes "
            f"byte-level tokens (ByteLevel)"
        )
    # They would silently change prompts; the gateway has its own limits.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = tokenizer.get_added_tokens_decoder()
    bytes_of = dict.fromkeys(range(vocab_size), b"")
    for piece, token in tokenizer.get_vocab(with_added_tokens=False).items():
        bytes_of[token] = _bytes_of(piece)
    for token, one in added.items():
        bytes_of[token] = b"" if one.special else one.content.encode()
    if len(bytes_of) > vocab_size:
        raise GatewayError(
            f"{path}: it has token {max(bytes_of)}, but the model's config has vocab_size "
            f"{vocab_size}: use files of one model"
        )
    begin = _begin_token(folder, tokenizer)

    def encode(text: str, begins: bool) -> Sequence[int]:
        # Unlike `encode`, this lets other threads run meanwhile.
        (encoding,) = tokenizer.encode_batch([text], add_special_tokens=begins)
        ids: list[int] = encoding.ids
        return [begin, *ids] if begins and begin is not None and ids[:1] != [begin] else ids

    return TokenizerFile(
        bytes_of=tuple(bytes_of[token] for token in range(vocab_size)),
        encode_text=encode,
        special={token: one.content.encode() for token, one in added.items() if one.special},
    )


def _is_byte_level(decoder: dict[str, Any]) -> bool:
    if decoder.get("type") == "Sequence":
        return any(_is_byte_level(one) for one in decoder.get("decoders", ()))
    return decoder.get("type") == "ByteLevel"


def _begin_token(folder: Path, tokenizer: HubTokenizer) -> int | None:
    """The token that begins every text, if tokenizer_config.json asks for one."""
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise GatewayError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise GatewayError(f"{path}: not a JSON object")
    if not config.get("add_bos_token"):
        return None
    begin = config.get("bos_token")
    text = begin.get("content") if isinstance(begin, dict) else begin
    found: int | None = tokenizer.token_to_id(text) if isinstance(text, str) else None
    if found is None:
        raise GatewayError(f"{path}: bos_token {begin!r} is not in tokenizer.json")
    return found


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's letters for bytes: printable bytes are themselves, the others follow from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_of_letter()


def _bytes_of(piece: str) -> bytes:
    """A token's bytes; one with a letter that stands for no byte is plain text."""
    if all(letter in _BYTE_OF_LETTER for letter in piece):
        return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
    return piece.encode()
