"""`BlockPool`: which block of the latent cache is whose. `BlockTable`: one sequence's blocks.

Pure accounting: no torch, clock or threads. A full block is known by its tokens and all before
them, so that sequences which begin alike share it, also when the first of them is long gone: a
block that nobody holds stays findable until its memory is wanted, the longest unused one first.
Latents depend on neither layout nor epoch, so what is found is good after a switch as before.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence

BlockKey = bytes
"""A digest of a block's tokens and all tokens before them: nobody can make two that are equal."""

_ROOT: BlockKey = b""
_KEY_BYTES = 16


class BlockPool:
    """`num_blocks` blocks of `block_tokens` positions; each is free, held by some, or findable.

    A findable block that nobody holds counts as available, as a free one does.
    """

    def __init__(self, *, num_blocks: int, block_tokens: int) -> None:
        assert num_blocks >= 1
        assert block_tokens >= 1
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free = list(reversed(range(num_blocks)))
        self._num_holders = [0] * num_blocks
        self._key_of: dict[int, BlockKey] = {}
        self._block_of: dict[BlockKey, int] = {}
        # Findable blocks that nobody holds, the longest unused first; a dict keeps the order.
        self._idle: dict[int, None] = {}

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Blocks that `take` can still give."""
        return len(self._free) + len(self._idle)

    @property
    def num_findable(self) -> int:
        """Full blocks that a sequence which begins alike would find, held or not."""
        return len(self._block_of)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many positions."""
        return -(-num_tokens // self.block_tokens)

    def take(self) -> int | None:
        """A block to write, held once; None when all are held."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block = next(iter(self._idle))
            del self._idle[block]
            del self._block_of[self._key_of.pop(block)]
        else:
            return None
        self._num_holders[block] = 1
        return block

    def find(self, key: BlockKey) -> int | None:
        """The block with these tokens behind these others, if there is one; not held by that."""
        return self._block_of.get(key)

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds: holding them leaves fewer available."""
        return sum(block in self._idle for block in blocks)

    def hold(self, block: int) -> None:
        """Hold a block that was found once more."""
        self._idle.pop(block, None)
        self._num_holders[block] += 1

    def publish(self, block: int, key: BlockKey) -> None:
        """Let a full block be found; nothing changes if one with the same key can be."""
        assert self._num_holders[block] > 0
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key], self._key_of[block] = block, key

    def forget(self, block: int) -> bool:
        """Let a block not be found any more, unless others hold it too; whether it is only ours."""
        if self._num_holders[block] > 1:
            return False
        if block in self._key_of:
            del self._block_of[self._key_of.pop(block)]
        return True

    def release(self, block: int) -> None:
        """Give a block back, once for each time that it was taken or held."""
        assert self._num_holders[block] > 0
        self._num_holders[block] -= 1
        if self._num_holders[block] == 0:
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)


class BlockTable:
    """The blocks that one sequence holds, in the order of its positions."""

    def __init__(self, pool: BlockPool, tokens: Sequence[int]) -> None:
        """Hold the blocks that are found for a sequence that begins with these tokens.

        The last token is never among them, because it must run to say what follows.
        """
        self._pool = pool
        self._blocks: list[int] = []
        self._keys: list[BlockKey] = []
        for key, block in found_blocks(pool, tokens):
            pool.hold(block)
            self._keys.append(key)
            self._blocks.append(block)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks, that of position 0 first."""
        return tuple(self._blocks)

    @property
    def num_found_tokens(self) -> int:
        """Positions whose latents are there already; of use before the first `publish`."""
        return len(self._keys) * self._pool.block_tokens

    def grow(self, num_tokens: int) -> bool:
        """Hold blocks for so many positions; False when there are not enough, some may be taken."""
        while len(self._blocks) < self._pool.blocks_for(num_tokens):
            block = self._pool.take()
            if block is None:
                return False
            self._blocks.append(block)
        return True

    def publish(self, tokens: Sequence[int], *, num_run: int) -> None:
        """Let the blocks be found that `num_run` of the sequence's tokens have filled."""
        size = self._pool.block_tokens
        for index in range(len(self._keys), num_run // size):
            part = tokens[index * size : (index + 1) * size]
            key = _key(self._keys[-1] if self._keys else _ROOT, part)
            self._keys.append(key)
            self._pool.publish(self._blocks[index], key)

    def forget(self) -> list[int]:
        """Let no sequence find the blocks that only this one holds; these blocks."""
        return [block for block in self._blocks if self._pool.forget(block)]

    def release(self) -> None:
        """Give all blocks back, the last first: the beginning of a sequence is wanted longest."""
        while self._blocks:
            self._pool.release(self._blocks.pop())
        self._keys.clear()


def found_blocks(pool: BlockPool, tokens: Sequence[int]) -> list[tuple[BlockKey, int]]:
    """Keys and blocks of the full blocks that are there for a sequence, its last token left out."""
    found: list[tuple[BlockKey, int]] = []
    key, size = _ROOT, pool.block_tokens
    for start in range(0, len(tokens) - size, size):
        key = _key(key, tokens[start : start + size])
        block = pool.find(key)
        if block is None:
            break
        found.append((key, block))
    return found


def _key(before: BlockKey, tokens: Sequence[int]) -> BlockKey:
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=_KEY_BYTES).digest()
