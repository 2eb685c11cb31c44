"""Whole ranks change places so that replicas of an expert are on different nodes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.placing.spread import spread


def too_many(layer, node_of_slot, *, num_experts):
    """Replicas on a node beyond an even spread of their expert."""
    on_node = np.zeros((num_experts, node_of_slot.max() + 1), dtype=np.int64)
    np.add.at(on_node, (layer, node_of_slot), 1)
    most = -(-on_node.sum(axis=1) // on_node.shape[1])
    return np.maximum(on_node - most[:, None], 0).sum()


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_ranks_stay_as_they_are_and_fewer_replicas_share_a_node(seed, num_nodes, ranks_of_node):
    rng = np.random.default_rng(seed)
    slots_of_rank = rng.integers(1, 4, size=num_nodes * ranks_of_node)
    ranks = [rng.choice(6, size=size, replace=False) for size in slots_of_rank]
    table = np.concatenate(ranks)[None].astype(np.int32)
    first_slot = np.concatenate(([0], np.cumsum(slots_of_rank)))
    node_of_rank = np.arange(len(ranks)) // ranks_of_node
    after = spread(table, num_experts=6, first_slot=first_slot, node_of_rank=node_of_rank)
    assert sorted(tuple(rank) for rank in np.split(after[0], first_slot[1:-1])) == sorted(
        tuple(rank) for rank in ranks
    )
    nodes = np.repeat(node_of_rank, slots_of_rank)
    assert too_many(after[0], nodes, num_experts=6) <= too_many(table[0], nodes, num_experts=6)


def test_two_replicas_of_each_expert_come_to_both_nodes():
    table = np.array([[0, 1, 0, 1, 2, 3, 2, 3]], dtype=np.int32)
    after = spread(
        table, num_experts=4, first_slot=np.arange(5) * 2, node_of_rank=np.array([0, 0, 1, 1])
    )
    assert sorted(after[0, :4].tolist()) == sorted(after[0, 4:].tolist()) == [0, 1, 2, 3]
