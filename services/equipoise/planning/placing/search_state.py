"""The state of `relieve`: a layer's slots, experts and ranks, as arrays for compiled code.

Types only. Numba does not recompile `relieve` when only this file changes: change a field here
together with `relieve.py`.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from equipoise.planning.arrays import Bools, Indices, Slots, Weights

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


class SearchPath(NamedTuple):
    """Steps from the start, with the state before and after each."""

    steps: Indices
    """[steps, 4]: a slot and its new expert, then another slot and its new expert, or -1 twice."""
    busiest: Weights
    """[steps + 1]: load of the busiest rank."""
    moves: Indices
    """[steps + 1]: slots that differ from the start."""
    off_home: Weights
    """[steps + 1]: load served off its home node."""


class ExpertTotals(NamedTuple):
    """State of each expert, [experts]; `relieve` updates it in place."""

    load: Weights
    num_replicas: Indices
    num_off_home: Indices
    share: Weights
    """Load per replica; `share_of_more` with one more replica, `share_of_fewer` with one less."""
    share_of_more: Weights
    share_of_fewer: Weights
    neediest_first: Indices
    """The experts in the order of the last attempt."""


class RankTotals(NamedTuple):
    """State of each rank, [ranks]; `relieve` updates it in place."""

    carried: Weights
    heaviest: Weights
    """The largest share on each rank; `lightest` is the smallest."""
    lightest: Weights
    num_changed: Indices
    """Slots that differ from the start."""
    weighed_at: Indices
    """The step at which each rank's totals were last computed."""
    busiest_first: Indices
    """The ranks in the order of the last attempt."""


class Swaps(NamedTuple):
    """A cache of the best swap between two ranks, by a hash of the pair.

    An entry is valid until the totals of either rank change.
    """

    pair: Indices
    found_at: Indices
    """The step at which the entry was computed."""
    gain: Weights
    """Excess that the swap removes per cost; if there is none, an upper bound of that."""
    own: Indices
    """Slot of the busier rank, or -1 if no swap exceeds `gain`."""
    other: Indices
    """Slot of the other rank, or -1."""


class SearchState(NamedTuple):
    """One layer during the search; arrays, updated in place."""

    start: Slots
    slots: Slots
    share_of_slot: Weights
    num_held: Counts
    """Replicas of each expert on each rank, [experts, ranks]."""
    num_on_node: Counts
    """Replicas of each expert on each node, [experts, nodes]."""
    is_near: Bools
    """Whether a rank of each node held each expert at the start, [experts, nodes]."""
    space: SearchSpace
    experts: ExpertTotals
    ranks: RankTotals
    swaps: Swaps
