"""`LayoutChange`: a layout told by what it changes in another one of the same pool.

A wave changes a few layers of many; who runs the layout before need not hear the rest again.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout

DIGEST_BYTES = 16
"""BLAKE2b-128 over a layout's experts and shares."""

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

    @classmethod
    def between(cls, base: Layout, target: Layout) -> "LayoutChange":
        """What turns `base` into `target`, another layout of the same ranks."""
        assert base.expert_of_slot.shape == target.expert_of_slot.shape, "ranks of one epoch"
        differs = base.expert_of_slot != target.expert_of_slot
        if target.share_of_slot is not None:
            differs = differs | (base.shares() != target.share_of_slot)
        cells = np.flatnonzero(differs).astype(np.uint32)
        shares = target.share_of_slot
        return cls(
            generation=target.generation,
            cells=cells,
            expert_of_cell=target.expert_of_slot.ravel()[cells],
            share_of_cell=None if shares is None else shares.ravel()[cells],
            digest=digest(target),
        )

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


def steps(base: Layout, layouts: Sequence[Layout]) -> tuple[LayoutChange, ...]:
    """Layouts that follow on `base`, each told by what it changes in the one before."""
    return tuple(
        LayoutChange.between(before, after) for before, after in pairwise((base, *layouts))
    )


def digest(layout: Layout) -> bytes:
    """16 bytes that tell placements, shares included, apart; generations do not count."""
    tables = [layout.expert_of_slot]
    if layout.share_of_slot is not None:
        tables.append(layout.share_of_slot)
    told = b"".join(table.astype("<i4", copy=False).tobytes() for table in tables)
    return hashlib.blake2b(told, digest_size=DIGEST_BYTES).digest()
