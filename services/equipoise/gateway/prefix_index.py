"""`PrefixIndex`: which prompts' beginnings a rank has probably cached. Pure.

A guess: the rank may have needed the memory since. A wrong guess costs one prefill of a prompt
that was expected to be cached; then the guess is right again.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from equipoise.wire.block_keys import BlockKey

MAX_BLOCKS = 2**18
"""Most blocks of all ranks of a pool together: about 40 MB of memory."""


class PrefixIndex:
    """Keys of the blocks that one rank has computed or fetched, at most `max_blocks`."""

    def __init__(self) -> None:
        self.max_blocks = 0
        # Least recently used first.
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def num_cached(self, keys: Sequence[BlockKey]) -> int:
        """How many of a prompt's blocks are cached, from its beginning on."""
        # A block is forgotten before those that it follows, so cached ones come first.
        return bisect_left(keys, True, key=lambda key: key not in self._keys)

    def note(self, keys: Sequence[BlockKey]) -> None:
        """The rank has all blocks of a prompt now; beginnings are kept longest."""
        for key in reversed(keys[: self.max_blocks]):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.max_blocks:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """The rank's process has started again."""
        self._keys.clear()
