"""What `relieve` works on: a layer's slots, experts and ranks, in arrays that compiled code takes.

Only types. Compiled code builds on their fields and is not compiled again when this file changes
alone: whoever changes a field changes `relieve` with it.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from equipoise.planning.arrays import Bools, Indices, Slots, Weights

Counts = npt.NDArray[np.int16]


class SearchSpace(NamedTuple):
    """Where a layer's slots are, and what a step costs.

    `first_slot` is int64 [ranks + 1], `rank_of_slot` int64 [slots], `node_of_rank` int64 [ranks].
    `home_of_expert`, int64 [experts], is the node that should serve each expert. A step costs
    `cost_of_move` for each slot that differs from the start afterwards and did not before, a little
    more if its expert has to come from another node, and `cost_of_leaving` for each mean rank load
    that it takes off its home node.
    """

    first_slot: Indices
    rank_of_slot: Indices
    node_of_rank: Indices
    home_of_expert: Indices
    cost_of_move: float
    cost_of_leaving: float


class Path(NamedTuple):
    """Steps from the start on, and what has been reached and spent before and after each.

    `steps` is int64 [steps, 4]: a slot and its new expert, and another slot and its new expert, or
    -1 twice. `busiest` is the busiest rank's load, `moves` the number of slots that differ from
    the start, `off_home` the load served off its home node; each is [steps + 1].
    """

    steps: Indices
    busiest: Weights
    moves: Indices
    off_home: Weights


class ExpertTotals(NamedTuple):
    """What is known of each expert, [experts], changed in place by `relieve`."""

    load: Weights
    num_replicas: Indices
    num_off_home: Indices
    share: Weights
    """Load of one replica; `share_of_more` if there were one more, `share_of_fewer` one less."""
    share_of_more: Weights
    share_of_fewer: Weights
    neediest_first: Indices
    """The experts in the order in which they were tried last."""


class RankTotals(NamedTuple):
    """What is known of each rank, [ranks], changed in place by `relieve`."""

    carried: Weights
    heaviest: Weights
    """The largest share on each rank; `lightest` is the smallest."""
    lightest: Weights
    num_changed: Indices
    """Slots that differ from the start."""
    weighed_at: Indices
    """The step at which each rank was weighed last."""
    busiest_first: Indices
    """The ranks in the order in which they were tried last."""


class Swaps(NamedTuple):
    """The best swaps found between two ranks each, by a hash of the pair.

    One holds as long as neither rank is weighed again. `gain` is the excess that it removes per
    cost; where the slots in `own` and `other` are -1, no swap of the pair removes more than that.
    """

    pair: Indices
    found_at: Indices
    gain: Weights
    own: Indices
    other: Indices


class SearchState(NamedTuple):
    """One layer on its way; arrays, changed in place."""

    start: Slots
    slots: Slots
    share_of_slot: Weights
    num_held: Counts
    """Replicas of each expert on each rank, [experts, ranks]."""
    is_near: Bools
    """Whether a rank of each node held each expert at the start, [experts, nodes]."""
    ground: SearchSpace
    experts: ExpertTotals
    ranks: RankTotals
    swaps: Swaps
