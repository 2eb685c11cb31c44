"""`Problem`: the input of every placement algorithm, checked once and in arrays."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from equipoise.planning.arrays import EMPTY, Bools, ExpertTable, Indices, Load, ShareTable, Weights
from equipoise.planning.balance import (
    balancedness_per_layer,
    mean_if_busy,
    mean_over_kinds,
    rank_loads,
)
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout, needless_twins
from equipoise.planning.placing.bound import upper_bounds
from equipoise.planning.placing.tally import (
    count_replicas_of,
    split_by_group_and_node,
    split_by_rank,
)
from equipoise.planning.policy import Weighting
from equipoise.planning.shares import WHOLE
from equipoise.planning.topology import ModelShape, Topology


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A load to spread over the ranks of a topology, and the experts those ranks hold now.

    Raises:
        InvalidLayoutError: there are fewer slots than experts.
    """

    load: Load
    """float64 [layers, experts] in any unit: that of the only kind of traffic, or their mean."""
    model: ModelShape
    topology: Topology
    held: ExpertTable
    """int32 [layers, slots]; experts may be missing or needlessly twice on a rank, because ranks
    may have been lost."""
    held_shares: ShareTable | None = None
    """Shares of the held placement, int32 [layers, slots]; None for even splits."""
    is_new: bool = False
    """Whether the ranks hold nothing yet, so that no placement costs moves."""
    weighted: Weighting = Weighting.OFF
    """Whether the slots of an expert may serve unequal shares."""
    kinds: tuple[Load, ...] = ()
    """The load of each kind of traffic, float64 [layers, experts], if there are several. Those of a
    layer sum to the same."""
    weights: Weights = field(default_factory=lambda: np.ones(1))
    """Part of the time that each kind takes, [kinds]; sums to 1."""

    def __post_init__(self) -> None:
        model, topology = self.model, self.topology
        assert self.load.shape == (model.num_layers, model.num_experts), "a load per expert"
        if topology.num_slots < model.num_experts:
            raise InvalidLayoutError(
                f"{topology.num_ranks} ranks with {topology.num_slots} slots in total cannot hold "
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
        weighted: Weighting = Weighting.OFF,
        weights: Weights | None = None,
    ) -> "Problem":
        """Build the problem for some `ranks` of a topology.

        `load` is [layers, experts], or [kinds, layers, experts] with `weights`.

        Without a current layout, ranks hold what a pool starts with: experts in order, repeated
        from the first in the redundant slots; or nothing, if layers share places. Shares become
        even if a rank is left out, because the slots that served the rest are gone.
        """
        live = topology.only(ranks)
        shares = None
        if current is None:
            row = np.arange(live.num_slots, dtype=np.int32) % model.num_experts
            row[:] = EMPTY if live.places_of_rank else row
            held: ExpertTable = np.tile(row, (model.num_layers, 1))
        else:
            assert current.slots_of_rank == topology.slots_of_rank, "slots of one epoch"
            rank_of_slot = np.repeat(np.arange(topology.num_ranks), topology.slots_of_rank)
            columns = np.flatnonzero(np.isin(rank_of_slot, ranks))
            held = np.take(current.expert_of_slot, columns, axis=1)
            shares = current.share_of_slot if live.num_ranks == topology.num_ranks else None
        kinds: tuple[Load, ...] = ()
        if weights is not None:
            total = load.sum(axis=2, keepdims=True)
            # As much of each kind as there is now; of layers that are idle now, as much as ever.
            scale = np.where(total[0] > 0, total[0], total.max(axis=0))
            kinds = tuple(load / np.where(total > 0, total, 1.0) * scale)
            load = mean_over_kinds(kinds, weights)
        return cls(
            load=np.array(load, dtype=np.float64, order="C"),
            model=model,
            topology=live,
            held=held,
            held_shares=shares,
            is_new=current is None,
            weighted=weighted,
            kinds=kinds,
            weights=np.ones(1) if weights is None else weights,
        )

    @cached_property
    def first_slot(self) -> Indices:
        """First slot of each rank, then the number of slots; [ranks + 1]."""
        return np.array(self.topology.first_slot, dtype=np.int64)

    @cached_property
    def rank_of_slot(self) -> Indices:
        """Rank that owns each slot, [slots]."""
        return np.repeat(np.arange(self.topology.num_ranks), self.topology.slots_of_rank)

    @cached_property
    def node_of_rank(self) -> Indices:
        """Node of each rank, [ranks]; nodes are numbered from 0 in order of their first rank."""
        number = {node: index for index, node in enumerate(self.topology.nodes)}
        return np.array([number[node] for node in self.topology.node_of_rank], dtype=np.int64)

    @cached_property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.topology.nodes)

    def replicas(self, table: ExpertTable) -> Indices:
        """Count the replicas of each expert under a placement, [layers, experts]."""
        return count_replicas_of(table, self.model.num_experts)

    @cached_property
    def is_valid(self) -> Bools:
        """Layers that the ranks could keep as they are, [layers].

        Others lack an expert, or hold one needlessly twice: a larger rank that allowed it is lost.
        """
        valid: Bools = np.all(self.replicas(self.held) > 0, axis=1)
        twins = needless_twins(
            self.held,
            num_experts=self.model.num_experts,
            slots_of_rank=self.topology.slots_of_rank,
        )
        valid[twins[:, 0]] = False
        return valid

    @cached_property
    def is_busy(self) -> Bools:
        """Layers with traffic, [layers]."""
        busy: Bools = np.any(self.load > 0, axis=1)
        return busy

    def rank_loads(self, table: ExpertTable, shares: ShareTable | None = None) -> Load:
        """Compute the load of each rank under a placement, [layers, ranks]."""
        return self._rank_loads(self.load, table, shares)

    def _rank_loads(self, load: Load, table: ExpertTable, shares: ShareTable | None) -> Load:
        if shares is None:
            return split_by_rank(table, load, self.rank_of_slot)
        return rank_loads(
            table,
            load=load,
            num_ranks=self.topology.num_ranks,
            first_slot=self.topology.first_slot,
            share_of_slot=shares,
        )

    def balancedness_of_layer(self, table: ExpertTable, shares: ShareTable | None = None) -> Load:
        """Compute mean / max rank load under a placement, [layers]: the mean over kinds."""
        reached = [
            balancedness_per_layer(self._rank_loads(load, table, shares))
            for load in self.kinds or (self.load,)
        ]
        return mean_over_kinds(reached, self.weights)

    def balancedness(self, table: ExpertTable, shares: ShareTable | None = None) -> float:
        """Average `balancedness_of_layer` over the layers with traffic; 1.0 if there are none."""
        return mean_if_busy(self.balancedness_of_layer(table, shares), is_busy=self.is_busy)

    @cached_property
    def bound_of_layer(self) -> Load:
        """A balancedness that no placement exceeds, [layers]: the mean over kinds."""
        return mean_over_kinds(self.bounds_of_kinds, self.weights)

    @cached_property
    def bounds_of_kinds(self) -> Load:
        """A balancedness that no placement exceeds in each kind, [kinds, layers]."""
        slots, ranks = self.topology.num_slots, self.topology.num_ranks
        return np.array(
            [
                upper_bounds(load, num_slots=slots, num_ranks=ranks)
                for load in self.kinds or (self.load,)
            ]
        )

    @cached_property
    def load_of_kinds(self) -> Load:
        """The load of each expert in each kind, [layers, experts, kinds], in mean rank loads."""
        loads = np.stack(self.kinds or (self.load,), axis=2)
        mean = loads.sum(axis=1, keepdims=True) / self.topology.num_ranks
        relative: Load = loads / np.where(mean > 0, mean, 1.0)
        return relative

    def slot_load(self, table: ExpertTable, shares: ShareTable) -> Load:
        """Compute the load of each slot, [layers, slots]."""
        served: Load = np.take_along_axis(self.load, table, axis=1) * (shares / WHOLE)
        return served

    def load_of_group_on_node(self, table: ExpertTable, shares: ShareTable | None = None) -> Load:
        """Compute each node's part of each expert group's load, [layers, groups, nodes]."""
        node_of_slot = self.node_of_rank[self.rank_of_slot]
        if shares is not None:
            size = self.model.num_experts // self.model.num_groups
            served = np.zeros((len(table), self.model.num_groups, self.num_nodes))
            places = (np.arange(len(table))[:, None], table // size, node_of_slot)
            np.add.at(served, places, self.slot_load(table, shares))
            return served
        return split_by_group_and_node(table, self.load, node_of_slot, self.model.num_groups)

    def off_node_share_of_layer(self, table: ExpertTable, shares: ShareTable | None = None) -> Load:
        """Compute the share of load served off the node that serves most of its group, [layers]."""
        total = self.load.sum(axis=1)
        at_home = self.load_of_group_on_node(table, shares).max(axis=2).sum(axis=1)
        return np.where(total > 0, 1.0 - at_home / np.where(total > 0, total, 1.0), 0.0)

    def is_hierarchical(self, table: ExpertTable) -> Bools:
        """Find the layers that hold each expert group on one node only, [layers]."""
        size = self.model.num_experts // self.model.num_groups
        is_on_node = np.zeros((len(table), self.model.num_groups, self.num_nodes), dtype=np.bool_)
        node_of_slot = self.node_of_rank[self.rank_of_slot]
        layers, slots = np.nonzero(table != EMPTY)
        is_on_node[layers, table[layers, slots] // size, node_of_slot[slots]] = True
        kept: Bools = (is_on_node.sum(axis=2) == 1).all(axis=1)
        return kept

    @property
    def has_equal_nodes(self) -> bool:
        """Whether nodes have equally many consecutive ranks, and all ranks equally many slots."""
        nodes, node_of_rank = self.topology.nodes, self.topology.node_of_rank
        ranks_per_node = len(node_of_rank) // len(nodes)
        contiguous = tuple(node for node in nodes for _ in range(ranks_per_node))
        return node_of_rank == contiguous and self.topology.has_equal_slots

    def obstacle_to_hierarchy(self) -> str | None:
        """Return why expert groups cannot be assigned to nodes; None if they can."""
        model, topology = self.model, self.topology
        nodes = topology.nodes
        if model.num_groups % len(nodes):
            return f"{model.num_groups} groups do not divide evenly over {len(nodes)} nodes"
        if not self.has_equal_nodes:
            return "nodes do not all have equally many consecutive ranks with equally many slots"
        experts_per_node = model.num_experts // len(nodes)
        if topology.slots_per_rank > experts_per_node:
            return f"a rank has more slots than the {experts_per_node} experts of a node"
        return None
