"""`Pulls`: blocks of requests whose latents come from another pool, until admission. Pure."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from equipoise.wire.block_keys import BlockKey, keys_of
from equipoise.worker.blocks import BlockPool


@dataclass(slots=True, kw_only=True, eq=False)
class Pull:
    """The beginning of one request's prompt, in blocks."""

    keys: tuple[BlockKey, ...]
    """Keys of the prompt's full blocks, position 0 first."""

    blocks: list[int] = field(default_factory=list)
    """Held blocks: those that were cached, then those to be filled."""

    num_ready: int = 0
    """Blocks that can be found: the first of `blocks`."""

    @property
    def missing(self) -> tuple[BlockKey, ...]:
        """Keys of the blocks that are to be filled."""
        return self.keys[self.num_ready : len(self.blocks)]


class Pulls:
    """The pulls of one worker, by request, oldest first."""

    def __init__(self, blocks: BlockPool) -> None:
        self._blocks = blocks
        self._pulls: dict[int, Pull] = {}

    def num_blocks(self, key: int) -> int:
        """Blocks that a request's pull holds."""
        return len(self._pulls[key].blocks) if key in self._pulls else 0

    def begin(self, key: int, tokens: Sequence[int]) -> Pull:
        """Hold the cached blocks of a prompt, and free ones for the rest, which must be there."""
        pull = Pull(keys=tuple(keys_of(tokens, block_tokens=self._blocks.block_tokens)))
        for block_key in pull.keys:
            found = self._blocks.find(block_key)
            if found is None:
                break
            self._blocks.hold(found)
            pull.blocks.append(found)
        pull.num_ready = len(pull.blocks)
        while len(pull.blocks) < len(pull.keys):
            block = self._blocks.take(as_whole=True)
            assert block is not None
            pull.blocks.append(block)
        self._pulls[key] = pull
        return pull

    def next_block(self, key: int, pull: Pull) -> int | None:
        """The block to fill next; None if the pull gave way or is whole."""
        if self._pulls.get(key) is not pull or not pull.missing:
            return None
        return pull.blocks[pull.num_ready]

    def publish(self, pull: Pull) -> None:
        """The next block is filled and verified."""
        place = pull.num_ready
        pull.blocks[place] = self._blocks.publish(pull.blocks[place], pull.keys[place])
        pull.num_ready += 1

    def stop(self, key: int) -> None:
        """No more blocks arrive: release those that were not filled."""
        pull = self._pulls.get(key)
        while pull is not None and len(pull.blocks) > pull.num_ready:
            self._blocks.release(pull.blocks.pop())

    def end(self, key: int) -> None:
        """The request is admitted, which holds its blocks itself, or it has ended."""
        pull = self._pulls.pop(key, None)
        while pull is not None and pull.blocks:
            self._blocks.release(pull.blocks.pop())

    def give_way(self, keys: Container[int] | None = None) -> bool:
        """End the youngest pull that holds blocks, of these requests; False if there is none."""
        for key in reversed(self._pulls):
            if (keys is None or key in keys) and self._pulls[key].blocks:
                self.end(key)
                return True
        return False
