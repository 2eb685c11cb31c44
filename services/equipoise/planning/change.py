"""`LayoutChange`: a layout told by what it changes in another one of the same pool.

A wave changes a few layers of many; who runs the layout before need not hear the rest again.
`LayoutChanges` are many of them in a row, as one block.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import overload

import numpy as np
import numpy.typing as npt

from equipoise.planning.arrays import Bools, Slots
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout
from equipoise.planning.shares import even_shares

DIGEST_BYTES = 16
"""BLAKE2b-128 over those of a layout's layers."""

Cells = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutChange:
    """What differs. `cells` are uint32 [changes], ascending, each layer * slots + slot.

    `expert_of_cell`, int32 [changes], is what they hold; `share_of_cell`, int32 [changes], the
    shares they serve, None if the new layout splits every expert evenly. `digest` is that of the
    whole new layout: a number alone does not prove that both sides change the same one.
    """

    generation: int
    cells: Cells
    expert_of_cell: Slots
    share_of_cell: Slots | None
    digest: bytes

    @staticmethod
    def between(base: Layout, target: Layout) -> "LayoutChange":
        """What turns `base` into `target`, another layout of the same ranks."""
        assert base.expert_of_slot.shape == target.expert_of_slot.shape, "ranks of one epoch"
        every_layer = range(base.num_layers)
        return changes_by_layers(
            base, target, batches=[every_layer], first_generation=target.generation
        )[0]

    def applied_to(self, base: Layout) -> Layout:
        """The whole new layout.

        Raises:
            InvalidLayoutError: there is no such cell, what results is no layout, or is another one
                than was meant: `base` is not what the change is of.
        """
        if self.cells.size and int(self.cells.max()) >= base.expert_of_slot.size:
            raise InvalidLayoutError(
                f"cell {int(self.cells.max())} does not exist among {base.num_layers} layers x "
                f"{base.num_slots} slots"
            )
        experts = base.expert_of_slot.copy()
        experts.ravel()[self.cells] = self.expert_of_cell
        shares = None
        if self.share_of_cell is not None:
            shares = base.shares().copy()
            shares.ravel()[self.cells] = self.share_of_cell
        layout = base.with_placement(experts, generation=self.generation, share_of_slot=shares)
        _keep_digests_of_others(layout, base, np.unique(self.cells // base.num_slots).tolist())
        if digest(layout) != self.digest:
            raise InvalidLayoutError(
                f"generation {self.generation} is told as a change of another layout than "
                f"generation {base.generation} here"
            )
        return layout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutChanges(Sequence[LayoutChange]):
    """Changes one after the other, each told against the layout before it.

    They are kept as one block, because dozens of objects with arrays of their own take longer to
    hand to another process than to make. Change c has the cells from first_cell[c] to
    first_cell[c + 1]; `share_of_cell` counts in changes that tell shares. `digests` are those of
    all changes.
    """

    first_generation: int
    first_cell: tuple[int, ...]
    cells: Cells
    expert_of_cell: Slots
    share_of_cell: Slots
    tells_shares: tuple[bool, ...]
    digests: bytes

    def __len__(self) -> int:
        return len(self.tells_shares)

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
            share_of_cell=self.share_of_cell[of_change] if self.tells_shares[numbers] else None,
            digest=self.digests[numbers * DIGEST_BYTES : (numbers + 1) * DIGEST_BYTES],
        )


def changes_by_layers(
    base: Layout, target: Layout, *, batches: Sequence[Sequence[int]], first_generation: int
) -> LayoutChanges:
    """From `base` to `target`, layers of one batch after those of the other, a change a batch.

    What a change leads to is valid without being made: layers do not know each other, and each of
    them is one of two valid layouts'. Numbers count from `first_generation`, and layers that no
    batch names stay as they are in `base`.
    """
    layers = np.array([layer for batch in batches for layer in sorted(batch)], dtype=np.int64)
    differs = base.expert_of_slot[layers] != target.expert_of_slot[layers]
    tells_shares = (False,) * len(batches)
    shares = np.zeros_like(base.expert_of_slot)
    uneven, target_uneven = _uneven_layers(base), _uneven_layers(target)
    if uneven.any() or target_uneven.any():
        tells_shares = tuple(_any_after_each(batches, uneven, target_uneven))
        shares = target.shares()
        is_told = np.repeat(tells_shares, [len(batch) for batch in batches])[:, None]
        differs |= is_told & (base.shares() != shares)[layers]
    # Cells in the order of the changes, then as they are numbered.
    told = np.flatnonzero(differs)
    ends = np.searchsorted(told, np.arange(len(layers) + 1) * base.num_slots)
    places = np.arange(len(layers))
    cells = told + np.repeat((layers - places) * base.num_slots, np.diff(ends))
    rows = accumulate((len(batch) for batch in batches), initial=0)
    return LayoutChanges(
        first_generation=first_generation,
        first_cell=tuple(ends[list(rows)].tolist()),
        cells=cells.astype(np.uint32),
        expert_of_cell=target.expert_of_slot.ravel()[cells],
        share_of_cell=shares.ravel()[cells] if any(tells_shares) else np.empty(0, dtype=np.int32),
        tells_shares=tells_shares,
        digests=_digests_after_each(batches, base, target),
    )


def _any_after_each(
    batches: Iterable[Sequence[int]],
    of_base: Bools,
    of_target: Bools,
) -> Iterator[bool]:
    """Whether any layer is so after each batch, where the layers named are those of the target."""
    so_far = of_base.copy()
    for batch in batches:
        so_far[batch] = of_target[batch]
        yield bool(so_far.any())


def _digests_after_each(batches: Sequence[Sequence[int]], base: Layout, target: Layout) -> bytes:
    """The digests of the whole layouts after each batch, one after the other."""
    digests = list(_digests_of_layers(base))
    of_target = _told_of_layers(target, chain.from_iterable(batches))
    after: list[bytes] = []
    for batch in batches:
        for layer in batch:
            digests[layer] = next(of_target)
        after.append(_digest(digests))
    return b"".join(after)


def digest(layout: Layout) -> bytes:
    """16 bytes that tell placements, shares included, apart; generations do not count."""
    return _digest(_digests_of_layers(layout))


def _digest(of_layers: Iterable[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(of_layers), digest_size=DIGEST_BYTES).digest()


def _digests_of_layers(layout: Layout) -> tuple[bytes, ...]:
    """Of each layer; the layout keeps them."""
    if layout.digest_of_layer is None:
        found = tuple(_told_of_layers(layout, range(layout.num_layers)))
        object.__setattr__(layout, "digest_of_layer", found)
        return found
    return layout.digest_of_layer


def _keep_digests_of_others(layout: Layout, base: Layout, layers: Sequence[int]) -> None:
    """Only `layers` differ from those of `base`: the others need not be read again."""
    if base.share_of_slot is not None or layout.share_of_slot is not None:
        return  # Shares may become even in other layers too.
    digests = list(_digests_of_layers(base))
    for layer, found in zip(layers, _told_of_layers(layout, layers), strict=True):
        digests[layer] = found
    object.__setattr__(layout, "digest_of_layer", tuple(digests))


def _told_of_layers(layout: Layout, layers: Iterable[int]) -> Iterator[bytes]:
    """Digests of layers' experts and, if they are uneven, shares: one that stays is told once."""
    if layout.digest_of_layer is not None:
        yield from (layout.digest_of_layer[layer] for layer in layers)
        return
    experts = layout.expert_of_slot.astype("<i4", copy=False)
    shares = layout.share_of_slot
    if shares is None:
        for layer in layers:
            yield _digest([experts[layer].tobytes()])
        return
    uneven, shares = _uneven_layers(layout), shares.astype("<i4", copy=False)
    for layer in layers:
        told = experts[layer].tobytes()
        yield _digest([told, shares[layer].tobytes()] if uneven[layer] else [told])


def _uneven_layers(layout: Layout) -> Bools:
    """Layers, [layers], in which an expert is not split evenly."""
    if layout.share_of_slot is None:
        return np.zeros(layout.num_layers, dtype=np.bool_)
    even = even_shares(layout.expert_of_slot, num_experts=layout.num_experts)
    uneven: Bools = (layout.share_of_slot != even).any(axis=1)
    return uneven
