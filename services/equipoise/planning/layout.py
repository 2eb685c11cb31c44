"""`Layout`: which logical expert each physical slot holds, and how much of it each serves.

An invalid one cannot exist.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from equipoise.planning.arrays import ExpertTable, ShareTable, Slots
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.shares import even_shares, fault_in_shares


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """A pool's placement of experts.

    `expert_of_slot` is int32 [layers, slots]: the logical expert that each physical slot holds.
    It is made read-only. Slots divide evenly over `num_ranks`, unless `slots_of_rank` says how many
    each rank has; rank r owns the columns from first_slot[r] to first_slot[r + 1]. `generation`
    numbers the layouts of a pool from 1; it grows and is never reused.

    `share_of_slot` is int32 [layers, slots]: the part of its expert's load that each slot serves,
    in parts of `shares.WHOLE`; 0 is allowed, so that a replica may wait in reserve. It is made
    read-only. None is the even split, and a table that says the same becomes None: equal layouts
    look equal.

    Raises:
        InvalidLayoutError: an expert is missing or out of range in a layer, a rank holds an expert
            twice although it need not, slots do not divide over ranks, or the shares of an expert
            do not sum to the whole.
    """

    generation: int
    num_experts: int
    num_ranks: int
    expert_of_slot: ExpertTable
    slots_of_rank: tuple[int, ...] = ()
    share_of_slot: ShareTable | None = None
    first_slot: tuple[int, ...] = field(init=False)
    """The first slot of each rank, and after the last rank the number of slots."""
    digest_of_layer: tuple[bytes, ...] | None = field(
        init=False, default=None, repr=False, compare=False
    )
    """What `change` found of each layer, kept for the next that asks; None as long as none did."""

    def __post_init__(self) -> None:
        table = np.ascontiguousarray(self.expert_of_slot, dtype=np.int32)
        if table is self.expert_of_slot or table.base is not None:
            table = table.copy()
        table.flags.writeable = False
        object.__setattr__(self, "expert_of_slot", table)
        _check_shape(self)
        if not self.slots_of_rank:
            even = (self.num_slots // self.num_ranks,) * self.num_ranks
            object.__setattr__(self, "slots_of_rank", even)
        object.__setattr__(self, "first_slot", tuple(accumulate(self.slots_of_rank, initial=0)))
        _check(self)
        if self.share_of_slot is not None:
            object.__setattr__(self, "share_of_slot", _uneven(self, self.share_of_slot))

    @property
    def num_layers(self) -> int:
        """MoE layers, rows of the table."""
        return int(self.expert_of_slot.shape[0])

    @property
    def num_slots(self) -> int:
        """Physical slots per layer, over all ranks."""
        return int(self.expert_of_slot.shape[1])

    @property
    def slots_per_rank(self) -> int:
        """Physical slots per layer on each rank; only of ranks with equally many."""
        assert len(set(self.slots_of_rank)) == 1, "ask for slots_of_rank"
        return self.slots_of_rank[0]

    def own_slots(self, rank: int) -> slice:
        """Return the columns of the table that belong to a rank."""
        return slice(self.first_slot[rank], self.first_slot[rank + 1])

    def replica_counts(self) -> Slots:
        """Replicas of each logical expert, int32 [layers, experts]; all at least 1."""
        return count_replicas(self.expert_of_slot, num_experts=self.num_experts)

    def slots_of_expert(self, *, layer: int, expert: int) -> tuple[int, ...]:
        """Physical slots of one layer that hold an expert, ascending."""
        return tuple(int(slot) for slot in np.flatnonzero(self.expert_of_slot[layer] == expert))

    def ranks_of_expert(self, *, layer: int, expert: int) -> tuple[int, ...]:
        """Ranks that hold an expert in a layer, ascending."""
        slots = self.slots_of_expert(layer=layer, expert=expert)
        first_slot = self.first_slot
        return tuple(dict.fromkeys(bisect_right(first_slot, slot) - 1 for slot in slots))

    def shares(self) -> ShareTable:
        """The shares of slots, int32 [layers, slots], those of even splits too."""
        if self.share_of_slot is not None:
            return self.share_of_slot
        return even_shares(self.expert_of_slot, num_experts=self.num_experts)

    def same_placement(self, other: "Layout") -> bool:
        """Whether both hold the same experts in the same slots and serve the same shares of them.

        Generations may differ.
        """
        return (
            self.slots_of_rank == other.slots_of_rank
            and np.array_equal(self.expert_of_slot, other.expert_of_slot)
            and _same_shares(self.share_of_slot, other.share_of_slot)
        )

    def with_placement(
        self,
        expert_of_slot: ExpertTable,
        *,
        generation: int,
        share_of_slot: ShareTable | None = None,
    ) -> "Layout":
        """A layout of the same pool with another number and other tables; no shares: even ones."""
        return Layout(
            generation=generation,
            num_experts=self.num_experts,
            num_ranks=self.num_ranks,
            expert_of_slot=expert_of_slot,
            slots_of_rank=self.slots_of_rank,
            share_of_slot=share_of_slot,
        )


def count_replicas(expert_of_slot: ExpertTable, *, num_experts: int) -> Slots:
    """Slots per logical expert, int32 [layers, experts], of a table with valid ids."""
    num_layers = expert_of_slot.shape[0]
    offsets = np.arange(num_layers, dtype=np.int64)[:, None] * num_experts
    counts = np.bincount((expert_of_slot + offsets).ravel(), minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts).astype(np.int32)


def contiguous_layout(
    *, num_layers: int, num_experts: int, num_ranks: int, slots_per_rank: int, generation: int = 1
) -> Layout:
    """The layout a pool starts with when nothing is known of its load.

    Experts lie in order over the ranks and redundant slots repeat experts from the start, dealt so
    that no rank holds an expert twice while another could.

    Raises:
        InvalidLayoutError: there are fewer slots than experts.
    """
    num_slots = num_ranks * slots_per_rank
    if num_slots < num_experts:
        raise InvalidLayoutError(
            f"{num_ranks} ranks x {slots_per_rank} slots = {num_slots} slots cannot hold "
            f"{num_experts} experts: give each rank at least {-(-num_experts // num_ranks)} slots"
        )
    # Column-major dealing would scatter neighbours; a wrapped sequence cut into ranks keeps them
    # together, and repeats an expert within a rank only if a rank has more slots than experts.
    row = np.arange(num_slots, dtype=np.int32) % num_experts
    return Layout(
        generation=generation,
        num_experts=num_experts,
        num_ranks=num_ranks,
        expert_of_slot=np.tile(row, (num_layers, 1)),
    )


def _check_shape(layout: Layout) -> None:
    table = layout.expert_of_slot
    if table.ndim != 2 or table.shape[0] < 1:
        raise InvalidLayoutError(f"a layout is [layers, slots], not of shape {table.shape}")
    if layout.generation < 1:
        raise InvalidLayoutError(f"generations count from 1, not {layout.generation}")
    if layout.slots_of_rank:
        if len(layout.slots_of_rank) != layout.num_ranks or min(layout.slots_of_rank) < 1:
            raise InvalidLayoutError(
                f"slots_of_rank must have at least 1 for each of {layout.num_ranks} ranks, "
                f"not {layout.slots_of_rank}"
            )
        if sum(layout.slots_of_rank) != table.shape[1]:
            raise InvalidLayoutError(
                f"slots_of_rank has {sum(layout.slots_of_rank)} slots, the table {table.shape[1]}"
            )
    elif layout.num_ranks < 1 or table.shape[1] % layout.num_ranks or not table.shape[1]:
        raise InvalidLayoutError(
            f"{table.shape[1]} slots do not divide over {layout.num_ranks} ranks"
        )


def _check(layout: Layout) -> None:
    table, num_experts = layout.expert_of_slot, layout.num_experts
    if table.min() < 0 or table.max() >= num_experts:
        layer, slot = (int(index) for index in np.argwhere((table < 0) | (table >= num_experts))[0])
        raise InvalidLayoutError(
            f"layer {layer}, slot {slot} holds expert {int(table[layer, slot])}, "
            f"but experts are 0 to {num_experts - 1}"
        )
    is_held = np.zeros((len(table), num_experts), dtype=np.bool_)
    is_held.ravel()[table + np.arange(len(table))[:, None] * num_experts] = True
    if not is_held.all():
        layer, expert = (int(index) for index in np.argwhere(~is_held)[0])
        raise InvalidLayoutError(f"layer {layer} has no slot for expert {expert}")
    _check_no_needless_twins(layout)


def _check_no_needless_twins(layout: Layout) -> None:
    """An expert twice on a rank is waste unless a rank has more slots than there are experts."""
    allowed = -(-max(layout.slots_of_rank) // layout.num_experts)
    num_keys = layout.num_ranks * layout.num_experts
    first_keys = np.arange(0, num_keys, layout.num_experts)
    if num_keys <= np.iinfo(np.int32).max:  # Narrow numbers are sorted sooner.
        first_keys = first_keys.astype(np.int32)
    held = np.repeat(first_keys, layout.slots_of_rank) + layout.expert_of_slot
    held.sort(axis=1)
    twins = held[:, allowed:] == held[:, : layout.num_slots - allowed]
    if twins.any():
        layer, position = (int(index) for index in np.argwhere(twins)[0])
        rank, expert = divmod(int(held[layer, position]), layout.num_experts)
        raise InvalidLayoutError(
            f"layer {layer}: rank {rank} holds expert {expert} "
            f"more than {allowed} time(s); a second copy on one rank carries no extra load"
        )


def _uneven(layout: Layout, shares: ShareTable) -> ShareTable | None:
    """The shares, checked and read-only, or None if they are those of even splits."""
    table, num_experts = layout.expert_of_slot, layout.num_experts
    fault = fault_in_shares(shares, table, num_experts=num_experts)
    if fault is not None:
        raise InvalidLayoutError(fault)
    if np.array_equal(shares, even_shares(table, num_experts=num_experts)):
        return None
    own = np.array(shares, dtype=np.int32)
    own.flags.writeable = False
    return own


def _same_shares(one: ShareTable | None, other: ShareTable | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)
