"""State of the search in `relieve`: arrays that are updated in place."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from equipoise.planning.arrays import Bools, Indices, Load, Slots, Weights

Counts = npt.NDArray[np.int16]


class SearchSpace(NamedTuple):
    """Where a layer's slots are, and the cost of a step."""

    first_slot: Indices
    """[ranks + 1]."""
    rank_of_slot: Indices
    """[slots]."""
    node_of_rank: Indices
    """[ranks]."""
    home_of_expert: Indices
    """[experts]: the node that should serve each expert."""
    cost_of_move: float
    """Cost per slot that newly differs from the start; slightly more if the expert comes from
    another node."""
    cost_of_leaving: float
    """Cost per mean rank load that a step takes off its home node."""
    cost_of_joining: float
    """Cost of a replica that comes to a node with another replica of its expert: one failure may
    then take both."""


class Goal(NamedTuple):
    """What the search is for."""

    threshold: Weights
    """Load of a rank, in mean rank loads, above which it is relieved; by kind of traffic,
    [kinds]."""
    weight: Weights
    """How much of each kind is expected, [kinds]; sums to 1."""
    max_off_home: float
    """Load that may be served off its home node, in mean rank loads."""


class SearchPath(NamedTuple):
    """Steps from the start, with the state before and after each."""

    steps: Indices
    """[steps, 4]: a slot and its new expert, then another slot and its new expert, or -1 twice."""
    busiest: Load
    """[steps + 1, kinds]: load of the busiest rank under each kind."""
    moves: Indices
    """[steps + 1]: slots that differ from the start."""
    off_home: Weights
    """[steps + 1]: load served off its home node."""


class SearchState(NamedTuple):
    """One layer during the search; arrays, updated in place."""

    start: Slots
    slots: Slots
    space: SearchSpace
    goal: Goal
    load: Load
    """[experts, kinds], in mean rank loads."""
    share: Load
    """Load per replica, [experts, kinds]; with one more replica in `share_of_more`, with one less
    in `share_of_fewer`."""
    share_of_more: Load
    share_of_fewer: Load
    mean_load: Weights
    """Over all kinds, [experts]."""
    num_replicas: Indices
    num_off_home: Indices
    """Replicas of each expert off its home node, [experts]."""
    num_held: Counts
    """Replicas of each expert on each rank, [experts, ranks]."""
    num_on_node: Counts
    """The same on each node, [experts, nodes]."""
    is_near: Bools
    """Whether a rank of each node held each expert at the start, [experts, nodes]."""
    carried: Load
    """Load of each rank, [ranks, kinds]."""
    mean_carried: Weights
    """Over all kinds, [ranks]."""
    excess: Weights
    """Over all kinds, [ranks]."""
    first_replica: Indices
    """The first slot of each expert, [experts], and the next one after each slot, [slots]; -1 is
    none."""
    next_replica: Indices
    fall: Weights
    """Excess that one more replica of each expert removes from the ranks of the others,
    [experts]."""
    before: Weights
    """Excess that overwriting each slot removes, before what is left on its rank is subtracted,
    [slots]; -inf if that would lose the expert."""
    most: Weights
    """The same if its new expert had no load, [slots]: with the expert's fall, no copy removes
    more."""
    without: Load
    """What its rank carries above the thresholds without the slot's expert, [kinds, slots]."""
    least_cost: Weights
    """Of a copy to each slot, [slots]: less than a move where the slot may get back its expert, or
    an expert its home."""
    worth: Weights
    """Upper bound of the excess that a copy to each slot removes per cost, [slots]."""
    neediest_first: Indices
    """The experts by `fall`, descending, then the load of one more replica."""
    lightest_first: Indices
    """The ranks by `mean_carried`."""
    step: Indices
    """[4]: the step found."""


class Partners(NamedTuple):
    """Slots that an overloaded rank may swap with, and what a swap depends on, side by side."""

    slots: Indices
    """[partners]."""
    excess: Weights
    """Of their rank and the overloaded one together, [partners]."""
    share: Load
    """Their load, [kinds, partners]."""
    without: Load
    """What their rank carries above the thresholds without them, [kinds, partners]."""
    least_cost: Weights
    """Of a swap with a slot that holds what it held at the start, [partners]."""
