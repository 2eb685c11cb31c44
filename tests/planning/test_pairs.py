"""Ranks of two slots get pairs of replicas whose loads come out even."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.balance import rank_loads
from equipoise.planning.placing.pairs import pair
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology
from tests.support.eplb import eplb


def skewed(seed, *, num_layers=2, num_experts):
    return np.random.default_rng(seed).lognormal(sigma=1.2, size=(num_layers, num_experts))


def busiest(table, load, *, num_ranks):
    return rank_loads(table, load=load, num_ranks=num_ranks).max(axis=1)


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(2, 9), st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_no_node_gets_busier_and_each_keeps_its_experts(seed, num_nodes, ranks_of_node, redundant):
    slots_of_node = 2 * ranks_of_node
    experts_of_node = max(slots_of_node - redundant, 2)
    num_experts, num_ranks = experts_of_node * num_nodes, ranks_of_node * num_nodes
    load = skewed(seed, num_experts=num_experts)
    load[0, ::3] = 0.0
    rng = np.random.default_rng(seed)
    table = np.empty((2, num_nodes, slots_of_node), dtype=np.int32)
    for layer, node in product(range(2), range(num_nodes)):
        first = np.arange(experts_of_node)
        extra = rng.integers(experts_of_node, size=slots_of_node - experts_of_node)
        table[layer, node] = rng.permutation(np.concatenate((first, extra)))
        table[layer, node] += node * experts_of_node
    table = table.reshape(2, -1)
    paired = pair(table, load=load, num_nodes=num_nodes)
    before, after = (
        rank_loads(one, load=load, num_ranks=num_ranks).reshape(2, num_nodes, -1).max(axis=2)
        for one in (table, paired)
    )
    assert (after <= before * (1 + 1e-9)).all()
    node_of_slot = np.arange(table.shape[1]) // slots_of_node
    assert (paired // experts_of_node == node_of_slot).all()
    for layer in paired:
        assert set(layer.tolist()) == set(range(num_experts))


def most_even(load, *, num_ranks):
    """The load of the busiest rank under the best numbers of replicas, by trying all of them."""
    spare = 2 * num_ranks - len(load)
    best = np.inf
    for extra in product(range(spare + 1), repeat=len(load)):
        if sum(extra) != spare:
            continue
        count = 1 + np.array(extra)
        share = np.sort(np.repeat(load / count, count))
        best = min(best, (share + share[::-1])[:num_ranks].max())
    return best


def test_replicas_are_as_many_as_the_best_of_all_numbers():
    ratios = []
    for seed in range(12):
        load = skewed(seed, num_layers=1, num_experts=7)
        table = np.concatenate((np.arange(7), np.arange(5)))[None].astype(np.int32)
        reached = busiest(pair(table, load=load, num_nodes=1), load, num_ranks=6)
        ratios.append(reached[0] / most_even(load[0], num_ranks=6))
    assert min(ratios) > 1 - 1e-9
    assert np.mean(ratios) < 1.02, ratios


def test_ranks_of_two_slots_are_more_even_than_by_the_published_numbers():
    model = ModelShape(num_layers=4, num_experts=64, num_groups=1, expert_bytes=1)
    topology = Topology(node_of_rank=("a",) * 24 + ("b",) * 24, slots_per_rank=2)
    load = skewed(3, num_layers=4, num_experts=64)
    made = plan(load, model=model, topology=topology, algorithm=Algorithm.GLOBAL)
    greedy = eplb(load, num_slots=96, num_groups=1, num_nodes=1, num_ranks=48, hierarchical=False)
    of_greedy = load.sum(axis=1) / 48 / busiest(greedy, load, num_ranks=48)
    assert made.balancedness > of_greedy.mean() + 0.03
