"""Reads the tokens with which a model ends a text, from the files of its checkpoint."""

import json
from pathlib import Path
from typing import Any

from equipoise.formats.errors import FormatError


def read_end_tokens(folder: Path, *, vocab_size: int) -> frozenset[int]:
    """The `eos_token_id` of config.json and of generation_config.json, which may be lists.

    Raises:
        FormatError: a file cannot be read, or names a token that is not in the vocabulary.
    """
    paths = [folder / "config.json", folder / "generation_config.json"]
    return frozenset(
        token for path in paths if path.exists() for token in _tokens(path, vocab_size=vocab_size)
    )


def _tokens(path: Path, *, vocab_size: int) -> list[int]:
    try:
        end: Any = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from None
    tokens = [] if end is None else end if isinstance(end, list) else [end]
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise FormatError(f"{path}: eos_token_id {token!r} is not in the vocabulary")
    return tokens
