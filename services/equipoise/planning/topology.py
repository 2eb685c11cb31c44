"""Ranks, their nodes and slots, and the shape of the model."""

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a model, equal on all workers of a pool."""

    num_layers: int
    """MoE layers; only these are counted, from 0."""
    num_experts: int
    """Logical experts per layer."""
    num_groups: int
    """Expert groups of group-limited routing; 1 if there are none."""
    expert_bytes: int
    """Bytes of one expert's weights and scales in one layer: the cost of a move."""
    has_shared_expert: bool = False
    """Whether the last logical expert is the shared one, which every token activates."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "num_groups", "expert_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts do not divide evenly into {self.num_groups} groups"
            )
        if self.has_shared_expert and (self.num_groups > 1 or self.num_experts < 2):
            raise ValueError(
                "has_shared_expert needs one group, which the shared expert is not in, and a "
                f"routed expert: there are {self.num_groups} groups, {self.num_experts} experts"
            )

    @property
    def shared_expert(self) -> int | None:
        """The number of the shared expert among the logical ones; None if it is not in slots."""
        return self.num_experts - 1 if self.has_shared_expert else None


def expert_name(expert: int, *, shared: int | None) -> str:
    """Return what tables call a logical expert: its number, or `shared`."""
    return "shared" if expert == shared else str(expert)


def expert_text(expert: int, *, shared: int | None) -> str:
    """Return what sentences call a logical expert, such as `expert 9`."""
    return "the shared expert" if expert == shared else f"expert {expert}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Ranks of an epoch, in rank order, and the node each runs on.

    Slots are numbered rank by rank: rank r owns slots first_slot[r] to first_slot[r + 1] - 1.
    """

    node_of_rank: tuple[str, ...]
    """Node names; ranks of one node have fast links to each other."""
    slots_per_rank: int
    """Physical slots of every rank per layer, or the largest of `slots_of_rank`."""
    slots_of_rank: tuple[int, ...] = ()
    """Physical slots of each rank, if they differ."""
    places_of_rank: tuple[int, ...] = ()
    """Experts that each rank has room for, over all layers; empty if that is all its slots."""

    def __post_init__(self) -> None:
        if self.places_of_rank and len(self.places_of_rank) != len(self.node_of_rank):
            raise ValueError(
                f"places_of_rank must have a number for each of {len(self.node_of_rank)} ranks, "
                f"not {self.places_of_rank}"
            )
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
        """Number of ranks."""
        return len(self.node_of_rank)

    @property
    def num_slots(self) -> int:
        """Physical slots per layer, over all ranks."""
        return sum(self.slots_of_rank)

    @property
    def first_slot(self) -> tuple[int, ...]:
        """First slot of each rank, then the number of slots."""
        return tuple(accumulate(self.slots_of_rank, initial=0))

    @property
    def has_equal_slots(self) -> bool:
        """Whether all ranks have equally many slots."""
        return min(self.slots_of_rank) == self.slots_per_rank

    def slots_of_layer(self, num_layers: int) -> tuple[int, ...]:
        """Slots of each rank that are in use if each layer has equally many."""
        if not self.places_of_rank:
            return self.slots_of_rank
        in_all = (places // num_layers for places in self.places_of_rank)
        return tuple(map(min, self.slots_of_rank, in_all))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node names in order of their first rank."""
        return tuple(dict.fromkeys(self.node_of_rank))

    def only(self, ranks: tuple[int, ...]) -> "Topology":
        """Return a topology of some ranks, in the given order."""
        slots_of_rank = tuple(self.slots_of_rank[rank] for rank in ranks)
        return Topology(
            node_of_rank=tuple(self.node_of_rank[rank] for rank in ranks),
            slots_per_rank=max(slots_of_rank, default=self.slots_per_rank),
            slots_of_rank=slots_of_rank,
            places_of_rank=tuple(
                self.places_of_rank[rank] for rank in ranks if self.places_of_rank
            ),
        )
