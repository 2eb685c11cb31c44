"""`Verification`: whether the ranks hold the bytes that the checkpoint has.

The truth is the checkpoint's manifest. Rank 0 sends its table of checksums; it is believed only if
it has the digest that the workers of the pool agreed on, so that no rank can make up a truth.
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from equipoise.planning.arrays import EMPTY, Checksums
from equipoise.planning.layout import Layout
from equipoise.planning.moves import checksums_digest
from equipoise.planning.topology import ModelShape, expert_text
from equipoise.pool.member import Member
from equipoise.pool.members import Roster

_Noted = tuple[Member, Layout, Checksums]


class Verification:
    """Compares what the ranks of an epoch report with the checkpoint."""

    def __init__(self, *, roster: Roster) -> None:
        self._roster = roster
        self._table: Checksums | None = None
        self._digest = b""
        # What ranks reported and was not compared yet, by the digest of their worker's table.
        self._waiting: defaultdict[bytes, dict[int, _Noted]] = defaultdict(dict)
        self._verified: set[int] = set()

    @property
    def table(self) -> Checksums | None:
        """Checksums of all experts, uint8 [layers, experts, 16]; None until rank 0 has sent it."""
        of_ranks = any(one.hello.experts_digest == self._digest for one in self._roster.seated())
        return self._table if of_ranks else None

    @property
    def complete(self) -> bool:
        """Whether every rank of the epoch holds the checkpoint's bytes."""
        return 0 < self._roster.num_ranks == len(self._verified)

    def begin_epoch(self) -> None:
        """Forget what the ranks of the epoch before reported."""
        self._waiting.clear()
        self._verified.clear()

    def learn(self, member: Member, table: Checksums) -> str | None:
        """Take over the table of a worker, unless it is not the one that its Hello announced."""
        digest = checksums_digest(table)
        if digest != member.hello.experts_digest:
            return (
                f"it sent a table of checksums with digest {digest.hex()}, not the announced "
                f"{member.hello.experts_digest.hex()}"
            )
        self._table, self._digest = table, digest
        return None

    def note(self, member: Member, layout: Layout, checksums: Checksums) -> None:
        """A rank reported what its slots hold in a layout, uint8 [layers, slots_per_rank, 16]."""
        assert member.rank is not None, "only ranks hold experts"
        self._verified.discard(member.rank)
        for of_ranks in self._waiting.values():
            of_ranks.pop(member.rank, None)  # Perhaps of another process.
        self._waiting[member.hello.experts_digest][member.rank] = (member, layout, checksums)

    def difference(
        self, member: Member, layout: Layout, rank: int, checksums: Checksums
    ) -> str | None:
        """How what a worker held as this rank of a layout differs; None if it does not.

        It is also None if the table of the worker's checkpoint is unknown, or the shapes differ.
        """
        table, shape = self._table, (layout.num_layers, layout.slots_per_rank)
        if table is None or member.hello.experts_digest != self._digest:
            return None
        if rank >= layout.num_ranks or checksums.shape[:2] != shape:
            return None
        model = member.hello.model
        return _difference(layout, rank, held=checksums, table=table, model=model)

    def compare(self) -> Mapping[Member, str]:
        """Compare what was noted, once the table is known; returns the difference by member.

        A rank is compared only with the table of its own checkpoint.
        """
        table, differences = self._table, dict[Member, str]()
        if table is None:
            return differences
        for rank, (member, layout, checksums) in self._waiting.pop(self._digest, {}).items():
            model = member.hello.model
            difference = _difference(layout, rank, held=checksums, table=table, model=model)
            if difference is None:
                self._verified.add(rank)
            else:
                differences[member] = difference
        return differences


def _difference(
    layout: Layout, rank: int, *, held: Checksums, table: Checksums, model: ModelShape
) -> str | None:
    own = layout.own_slots(rank)
    experts = layout.expert_of_slot[:, own]
    layers = np.arange(layout.num_layers)[:, None]
    # A checksum is compared as two numbers: every rank reports all its slots at every switch.
    wanted = np.ascontiguousarray(table).view(np.uint64)[layers, experts]
    wanted[experts == EMPTY] = 0  # No bytes have no checksum.
    differs = (wanted != np.ascontiguousarray(held).view(np.uint64)).any(axis=2)
    if not differs.any():
        return None
    layer, slot = (int(index) for index in np.argwhere(differs)[0])
    expert = expert_text(int(experts[layer, slot]), shared=model.shared_expert)
    return (
        f"{int(differs.sum())} of its slots differ from the checkpoint; the first is slot "
        f"{own.start + slot} of layer {layer}, for {expert}"
    )
