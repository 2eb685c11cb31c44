"""Ranks of two slots get pairs of replicas whose loads come out even."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.balance import balancedness_per_layer, rank_loads
from equipoise.planning.placing.pairs import pair
from equipoise.planning.placing.refine import refine
from equipoise.planning.placing.twins import repair_twins
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology
from tests.support.eplb import eplb


def skewed(seed, *, num_layers=2, num_experts):
    return np.random.default_rng(seed).lognormal(sigma=1.2, size=(num_layers, num_experts))


def busiest(table, load, *, num_ranks):
    return rank_loads(table, load=load, num_ranks=num_ranks).max(axis=1)


def planned(load, *, num_ranks, num_nodes=1, num_groups=1, weights=None):
    """A plan for `load`, [layers, experts] or [kinds, layers, experts]."""
    num_layers, num_experts = load.shape[-2:]
    model = ModelShape(
        num_layers=num_layers, num_experts=num_experts, num_groups=num_groups, expert_bytes=1
    )
    nodes = tuple(f"n{rank * num_nodes // num_ranks}" for rank in range(num_ranks))
    return plan(
        load,
        model=model,
        topology=Topology(node_of_rank=nodes, slots_per_rank=2),
        algorithm=Algorithm.GLOBAL if num_groups == 1 else Algorithm.HIERARCHICAL,
        weights=weights,
    )


def refined_greedy(load, *, num_ranks, num_nodes=1, num_groups=1):
    """What a plan for `load`, [layers, experts], would be without pairs."""
    greedy = eplb(
        load,
        num_slots=2 * num_ranks,
        num_groups=num_groups,
        num_nodes=num_nodes,
        num_ranks=num_ranks,
        hierarchical=num_nodes > 1,
    )
    return refine(
        repair_twins(greedy, load=load, num_ranks=num_ranks, num_nodes=num_nodes),
        load=load,
        first_slot=np.arange(num_ranks + 1) * 2,
        block_of_rank=np.arange(num_ranks) * num_nodes // num_ranks,
    )


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(2, 9), st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_each_node_keeps_its_experts(seed, num_nodes, ranks_of_node, redundant):
    slots_of_node = 2 * ranks_of_node
    experts_of_node = max(slots_of_node - redundant, 2)
    num_experts = experts_of_node * num_nodes
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
    load = skewed(3, num_layers=4, num_experts=64)
    made = planned(load, num_ranks=48, num_nodes=2)
    greedy = eplb(load, num_slots=96, num_groups=1, num_nodes=1, num_ranks=48, hierarchical=False)
    of_greedy = load.sum(axis=1) / 48 / busiest(greedy, load, num_ranks=48)
    assert made.balancedness > of_greedy.mean() + 0.03


@pytest.mark.parametrize(
    ("load", "num_ranks", "best"),
    [
        # Swaps make more of the published numbers than of pairs.
        ([1, 3, 12, 1, 6, 1], 6, 1.0),
        ([2, 2, 5, 1, 2], 4, 1.0),
        ([4.51, 0.44, 1.05, 1.84, 1.12], 6, 0.998),
        # The most even pairs have an expert twice.
        ([3, 1, 2, 4, 4, 1], 5, 1.0),
        ([3, 1, 2, 2, 4], 4, 1.0),
    ],
)
def test_small_layers_are_as_even_as_possible(load, num_ranks, best):
    made = planned(np.array([load], dtype=np.float64), num_ranks=num_ranks)
    assert made.balancedness > best - 1e-9


def test_a_way_to_even_pairs_may_lead_through_an_expert_twice_in_a_pair():
    made = planned(np.array([[0.02, 5.54, 1.83, 0.05]]), num_ranks=4)
    assert made.balancedness > 0.99


def test_a_replica_that_becomes_the_lightest_is_not_overlooked():
    load = np.array([[1.0, 7.0]])
    paired = pair(np.array([[0, 1, 1, 1, 1, 1]]), load=load, num_nodes=1)
    assert busiest(paired, load, num_ranks=3)[0] < 8 / 3 + 1e-9


def test_no_layer_is_worse_than_without_pairs():
    rng = np.random.default_rng(61)
    for _ in range(60):
        num_ranks = int(rng.integers(2, 24))
        num_experts = int(rng.integers(2, 2 * num_ranks))
        load = rng.lognormal(sigma=rng.uniform(0.3, 2.5), size=(20, num_experts))
        without = refined_greedy(load, num_ranks=num_ranks)
        reached = load.sum(axis=1) / num_ranks / busiest(without, load, num_ranks=num_ranks)
        made = planned(load, num_ranks=num_ranks)
        assert (made.balancedness_of_layer >= reached - 1e-9).all()


def test_no_layer_is_worse_by_node_either():
    rng = np.random.default_rng(7)
    for _ in range(20):
        ranks_of_node, num_nodes = int(rng.integers(3, 9)), int(rng.integers(2, 4))
        num_ranks, num_experts = ranks_of_node * num_nodes, ranks_of_node * num_nodes
        load = rng.lognormal(sigma=rng.uniform(0.5, 2.0), size=(20, num_experts))
        pool = {"num_ranks": num_ranks, "num_nodes": num_nodes, "num_groups": num_nodes}
        without = refined_greedy(load, **pool)
        reached = load.sum(axis=1) / num_ranks / busiest(without, load, num_ranks=num_ranks)
        assert (planned(load, **pool).balancedness_of_layer >= reached - 1e-9).all()


def test_pairs_are_judged_by_all_kinds_of_traffic():
    rng = np.random.default_rng(63)
    common = rng.normal(size=(30, 32))
    kinds = np.exp(np.stack([common, common]) + rng.normal(scale=0.5, size=(2, 30, 32)))
    kinds /= kinds.sum(axis=2, keepdims=True)
    made = planned(kinds, num_ranks=24, weights=np.array([0.5, 0.5]))
    without = refined_greedy(kinds.mean(axis=0), num_ranks=24)
    reached = np.mean(
        [balancedness_per_layer(rank_loads(without, load=kind, num_ranks=24)) for kind in kinds],
        axis=0,
    )
    assert (made.balancedness_of_layer >= reached - 1e-9).all()
    assert made.balancedness > reached.mean()


def test_replicas_of_an_expert_are_on_both_nodes():
    made = planned(skewed(51, num_layers=20, num_experts=64), num_ranks=48, num_nodes=2)
    for layer in made.expert_of_slot:
        halves = [np.bincount(half, minlength=64) for half in layer.reshape(2, -1)]
        assert not ((sum(halves) > 1) & (np.min(halves, axis=0) == 0)).any()
    assert made.balancedness > 0.96


@pytest.mark.parametrize("num_ranks", [256, 512])
def test_the_search_is_not_cut_short_in_large_pools(num_ranks):
    made = planned(skewed(5, num_layers=1, num_experts=256), num_ranks=num_ranks)
    assert made.balancedness > 0.98


def test_a_node_is_searched_as_if_it_were_alone():
    load = skewed(41, num_layers=1, num_experts=64)
    alone = eplb(load, num_slots=128, num_groups=1, num_nodes=1, num_ranks=64, hierarchical=False)
    expected = pair(alone, load=load, num_nodes=1)
    table = (alone.reshape(1, 1, -1) + 64 * np.arange(16)[:, None]).reshape(1, -1)
    paired = pair(table, load=np.tile(load, 16), num_nodes=16)
    assert (paired.reshape(16, -1) % 64 == expected).all()
    assert busiest(expected, load, num_ranks=64) < busiest(alone, load, num_ranks=64)
