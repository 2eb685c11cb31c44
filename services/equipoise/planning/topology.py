"""Where slots are: ranks, their nodes, and the shape of the model spread over them."""

from dataclasses import dataclass


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
    `slots_per_rank` physical slots in each layer; rank r owns the slots
    [r * slots_per_rank, (r + 1) * slots_per_rank).
    """

    node_of_rank: tuple[str, ...]
    slots_per_rank: int

    def __post_init__(self) -> None:
        if not self.node_of_rank:
            raise ValueError("a topology needs at least one rank")
        if self.slots_per_rank < 1:
            raise ValueError(f"slots_per_rank must be at least 1, not {self.slots_per_rank}")

    @property
    def num_ranks(self) -> int:
        """Ranks of the epoch."""
        return len(self.node_of_rank)

    @property
    def num_slots(self) -> int:
        """Physical slots per layer, over all ranks."""
        return self.num_ranks * self.slots_per_rank

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node names in the order in which ranks first name them."""
        return tuple(dict.fromkeys(self.node_of_rank))

    def rank_of_slot(self, slot: int) -> int:
        """The rank that owns a physical slot."""
        return slot // self.slots_per_rank

    def ranks_of_node(self, node: str) -> tuple[int, ...]:
        """Ranks that run on a node, ascending."""
        return tuple(rank for rank, name in enumerate(self.node_of_rank) if name == node)
