"""`Problem`: what every way of placing experts is given, checked once and in arrays."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from equipoise.planning.balance import balancedness_per_layer
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import ExpertTable, Layout, count_replicas
from equipoise.planning.load import Load
from equipoise.planning.topology import ModelShape, Topology

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A load to spread over the ranks of a topology, and what those ranks hold now.

    `load` is float64 [layers, experts] in any unit; `held` is int32 [layers, slots], which need
    not cover every expert: ranks may have been lost.

    Raises:
        InvalidLayoutError: there are fewer slots than experts.
    """

    load: Load
    model: ModelShape
    topology: Topology
    held: ExpertTable

    def __post_init__(self) -> None:
        model, topology = self.model, self.topology
        assert self.load.shape == (model.num_layers, model.num_experts), "a load per expert"
        if topology.num_slots < model.num_experts:
            raise InvalidLayoutError(
                f"{topology.num_ranks} ranks with {topology.num_slots} slots together cannot hold "
                f"{model.num_experts} experts: give each rank at least "
                f"{-(-model.num_experts // topology.num_ranks)} slots"
            )
        assert self.held.shape == (model.num_layers, topology.num_slots), "a layout of these ranks"

    @classmethod
    def of(
        cls,
        load: Load,
        *,
        model: ModelShape,
        topology: Topology,
        current: Layout | None,
        ranks: tuple[int, ...],
    ) -> "Problem":
        """The problem for some `ranks` of a topology.

        Without a current layout they hold what a pool starts with: experts in order, and once
        more from the first on in the redundant slots.
        """
        live = topology.only(ranks)
        if current is None:
            row = np.arange(live.num_slots, dtype=np.int32) % model.num_experts
            held: ExpertTable = np.tile(row, (model.num_layers, 1))
        else:
            assert current.slots_of_rank == topology.slots_of_rank, "slots of one epoch"
            first_slot = topology.first_slot
            columns = [
                slot for rank in ranks for slot in range(first_slot[rank], first_slot[rank + 1])
            ]
            held = np.ascontiguousarray(current.expert_of_slot[:, columns])
        weights = np.ascontiguousarray(load, dtype=np.float64)
        return cls(load=weights, model=model, topology=live, held=held)

    @cached_property
    def first_slot(self) -> Indices:
        """The first slot of each rank, and after the last rank the number of slots; [ranks + 1]."""
        return np.array(self.topology.first_slot, dtype=np.int64)

    @cached_property
    def rank_of_slot(self) -> Indices:
        """The rank that owns each slot, [slots]."""
        return np.repeat(np.arange(self.topology.num_ranks), self.topology.slots_of_rank)

    @cached_property
    def node_of_rank(self) -> Indices:
        """Nodes counted from 0 in the order in which ranks name them, [ranks]."""
        number = {node: index for index, node in enumerate(self.topology.nodes)}
        return np.array([number[node] for node in self.topology.node_of_rank], dtype=np.int64)

    @property
    def num_nodes(self) -> int:
        """Nodes that the ranks run on."""
        return len(self.topology.nodes)

    def replicas(self, table: ExpertTable) -> npt.NDArray[np.int32]:
        """Replicas of each expert under a placement, int32 [layers, experts]."""
        return count_replicas(table, num_experts=self.model.num_experts)

    @cached_property
    def is_covered(self) -> npt.NDArray[np.bool_]:
        """Layers in which the ranks hold every expert, [layers]."""
        covered: npt.NDArray[np.bool_] = np.all(self.replicas(self.held) > 0, axis=1)
        return covered

    @cached_property
    def is_busy(self) -> npt.NDArray[np.bool_]:
        """Layers with traffic, [layers]."""
        busy: npt.NDArray[np.bool_] = np.any(self.load > 0, axis=1)
        return busy

    def rank_loads(self, table: ExpertTable) -> Load:
        """What each rank carries under a placement, [layers, ranks]."""
        return self.sum_by_rank(table, self.load / np.maximum(self.replicas(table), 1))

    def sum_by_rank(self, table: ExpertTable, of_replica: Load) -> Load:
        """Sum a value that each replica of an expert has, [layers, experts]; [layers, ranks]."""
        by_slot = np.take_along_axis(of_replica, table, axis=1)
        return np.add.reduceat(by_slot, self.first_slot[:-1], axis=1)

    def balancedness_of_layer(self, table: ExpertTable) -> Load:
        """Mean / max rank load under a placement, [layers]."""
        return balancedness_per_layer(self.rank_loads(table))

    def load_of_group_on_node(self, table: ExpertTable) -> Load:
        """How much of each expert group's load each node serves, [layers, groups, nodes]."""
        num_layers, num_experts = self.load.shape
        num_groups, num_nodes = self.model.num_groups, self.num_nodes
        of_replica = self.load / np.maximum(self.replicas(table), 1)
        share = np.take_along_axis(of_replica, table, axis=1)
        node_of_slot = self.node_of_rank[self.rank_of_slot]
        group = table.astype(np.int64) // (num_experts // num_groups)
        layer = np.arange(num_layers)[:, None]
        cell = (layer * num_groups + group) * num_nodes + node_of_slot
        served: Load = np.bincount(
            cell.ravel(), weights=share.ravel(), minlength=num_layers * num_groups * num_nodes
        ).astype(np.float64)
        return served.reshape(num_layers, num_groups, num_nodes)

    def obstacle_to_hierarchy(self) -> str | None:
        """Why groups cannot be given to nodes, or None if they can."""
        model, topology = self.model, self.topology
        nodes = topology.nodes
        if model.num_groups % len(nodes):
            return f"{model.num_groups} groups do not divide over {len(nodes)} nodes"
        ranks_per_node = topology.num_ranks // len(nodes)
        contiguous = tuple(node for node in nodes for _ in range(ranks_per_node))
        if topology.node_of_rank != contiguous:
            return "nodes do not have equally many ranks in a row"
        if not topology.has_equal_slots:
            return "ranks do not have equally many slots"
        experts_per_node = model.num_experts // len(nodes)
        if topology.slots_per_rank > experts_per_node:
            return f"a rank has more slots than the {experts_per_node} experts of a node"
        return None
