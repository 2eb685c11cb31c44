"""`Layout`: the logical expert in each physical slot, and the share of its load that it serves.

An invalid layout cannot be constructed.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from itertools import accumulate

import numpy as np

from equipoise.planning.arrays import EMPTY, Bools, ExpertTable, Indices, ShareTable, Slots
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.shares import even_shares, fault_in_shares

DIGEST_BYTES = 16
"""BLAKE2b-128."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """A pool's placement of experts.

    A slot may be empty. Layers may then have different numbers of redundant slots: a rank has room
    for some number of experts over all layers, its places, and each place takes one of any layer.

    Raises:
        InvalidLayoutError: an expert is missing or out of range in a layer, a rank holds an expert
            twice although it need not, slots do not divide evenly over ranks, or the shares of an
            expert do not sum to the whole.
    """

    generation: int
    """Numbers the layouts of a pool from 1. It only grows and is never reused."""
    num_experts: int
    """Logical experts per layer."""
    num_ranks: int
    expert_of_slot: ExpertTable
    """int32 [layers, slots]: the logical expert in each physical slot; EMPTY for none. Made
    read-only."""
    slots_of_rank: tuple[int, ...] = ()
    """Slots of each rank, the most experts that it can hold in a layer; empty divides the slots
    evenly over ranks."""
    share_of_slot: ShareTable | None = None
    """int32 [layers, slots]: the share of its expert's load that each slot serves, in units of
    `shares.WHOLE`. 0 is allowed: such a replica is a reserve. Made read-only. None is the even
    split, and a table equal to it becomes None."""
    known_digests: InitVar[tuple[bytes, ...] | None] = None
    """The result of `layer_digests`, if the caller knows it."""
    first_slot: tuple[int, ...] = field(init=False)
    """First slot of each rank, then the number of slots."""
    _layer_digests: tuple[bytes, ...] | None = field(
        init=False, repr=False, compare=False, default=None
    )
    _digest: bytes = field(init=False, repr=False, compare=False, default=b"")

    def __post_init__(self, known_digests: tuple[bytes, ...] | None) -> None:
        object.__setattr__(self, "_layer_digests", known_digests)
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
        """Number of MoE layers."""
        return int(self.expert_of_slot.shape[0])

    @property
    def num_slots(self) -> int:
        """Physical slots per layer, over all ranks."""
        return int(self.expert_of_slot.shape[1])

    @property
    def slots_per_rank(self) -> int:
        """Physical slots per layer on each rank; all ranks must have equally many."""
        assert len(set(self.slots_of_rank)) == 1, "ranks differ: use slots_of_rank"
        return self.slots_of_rank[0]

    @property
    def has_empty_slots(self) -> bool:
        """Whether a slot is empty."""
        return bool((self.expert_of_slot == EMPTY).any())

    @property
    def used_places(self) -> tuple[int, ...]:
        """Experts that each rank holds, over all layers."""
        return tuple(used_places(self.expert_of_slot, first_slot=self.first_slot).tolist())

    def own_slots(self, rank: int) -> slice:
        """Return the columns of the table that belong to a rank."""
        return slice(self.first_slot[rank], self.first_slot[rank + 1])

    def replica_counts(self) -> Slots:
        """Count the replicas of each logical expert, int32 [layers, experts]; at least 1 each."""
        return count_replicas(self.expert_of_slot, num_experts=self.num_experts)

    def shares(self) -> ShareTable:
        """Return the shares of slots, int32 [layers, slots], also where they are even."""
        if self.share_of_slot is not None:
            return self.share_of_slot
        return even_shares(self.expert_of_slot, num_experts=self.num_experts)

    def same_placement(self, other: "Layout") -> bool:
        """Whether both have the same experts and shares in the same slots, in any generation."""
        return self.digest() == other.digest()

    def with_placement(
        self,
        expert_of_slot: ExpertTable,
        *,
        generation: int,
        share_of_slot: ShareTable | None = None,
        known_digests: tuple[bytes, ...] | None = None,
    ) -> "Layout":
        """Return a layout of the same pool with another generation and other tables."""
        return replace(
            self,
            generation=generation,
            expert_of_slot=expert_of_slot,
            share_of_slot=share_of_slot,
            known_digests=known_digests,
        )

    def uneven_layers(self) -> Bools:
        """Find the layers, [layers], in which an expert is not split evenly."""
        if self.share_of_slot is None:
            return np.zeros(self.num_layers, dtype=np.bool_)
        even = even_shares(self.expert_of_slot, num_experts=self.num_experts)
        uneven: Bools = (self.share_of_slot != even).any(axis=1)
        return uneven

    def layer_digests(self) -> tuple[bytes, ...]:
        """Digest each layer's experts and, where they are uneven, shares. Computed once."""
        if self._layer_digests is not None:
            return self._layer_digests
        found: list[bytes] = []
        for layer, is_uneven in enumerate(self.uneven_layers().tolist()):
            shares = self.share_of_slot[layer] if self.share_of_slot is not None else None
            found.append(layer_digest(self.expert_of_slot[layer], shares if is_uneven else None))
        object.__setattr__(self, "_layer_digests", tuple(found))
        return tuple(found)

    def digest(self) -> bytes:
        """Digest the placement: experts, shares, slots of ranks; the generation does not count.

        Equal on all machines for equal placements. Computed once.
        """
        if not self._digest:
            found = whole_digest(self.layer_digests(), slots_of_rank=self.slots_of_rank)
            object.__setattr__(self, "_digest", found)
        return self._digest


def layer_digest(experts: Slots, shares: Slots | None) -> bytes:
    """Digest one layer: its experts, int32 [slots], and shares, None if they are even."""
    content = experts.astype("<i4", copy=False).tobytes()
    if shares is not None:
        content += shares.astype("<i4", copy=False).tobytes()
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def whole_digest(of_layers: Iterable[bytes], *, slots_of_rank: Sequence[int]) -> bytes:
    """Digest a layout from the digests of its layers, and how many slots each rank has.

    A Merkle tree (R. Merkle, 1987) of two levels: a change of few layers digests only these again.
    """
    content = np.array(slots_of_rank, dtype="<i4").tobytes() + b"".join(of_layers)
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def digest_text(digest: bytes) -> str:
    """Return how a layout's digest is shown: its first 8 bytes, 16 hex digits."""
    return digest[:8].hex()


def count_replicas(expert_of_slot: ExpertTable, *, num_experts: int) -> Slots:
    """Count the slots of each logical expert, int32 [layers, experts]; ids must be valid."""
    num_layers = expert_of_slot.shape[0]
    offsets = np.arange(num_layers, dtype=np.int64)[:, None] * num_experts
    cells = (expert_of_slot + offsets)[expert_of_slot != EMPTY]
    counts = np.bincount(cells, minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts).astype(np.int32)


def used_places(expert_of_slot: ExpertTable, *, first_slot: Sequence[int]) -> Indices:
    """Count the experts that each rank holds over all layers, int64 [ranks]."""
    is_used = expert_of_slot != EMPTY
    return np.add.reduceat(is_used.sum(axis=0, dtype=np.int64), first_slot[:-1])


def is_moved(before: ExpertTable, after: ExpertTable) -> Bools:
    """Find the slots that get another expert, [layers, slots]; emptying a slot moves nothing."""
    moved: Bools = (before != after) & (after != EMPTY)
    return moved


def count_moves(before: ExpertTable, after: ExpertTable) -> int:
    """Count the slots that get another expert."""
    return int(np.count_nonzero(is_moved(before, after)))


def contiguous_layout(
    *, num_layers: int, num_experts: int, num_ranks: int, slots_per_rank: int, generation: int = 1
) -> Layout:
    """Return the layout that a pool starts with when its load is unknown.

    Experts are placed in order over the ranks; redundant slots repeat experts from the first. No
    rank holds an expert twice unless it has more slots than there are experts.

    Raises:
        InvalidLayoutError: there are fewer slots than experts.
    """
    num_slots = num_ranks * slots_per_rank
    if num_slots < num_experts:
        raise InvalidLayoutError(
            f"{num_ranks} ranks x {slots_per_rank} slots = {num_slots} slots cannot hold "
            f"{num_experts} experts: give each rank at least {-(-num_experts // num_ranks)} slots"
        )
    # A wrapped sequence keeps neighbouring experts together, which round-robin would scatter.
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
        raise InvalidLayoutError(f"a layout must have the shape [layers, slots], not {table.shape}")
    if layout.generation < 1:
        raise InvalidLayoutError(f"generation must be at least 1, not {layout.generation}")
    if layout.slots_of_rank:
        if len(layout.slots_of_rank) != layout.num_ranks or min(layout.slots_of_rank) < 1:
            raise InvalidLayoutError(
                f"slots_of_rank must have at least 1 for each of {layout.num_ranks} ranks, "
                f"not {layout.slots_of_rank}"
            )
        if sum(layout.slots_of_rank) != table.shape[1]:
            raise InvalidLayoutError(
                f"slots_of_rank sums to {sum(layout.slots_of_rank)} slots, but the table has "
                f"{table.shape[1]}"
            )
    elif layout.num_ranks < 1 or table.shape[1] % layout.num_ranks or not table.shape[1]:
        raise InvalidLayoutError(
            f"{table.shape[1]} slots do not divide evenly over {layout.num_ranks} ranks"
        )


def _check(layout: Layout) -> None:
    table, num_experts = layout.expert_of_slot, layout.num_experts
    if table.min() < EMPTY or table.max() >= num_experts:
        outside = (table < EMPTY) | (table >= num_experts)
        layer, slot = (int(index) for index in np.argwhere(outside)[0])
        raise InvalidLayoutError(
            f"layer {layer}, slot {slot} holds expert {int(table[layer, slot])}, "
            f"but experts are numbered 0 to {num_experts - 1}"
        )
    is_held = count_replicas(table, num_experts=num_experts) > 0
    if not is_held.all():
        layer, expert = (int(index) for index in np.argwhere(~is_held)[0])
        raise InvalidLayoutError(f"layer {layer} has no slot for expert {expert}")
    _check_no_needless_twins(layout)


def needless_twins(
    expert_of_slot: ExpertTable, *, num_experts: int, slots_of_rank: Sequence[int]
) -> Indices:
    """Find experts that a rank holds too often, as rows of (layer, rank, expert), [twins, 3].

    A rank may hold an expert twice only if some rank has more slots than there are experts.
    """
    allowed = -(-max(slots_of_rank) // num_experts)
    num_keys = len(slots_of_rank) * num_experts
    first_keys = np.arange(0, num_keys, num_experts)
    if num_keys <= np.iinfo(np.int32).max:  # Narrow numbers sort faster.
        first_keys = first_keys.astype(np.int32)
    held = np.repeat(first_keys, slots_of_rank) + expert_of_slot
    # Empty slots are not copies of each other.
    np.putmask(held, expert_of_slot == EMPTY, -1 - np.arange(held.shape[1], dtype=held.dtype))
    held.sort(axis=1)
    layers, places = np.nonzero(held[:, allowed:] == held[:, : max(0, held.shape[1] - allowed)])
    return np.stack((layers, *np.divmod(held[layers, places], num_experts)), axis=1)


def _check_no_needless_twins(layout: Layout) -> None:
    twins = needless_twins(
        layout.expert_of_slot, num_experts=layout.num_experts, slots_of_rank=layout.slots_of_rank
    )
    if len(twins):
        layer, rank, expert = twins[0].tolist()
        allowed = -(-max(layout.slots_of_rank) // layout.num_experts)
        raise InvalidLayoutError(
            f"layer {layer}: rank {rank} holds expert {expert} more than {allowed} time(s): "
            "a second copy on the same rank adds no capacity"
        )


def _uneven(layout: Layout, shares: ShareTable) -> ShareTable | None:
    """Return the shares, checked and read-only; None if they are even."""
    table, num_experts = layout.expert_of_slot, layout.num_experts
    fault = fault_in_shares(shares, table, num_experts=num_experts)
    if fault is not None:
        raise InvalidLayoutError(fault)
    if np.array_equal(shares, even_shares(table, num_experts=num_experts)):
        return None
    own = np.array(shares, dtype=np.int32)
    own.flags.writeable = False
    return own
