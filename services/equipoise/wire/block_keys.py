"""Keys of blocks of latents: what a prefix cache finds them by, and pools exchange them by."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence

BlockKey = bytes
"""A digest of a block's tokens and all tokens before them, resistant to collisions."""

KEY_BYTES = 16
"""Size of a block's key."""

ROOT: BlockKey = b""
"""What precedes the first block."""


def keys_of(tokens: Sequence[int], *, block_tokens: int) -> Iterator[BlockKey]:
    """Yield the keys of a sequence's full blocks, without its last token."""
    key = ROOT
    for start in range(0, len(tokens) - block_tokens, block_tokens):
        key = key_after(key, tokens[start : start + block_tokens])
        yield key


def key_after(before: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """Return the key of the block with these tokens after the block with key `before`."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=KEY_BYTES).digest()
