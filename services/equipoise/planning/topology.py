"""Where slots are: ranks, their nodes, and the shape of the model spread over them."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """How many tables, counters and bytes a model has. All workers of a pool agree on it.

    Layers are counted from 0 over MoE layers only. `expert_bytes` are the bytes of one expert's
    weights and scales in one layer: the price of a move.
    """

    num_layers: int
    num_experts: int
    num_groups: int
    expert_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "num_groups", "expert_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts do not divide into {self.num_groups} groups"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Ranks of an epoch, in rank order, and the node each runs on.

    `node_of_rank` holds node names; ranks of one node are close to each other. Every rank has
    `slots_per_rank` physical slots in each layer, or, where memory differs, its own number in
    `slots_of_rank`, of which `slots_per_rank` is the largest. Slots are numbered rank by rank:
    rank r owns the slots from first_slot[r] to first_slot[r + 1].
    """

    node_of_rank: tuple[str, ...]
    slots_per_rank: int
    slots_of_rank: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.node_of_rank:
            raise ValueError("a topology needs at least one rank")
        if self.slots_per_rank < 1:
            raise ValueError(f"slots_per_rank must be at least 1, not {self.slots_per_rank}")
        if not self.slots_of_rank:
            object.__setattr__(self, "slots_of_rank", (self.slots_per_rank,) * self.num_ranks)
        if len(self.slots_of_rank) != self.num_ranks or min(self.slots_of_rank) < 1:
            raise ValueError(
                f"slots_of_rank must have at least 1 for each of {self.num_ranks} ranks, "
                f"not {self.slots_of_rank}"
            )
        if max(self.slots_of_rank) != self.slots_per_rank:
            raise ValueError(
                f"slots_per_rank must be the largest of slots_of_rank, "
                f"{max(self.slots_of_rank)}, not {self.slots_per_rank}"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks of the epoch."""
        return len(self.node_of_rank)

    @property
    def num_slots(self) -> int:
        """Physical slots per layer, over all ranks."""
        return sum(self.slots_of_rank)

    @property
    def first_slot(self) -> tuple[int, ...]:
        """The first slot of each rank, and after the last rank the number of slots."""
        return tuple(accumulate(self.slots_of_rank, initial=0))

    @property
    def has_equal_slots(self) -> bool:
        """Whether all ranks have equally many slots."""
        return min(self.slots_of_rank) == self.slots_per_rank

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node names in the order in which ranks first name them."""
        return tuple(dict.fromkeys(self.node_of_rank))

    def rank_of_slot(self, slot: int) -> int:
        """The rank that owns a physical slot."""
        if self.has_equal_slots:
            return slot // self.slots_per_rank
        return bisect_right(self.first_slot, slot) - 1

    def only(self, ranks: tuple[int, ...]) -> "Topology":
        """The same ranks without the others, in the order given."""
        slots_of_rank = tuple(self.slots_of_rank[rank] for rank in ranks)
        return Topology(
            node_of_rank=tuple(self.node_of_rank[rank] for rank in ranks),
            slots_per_rank=max(slots_of_rank, default=self.slots_per_rank),
            slots_of_rank=slots_of_rank,
        )
