"""`ExpertNeeds`: the slots and places that all experts of a model need on an epoch's workers."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNeeds:
    """What the workers of an epoch must have room for."""

    num_experts: int
    """Logical experts, each of which needs a slot of its layer."""
    num_layers: int
    """MoE layers, which share the places of a worker that has such."""
    slots_per_rank: int
    """Slots of every worker in each layer."""

    def are_met(self, places: Sequence[int]) -> bool:
        """Whether workers with so many places, 0 for one in each slot, can hold all experts."""
        return not self.lack(places)

    def least_ranks(self, places: Sequence[int]) -> int:
        """Return how many such workers are needed; `places` is empty if each slot has one."""
        by_slots = -(-self.num_experts // self.slots_per_rank)
        if not places:
            return by_slots
        return max(by_slots, -(-self.num_layers * self.num_experts * len(places) // sum(places)))

    def lack(self, places: Sequence[int]) -> str:
        """Return what is missing on such workers; empty if nothing is."""
        num_slots, num_places = len(places) * self.slots_per_rank, sum(places)
        if num_slots < self.num_experts:
            return (
                f"{num_slots} slots cannot hold {self.num_experts} experts: "
                f"{self.least_ranks(())} workers are needed"
            )
        if 0 < num_places < self.num_layers * self.num_experts:
            return (
                f"{num_places} places cannot hold {self.num_experts} experts in each of "
                f"{self.num_layers} layers: {self.num_layers * self.num_experts} are needed"
            )
        return ""
