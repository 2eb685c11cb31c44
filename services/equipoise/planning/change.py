"""`LayoutChange`: a layout expressed as its difference from another layout of the same pool.

A wave changes few of many layers, so a receiver that runs the layout before needs only these.
`LayoutChanges` is a sequence of changes in one block.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

import numpy as np
import numpy.typing as npt

from equipoise.planning.arrays import Bools, Slots
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import DIGEST_BYTES, Layout, layer_digest, whole_digest

Cells = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutChange:
    """The difference between two layouts."""

    generation: int
    """Generation of the new layout."""
    cells: Cells
    """uint32 [changes], ascending: layer * slots + slot of each changed slot."""
    expert_of_cell: Slots
    """int32 [changes]: the experts that these slots hold."""
    share_of_cell: Slots | None
    """int32 [changes]: their shares; None if the new layout splits every expert evenly."""
    digest: bytes
    """Digest of the whole new layout: a generation alone does not prove that both sides start from
    the same one."""

    @staticmethod
    def between(base: Layout, target: Layout) -> "LayoutChange":
        """Return the change from `base` to `target`, another layout of the same ranks."""
        assert base.expert_of_slot.shape == target.expert_of_slot.shape, "ranks of one epoch"
        every_layer = range(base.num_layers)
        return changes_by_layers(
            base, target, batches=[every_layer], first_generation=target.generation
        )[0]

    def applied_to(self, base: Layout) -> Layout:
        """Return the whole new layout.

        Raises:
            InvalidLayoutError: a cell does not exist, the result is not a valid layout, or its
                digest differs, because the change was made for another base.
        """
        if self.cells.size and int(self.cells.max()) >= base.expert_of_slot.size:
            raise InvalidLayoutError(
                f"cell {int(self.cells.max())} does not exist among {base.num_layers} layers x "
                f"{base.num_slots} slots"
            )
        experts = base.expert_of_slot.copy()
        experts.ravel()[self.cells] = self.expert_of_cell
        shares, digests = None, None
        if self.share_of_cell is not None:
            shares = base.shares().copy()
            shares.ravel()[self.cells] = self.share_of_cell
        elif base.share_of_slot is None:  # Then only the changed layers need a new digest.
            known = list(base.layer_digests())
            for layer in np.unique(self.cells // base.num_slots).tolist():
                known[layer] = layer_digest(experts[layer], None)
            digests = tuple(known)
        layout = base.with_placement(
            experts, generation=self.generation, share_of_slot=shares, known_digests=digests
        )
        if layout.digest() != self.digest:
            raise InvalidLayoutError(
                f"generation {self.generation} is a change to another layout than generation "
                f"{base.generation} here"
            )
        return layout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutChanges(Sequence[LayoutChange]):
    """A chain of changes, each relative to the layout before it.

    One block, because dozens of objects with arrays of their own take longer to send to another
    process than to compute.
    """

    first_generation: int
    """Generation of the first change; the others follow."""
    first_cell: tuple[int, ...]
    """Change c has the cells from first_cell[c] to first_cell[c + 1]."""
    cells: Cells
    """Cells of all changes."""
    expert_of_cell: Slots
    """Experts of all cells."""
    share_of_cell: Slots
    """Shares of all cells; valid for the changes with `has_shares`."""
    has_shares: tuple[bool, ...]
    """Whether each change leads to a layout with uneven shares."""
    digests: bytes
    """Digests of the layouts after each change."""

    def __len__(self) -> int:
        return len(self.has_shares)

    @overload
    def __getitem__(self, index: int) -> LayoutChange: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[LayoutChange, ...]: ...

    def __getitem__(self, index: int | slice) -> LayoutChange | tuple[LayoutChange, ...]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return tuple(self[number] for number in numbers)
        of_change = slice(self.first_cell[numbers], self.first_cell[numbers + 1])
        return LayoutChange(
            generation=self.first_generation + numbers,
            cells=self.cells[of_change],
            expert_of_cell=self.expert_of_cell[of_change],
            share_of_cell=self.share_of_cell[of_change] if self.has_shares[numbers] else None,
            digest=self.digests[numbers * DIGEST_BYTES : (numbers + 1) * DIGEST_BYTES],
        )


def changes_by_layers(
    base: Layout, target: Layout, *, batches: Sequence[Sequence[int]], first_generation: int
) -> LayoutChanges:
    """Lead from `base` to `target`, one batch of layers per change.

    Every layout on the way is valid, because each of its layers is that of one of two valid
    layouts, and layers are independent. Layers in no batch stay as they are in `base`.
    """
    layers = np.array([layer for batch in batches for layer in sorted(batch)], dtype=np.int64)
    differs = base.expert_of_slot[layers] != target.expert_of_slot[layers]
    has_shares = (False,) * len(batches)
    shares = np.zeros_like(base.expert_of_slot)
    uneven, target_uneven = base.uneven_layers(), target.uneven_layers()
    if uneven.any() or target_uneven.any():
        has_shares = tuple(_any_after_each(batches, uneven, target_uneven))
        shares = target.shares()
        is_sent = np.repeat(np.array(has_shares, dtype=np.bool_), [len(one) for one in batches])
        differs |= is_sent[:, None] & (base.shares() != shares)[layers]
    # Cells in the order of the changes, ascending within each.
    sent = np.flatnonzero(differs)
    ends = np.searchsorted(sent, np.arange(len(layers) + 1) * base.num_slots)
    places = np.arange(len(layers))
    cells = sent + np.repeat((layers - places) * base.num_slots, np.diff(ends))
    rows = accumulate((len(batch) for batch in batches), initial=0)
    return LayoutChanges(
        first_generation=first_generation,
        first_cell=tuple(ends[list(rows)].tolist()),
        cells=cells.astype(np.uint32),
        expert_of_cell=target.expert_of_slot.ravel()[cells],
        share_of_cell=shares.ravel()[cells] if any(has_shares) else np.empty(0, dtype=np.int32),
        has_shares=has_shares,
        digests=_digests_after_each(batches, base, target),
    )


def _any_after_each(
    batches: Iterable[Sequence[int]], of_base: Bools, of_target: Bools
) -> Iterator[bool]:
    """Whether any layer is uneven after each batch."""
    so_far = of_base.copy()
    for batch in batches:
        so_far[batch] = of_target[batch]
        yield bool(so_far.any())


def _digests_after_each(batches: Sequence[Sequence[int]], base: Layout, target: Layout) -> bytes:
    """Concatenate the digests of the whole layouts after each batch."""
    digests, of_target = list(base.layer_digests()), target.layer_digests()
    after: list[bytes] = []
    for batch in batches:
        for layer in batch:
            digests[layer] = of_target[layer]
        after.append(whole_digest(digests, slots_of_rank=target.slots_of_rank))
    return b"".join(after)
