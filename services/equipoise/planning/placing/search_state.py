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
    excess: Weights
    """Over all kinds, [ranks]."""
    neediest_first: Indices
    """The experts in the order of the last attempt; also the ranks in `lightest_first`."""
    lightest_first: Indices
    step: Indices
    """[4]: the step found."""


class SpareSlots(NamedTuple):
    """The slots whose expert has other replicas, with what a copy to them depends on."""

    slots: Indices
    """[spare slots]."""
    least_cost: Weights
    """Of a copy, [spare slots]: less than a move where the slot may get back its expert, or an
    expert its home."""
    before: Weights
    """Excess that it removes, before what is left on the rank is subtracted, [spare slots]."""
    without: Load
    """What the rank carries above the threshold without the expert, [kinds, spare slots]."""


class Partners(NamedTuple):
    """The slots of the least loaded ranks, with what a swap depends on side by side."""

    slots: Indices
    """[partners]."""
    excess: Weights
    """Of their ranks, [partners]."""
    share: Load
    """Their load, [kinds, partners]."""
    without: Load
    """What their rank carries without them, [kinds, partners]."""
    least_cost: Weights
    """Of a swap with a slot that holds what it held at the start, [partners]."""
    removed: Weights
    """Excess that a swap removes, [partners]; overwritten by each search."""
