"""The lowest load that the busiest rank of a layout can have, exactly: HiGHS."""

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array


def least_maximum(load, slots_of_expert, replica_count, num_ranks, slots_per_rank):
    """Of assignments per expert, in parts: a replica may get half an assignment."""
    pairs = [
        (expert, int(slot) // slots_per_rank)
        for expert, number in enumerate(replica_count.tolist())
        for slot in slots_of_expert[expert, :number]
    ]
    experts, ranks = np.array(pairs).T
    columns, ones = np.arange(len(pairs)), np.ones(len(pairs))
    limit = np.full(num_ranks, len(pairs))
    at_most = coo_array(
        (
            np.r_[ones, -np.ones(num_ranks)],
            (np.r_[ranks, np.arange(num_ranks)], np.r_[columns, limit]),
        ),
        shape=(num_ranks, len(pairs) + 1),
    )
    sums = coo_array((ones, (experts, columns)), shape=(len(replica_count), len(pairs) + 1))
    goal = np.zeros(len(pairs) + 1)
    goal[-1] = 1
    return linprog(
        goal,
        A_ub=at_most,
        b_ub=np.zeros(num_ranks),
        A_eq=sums,
        b_eq=load.numpy(),
        method="highs",
    ).fun
