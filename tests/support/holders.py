"""Which ranks hold an expert of a layout."""

import numpy as np


def ranks_of_expert(layout, *, layer, expert):
    """List the ranks that hold an expert in a layer, ascending."""
    rank_of_slot = np.repeat(np.arange(layout.num_ranks), layout.slots_of_rank)
    held = layout.expert_of_slot[layer] == expert
    return tuple(dict.fromkeys(rank_of_slot[held].tolist()))
