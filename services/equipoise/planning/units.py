"""Deployment units of DeepSeek-V3: the pools in which its makers serve it.

Sources: the DeepSeek-V3 technical report (arXiv 2412.19437), sections 3.4.1 and 3.4.2, and day 6 of
DeepSeek's open-infra-index.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from equipoise.planning.policy import Algorithm

NUM_EXPERTS = 256
"""Routed experts per layer of DeepSeek-V3."""

EXPERTS_PER_TOKEN = 8
"""Routed experts that each token activates."""

NUM_GROUPS = 8
"""Expert groups of its router."""

RANKS_PER_NODE = 8
"""GPUs of one machine."""


class UnitName(StrEnum):
    """Names of the units."""

    PREFILL_EP32 = "prefill-ep32"
    """Prefills prompts: 4 machines, 9 slots per rank, expert groups kept within a machine."""

    DECODE_EP144 = "decode-ep144"
    """Generates: 18 machines, 2 slots per rank."""

    DECODE_EP320 = "decode-ep320"
    """Generates: 40 machines, 1 slot per rank, the shared expert as a routed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One pool of a published deployment."""

    num_ranks: int
    """Expert-parallel ranks, one per GPU."""

    slots_per_rank: int
    """Physical slots per layer and rank."""

    algorithm: Algorithm
    """How replicas are placed."""

    interval_s: float
    """Time between plans, seconds."""

    routes_shared_expert: bool = False
    """Whether the shared expert is one more routed expert, which every token activates."""

    def __post_init__(self) -> None:
        if self.num_ranks % RANKS_PER_NODE:
            raise ValueError(f"{self.num_ranks} ranks do not fill machines of {RANKS_PER_NODE}")
        if self.num_redundant < 0:
            raise ValueError(f"{self.num_slots} slots cannot hold {self.num_experts} experts")
        if self.algorithm is Algorithm.HIERARCHICAL and NUM_GROUPS % self.num_nodes:
            raise ValueError(f"{NUM_GROUPS} groups do not divide over {self.num_nodes} machines")

    @property
    def num_nodes(self) -> int:
        """Machines."""
        return self.num_ranks // RANKS_PER_NODE

    @property
    def num_slots(self) -> int:
        """Physical slots per layer, over all ranks."""
        return self.num_ranks * self.slots_per_rank

    @property
    def num_experts(self) -> int:
        """Experts per layer that are planned."""
        return NUM_EXPERTS + self.routes_shared_expert

    @property
    def num_redundant(self) -> int:
        """Slots per layer beyond the experts."""
        return self.num_slots - self.num_experts


UNITS: Mapping[UnitName, Unit] = MappingProxyType(
    {
        # The report rearranges prefill's replicas every 10 minutes, for example.
        UnitName.PREFILL_EP32: Unit(
            num_ranks=32, slots_per_rank=9, algorithm=Algorithm.HIERARCHICAL, interval_s=600.0
        ),
        # 8 groups do not divide over 18 or 40 machines.
        UnitName.DECODE_EP144: Unit(
            num_ranks=144, slots_per_rank=2, algorithm=Algorithm.GLOBAL, interval_s=600.0
        ),
        UnitName.DECODE_EP320: Unit(
            num_ranks=320,
            slots_per_rank=1,
            algorithm=Algorithm.GLOBAL,
            interval_s=600.0,
            routes_shared_expert=True,
        ),
    }
)
"""The units by name."""
