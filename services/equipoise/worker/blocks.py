"""`BlockPool`: who holds which block of the latent cache. `BlockTable`: one sequence's blocks.

Pure accounting: no torch, clock or threads. A full block is identified by its tokens and all tokens
before them, so sequences with the same prefix share it, even if the first of them ended long ago: a
block without a holder stays cached until its memory is needed, least recently used first. Latents
depend on neither layout nor epoch, so cached blocks stay valid after a switch.

Blocks may hold NaN if nothing was generated from what was written to them. Those are suspect, and
have to be cleared before another sequence writes a part of them: a masked position weighs 0, but
0 x NaN is NaN.
"""

from collections.abc import Iterable, Sequence

from equipoise.wire.block_keys import ROOT, BlockKey, key_after


class BlockPool:
    """`num_blocks` blocks of `block_tokens` positions; each is free, held, or cached.

    A cached block without a holder counts as available, like a free one.
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
        # Cached blocks without a holder, least recently used first; a dict keeps the order.
        self._idle: dict[int, None] = {}
        self._suspects: set[int] = set()
        self._to_clear: list[int] = []

    @property
    def num_used(self) -> int:
        """Blocks with a holder."""
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Blocks that `take` can still return."""
        return len(self._free) + len(self._idle)

    @property
    def num_findable(self) -> int:
        """Cached blocks, held or not."""
        return len(self._block_of)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for this many positions."""
        return -(-num_tokens // self.block_tokens)

    def take(self, *, as_whole: bool = False) -> int | None:
        """Take a block to write, held once; None when all are held.

        If it is suspect, it has to be cleared first, unless it is written `as_whole` or not at all.
        """
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block = next(iter(self._idle))
            del self._idle[block]
            del self._block_of[self._key_of.pop(block)]
        else:
            return None
        self._num_holders[block] = 1
        if block in self._suspects and not as_whole:
            self._suspects.remove(block)
            self._to_clear.append(block)
        return block

    def take_to_clear(self) -> list[int]:
        """Blocks that have been taken since the last call and must be cleared before they run."""
        blocks, self._to_clear = self._to_clear, []
        return blocks

    def find(self, key: BlockKey) -> int | None:
        """The cached block with this key, or None. Does not hold it."""
        return self._block_of.get(key)

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks have no holder; holding those leaves fewer available."""
        return sum(block in self._idle for block in blocks)

    def hold(self, block: int) -> None:
        """Hold a cached block."""
        self._idle.pop(block, None)
        self._num_holders[block] += 1

    def publish(self, block: int, key: BlockKey) -> int:
        """Cache a full block; returns the one with this key, held in its place if it is another."""
        assert self._num_holders[block] > 0
        cached = self._block_of.setdefault(key, block)
        if cached == block:
            self._suspects.discard(block)
            self._key_of[block] = key
        else:
            self.hold(cached)
            self.suspect(block)
            self.release(block)
        return cached

    def suspect(self, block: int) -> None:
        """Have a block cleared before it is written again, because it may hold NaN."""
        self._suspects.add(block)

    def forget(self, block: int) -> None:
        """Uncache a held block that is suspect; others that hold it keep it until they end."""
        self.suspect(block)
        if block in self._key_of:
            del self._block_of[self._key_of.pop(block)]

    def forget_all(self) -> None:
        """Uncache all blocks, because their latents may be wrong."""
        self._free += self._idle
        self._idle.clear()
        self._key_of.clear()
        self._block_of.clear()

    def release(self, block: int) -> None:
        """Give up one hold of a block, from `take` or `hold`."""
        assert self._num_holders[block] > 0
        self._num_holders[block] -= 1
        if self._num_holders[block] == 0:
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)


class BlockTable:
    """The blocks that one sequence holds, in order of position."""

    def __init__(self, pool: BlockPool, keys: Iterable[BlockKey]) -> None:
        """Hold the cached blocks of a sequence whose full blocks have these keys.

        Its last token is never in them, because it must run to predict the next one.
        """
        self._pool = pool
        self._blocks: list[int] = []
        self._keys: list[BlockKey] = []
        self._num_given = 0
        for key, block in found_blocks(pool, keys):
            pool.hold(block)
            self._keys.append(key)
            self._blocks.append(block)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks, position 0 first."""
        return tuple(self._blocks)

    @property
    def num_found_tokens(self) -> int:
        """Positions whose latents were cached; valid before the first `publish`."""
        return len(self._keys) * self._pool.block_tokens

    def grow(self, num_tokens: int) -> bool:
        """Hold blocks for this many positions. False, with some taken, if there are too few."""
        while len(self._blocks) < self._pool.blocks_for(num_tokens):
            block = self._pool.take()
            if block is None:
                return False
            self._blocks.append(block)
        return True

    def publish(self, tokens: Sequence[int], *, num_run: int) -> None:
        """Cache the blocks that the first `num_run` of the sequence's tokens have filled."""
        size = self._pool.block_tokens
        for index in range(len(self._keys), num_run // size):
            part = tokens[index * size : (index + 1) * size]
            key = key_after(self._keys[-1] if self._keys else ROOT, part)
            self._keys.append(key)
            self._blocks[index] = self._pool.publish(self._blocks[index], key)

    def forget(self) -> None:
        """Uncache all blocks: they are suspect."""
        for block in self._blocks:
            self._pool.forget(block)

    def give_published(self) -> list[int]:
        """Hand the holds of the full blocks that ran to the caller."""
        published = self._blocks[: len(self._keys)]
        del self._blocks[: len(self._keys)]
        self._num_given += len(published)
        return published

    def release(self, *, num_sound: int) -> None:
        """Give up all blocks, the last first, so that a sequence's start stays cached longest.

        Blocks beyond the first `num_sound` positions are suspect.
        """
        num_sound_blocks = num_sound // self._pool.block_tokens - self._num_given
        while self._blocks:
            block = self._blocks.pop()
            if len(self._blocks) >= num_sound_blocks:
                self._pool.suspect(block)
            self._pool.release(block)
        self._keys.clear()


def found_blocks(pool: BlockPool, keys: Iterable[BlockKey]) -> list[tuple[BlockKey, int]]:
    """Keys and blocks of a sequence's full blocks up to the first that is not cached."""
    found: list[tuple[BlockKey, int]] = []
    for key in keys:
        block = pool.find(key)
        if block is None:
            break
        found.append((key, block))
    return found
