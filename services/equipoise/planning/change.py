"""`LayoutChange`: a layout told by what it changes in another one of the same pool.

A wave changes a few layers of many; who runs the layout before need not hear the rest again.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout
from equipoise.planning.shares import even_shares

DIGEST_BYTES = 16
"""BLAKE2b-128 over those of a layout's layers."""

Cells = npt.NDArray[np.uint32]
Values = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutChange:
    """What differs. `cells` are uint32 [changes], ascending, each layer * slots + slot.

    `expert_of_cell`, int32 [changes], is what they hold; `share_of_cell`, int32 [changes], the
    shares they serve, None if the new layout splits every expert evenly. `digest` is that of the
    whole new layout: a number alone does not prove that both sides change the same one.
    """

    generation: int
    cells: Cells
    expert_of_cell: Values
    share_of_cell: Values | None
    digest: bytes

    @staticmethod
    def between(base: Layout, target: Layout) -> "LayoutChange":
        """What turns `base` into `target`, another layout of the same ranks."""
        assert base.expert_of_slot.shape == target.expert_of_slot.shape, "ranks of one epoch"
        every_layer = [list(range(base.num_layers))]
        (whole,) = changes_by_layers(
            base, target, batches=every_layer, first_generation=target.generation
        )
        return whole

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
        if digest(layout) != self.digest:
            raise InvalidLayoutError(
                f"generation {self.generation} is told as a change of another layout than "
                f"generation {base.generation} here"
            )
        return layout


def changes_by_layers(
    base: Layout, target: Layout, *, batches: Iterable[list[int]], first_generation: int
) -> tuple[LayoutChange, ...]:
    """From `base` to `target`, layers of one batch after those of the other, a change a batch.

    Each change is told against the layout before it. What it leads to is valid without being made:
    layers do not know each other, and each of them is one of two valid layouts'. Numbers count from
    `first_generation`, and layers that no batch names stay as they are in `base`.
    """
    digests, target_digests = _digests_of_layers(base), _digests_of_layers(target)
    uneven, target_uneven = _uneven_layers(base), _uneven_layers(target)
    moved = base.expert_of_slot != target.expert_of_slot
    may_be_uneven = bool(uneven.any() or target_uneven.any())
    shares = target.shares() if may_be_uneven else np.zeros_like(base.expert_of_slot)
    reshared = (base.shares() != shares) if may_be_uneven else np.zeros_like(moved)
    cells_moved = _cells_of_layers(moved)
    cells_told = _cells_of_layers(moved | reshared) if may_be_uneven else cells_moved
    experts_of_cells, shares_of_cells = target.expert_of_slot.ravel(), shares.ravel()
    made: list[LayoutChange] = []
    for generation, batch in enumerate(batches, start=first_generation):
        for layer in batch:
            digests[layer] = target_digests[layer]
            uneven[layer] = target_uneven[layer]
        tells_shares = may_be_uneven and bool(uneven.any())
        of_layers = cells_told if tells_shares else cells_moved
        cells = np.concatenate([of_layers[layer] for layer in sorted(batch)])
        made.append(
            LayoutChange(
                generation=generation,
                cells=cells,
                expert_of_cell=experts_of_cells[cells],
                share_of_cell=shares_of_cells[cells] if tells_shares else None,
                digest=_digest(digests),
            )
        )
    return tuple(made)


def _cells_of_layers(differs: npt.NDArray[np.bool_]) -> list[Cells]:
    """Of [layers, slots] that differ: each layer's cells, ascending."""
    num_layers, num_slots = differs.shape
    cells = np.flatnonzero(differs).astype(np.uint32)
    bounds = np.searchsorted(cells, num_slots * np.arange(1, num_layers))
    return np.split(cells, bounds)


def digest(layout: Layout) -> bytes:
    """16 bytes that tell placements, shares included, apart; generations do not count."""
    return _digest(_digests_of_layers(layout))


def _digest(digests: Iterable[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(digests), digest_size=DIGEST_BYTES).digest()


def _digests_of_layers(layout: Layout) -> list[bytes]:
    """Of each layer's experts and, if they are uneven, shares: one that stays is told once."""
    uneven, shares = _uneven_layers(layout), layout.share_of_slot
    digests: list[bytes] = []
    for layer, experts in enumerate(layout.expert_of_slot.astype("<i4", copy=False)):
        told = hashlib.blake2b(experts.tobytes(), digest_size=DIGEST_BYTES)
        if shares is not None and uneven[layer]:
            told.update(shares[layer].astype("<i4", copy=False).tobytes())
        digests.append(told.digest())
    return digests


def _uneven_layers(layout: Layout) -> npt.NDArray[np.bool_]:
    """Layers, [layers], in which an expert is not split evenly."""
    if layout.share_of_slot is None:
        return np.zeros(layout.num_layers, dtype=np.bool_)
    even = even_shares(layout.expert_of_slot, num_experts=layout.num_experts)
    uneven: npt.NDArray[np.bool_] = (layout.share_of_slot != even).any(axis=1)
    return uneven
