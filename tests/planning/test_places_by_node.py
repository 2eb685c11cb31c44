"""Plans that keep expert groups on nodes where layers share places."""

import os

import numpy as np
import pytest

from equipoise.planning.layout import Layout
from equipoise.planning.places import Wishes, plan_in_places
from equipoise.planning.placing.pooled import place_pooled
from equipoise.planning.placing.problem import Problem
from equipoise.planning.policy import Algorithm, SlotUse, Weighting
from equipoise.planning.topology import ModelShape, Topology

NUM_POOLS = int(os.environ.get("EQUIPOISE_RANDOM_POOLS", "200"))
SEED = int(os.environ.get("EQUIPOISE_FUZZ_SEED", "0"))
POOLED = SlotUse.POOLED
MODEL = ModelShape(num_layers=8, num_experts=64, num_groups=8, expert_bytes=1)
NUM_PLACES = 8 * 5
"""Of each of 16 ranks on 4 nodes; 4 slots of a layer hold each expert once."""


def topology_of(places=(NUM_PLACES,) * 16, *, slots=7):
    nodes = tuple(f"node-{rank // 4}" for rank in range(16))
    return Topology(node_of_rank=nodes, slots_per_rank=slots, places_of_rank=places)


def skewed(seed):
    """Half of the layers are nearly even, and half starve for replicas; groups are alike."""
    rng = np.random.default_rng(seed)
    sigma = np.array([[0.1]] * 4 + [[1.2]] * 4)
    load = np.exp(sigma * rng.standard_normal((8, 64)))
    of_group = load.reshape(8, 8, 8)
    return (of_group / of_group.sum(axis=2, keepdims=True)).reshape(8, 64)


def planned(load, wishes, *, current=None, topology=None, model=MODEL):
    topology = topology or topology_of()
    made = plan_in_places(load, wishes, model=model, topology=topology, current=current)
    layout = Layout(
        generation=1,
        num_experts=model.num_experts,
        num_ranks=topology.num_ranks,
        expert_of_slot=made.expert_of_slot,
        share_of_slot=made.share_of_slot,
    )
    assert (np.array(layout.used_places) <= topology.places_of_rank).all()
    return made, layout


def groups_are_on_nodes(layout, topology, model=MODEL):
    problem = Problem.of(
        np.ones((model.num_layers, model.num_experts)),
        model=model,
        topology=topology,
        current=layout,
        ranks=tuple(range(topology.num_ranks)),
    )
    return problem.is_hierarchical(layout.expert_of_slot)


def test_groups_stay_on_nodes_and_layers_still_share_places():
    load, per_layer = skewed(0), Wishes(algorithm=Algorithm.HIERARCHICAL)
    pooled = Wishes(algorithm=Algorithm.HIERARCHICAL, slots=POOLED)
    even, _ = planned(load, per_layer)
    made, layout = planned(load, pooled)
    assert groups_are_on_nodes(layout, topology_of()).all()
    assert made.algorithm is Algorithm.HIERARCHICAL
    assert made.off_node_share == pytest.approx(0.0)
    assert "100.0% of the load stays on its home node" in made.reason
    in_use = (layout.expert_of_slot >= 0).sum(axis=1)
    assert in_use[4:].mean() > in_use[:4].mean() + 5
    assert made.balancedness > even.balancedness + 0.01


def test_slots_go_to_the_busiest_node_of_a_layer():
    load = np.ones((8, 64))
    load[:, 0] = 24.0  # Its node is the busiest, and only that expert's replicas relieve it.
    _, layout = planned(load, Wishes(algorithm=Algorithm.HIERARCHICAL, slots=POOLED))
    of_node = (layout.expert_of_slot >= 0).reshape(8, 4, -1).sum(axis=2)
    holder = (layout.expert_of_slot == 0).reshape(8, 4, -1).any(axis=2)
    assert (holder.sum(axis=1) == 1).all()
    assert of_node[holder].min() > of_node[~holder].max()


def test_an_incremental_plan_leaves_groups_where_they_are():
    wishes = Wishes(algorithm=Algorithm.HIERARCHICAL, slots=POOLED)
    _, current = planned(skewed(0), wishes)
    few = Wishes(algorithm=Algorithm.INCREMENTAL, slots=POOLED, locality=0.0)
    drifted = skewed(0) * np.exp(0.3 * np.random.default_rng(9).standard_normal((8, 64)))
    made, layout = planned(drifted, few, current=current)
    assert groups_are_on_nodes(layout, topology_of()).all()
    assert made.returned_layers == 0
    anew, _ = planned(drifted, wishes, current=current)
    assert made.moves > 0
    assert made.balancedness > anew.balancedness - 0.05


def test_layers_that_spread_groups_return_them_to_their_nodes():
    _, current = planned(skewed(0), Wishes(algorithm=Algorithm.GLOBAL, slots=POOLED))
    assert not groups_are_on_nodes(current, topology_of()).any()
    few = Wishes(algorithm=Algorithm.INCREMENTAL, slots=POOLED, locality=0.0)
    made, layout = planned(skewed(0), few, current=current)
    assert made.returned_layers == 8
    assert groups_are_on_nodes(layout, topology_of()).all()


def test_a_locality_lets_some_load_leave_for_balance():
    made = {}
    for locality in (0.0, 0.25, 1.0):
        algorithm = Algorithm.GLOBAL if locality == 1.0 else Algorithm.LOCAL
        wishes = Wishes(
            algorithm=algorithm, slots=POOLED, locality=None if locality == 1.0 else locality
        )
        made[locality], _ = planned(skewed(3), wishes)
    assert made[0.0].off_node_share == pytest.approx(0.0)
    assert 0.0 < made[0.25].off_node_share <= 0.25 * 0.75 + 1e-6
    assert made[1.0].off_node_share > 0.5
    assert made[0.0].balancedness < made[0.25].balancedness


@pytest.mark.parametrize(
    ("topology", "groups", "words"),
    [
        (topology_of(), 6, "not hierarchical: 6 groups do not divide evenly over 4 nodes"),
        (
            topology_of((46,) * 12 + (30,) * 4),
            8,
            "not hierarchical: node node-3 has 120 places, fewer than the 128 experts of a node",
        ),
    ],
)
def test_where_groups_cannot_stay_the_plan_says_why_and_ignores_nodes(topology, groups, words):
    num_experts = 66 if groups == 6 else 64
    model = ModelShape(num_layers=8, num_experts=num_experts, num_groups=groups, expert_bytes=1)
    load = np.random.default_rng(0).lognormal(size=(8, num_experts))
    wishes = Wishes(algorithm=Algorithm.HIERARCHICAL, slots=POOLED)
    made, _ = planned(load, wishes, topology=topology, model=model)
    assert words in made.reason
    assert made.algorithm is Algorithm.GLOBAL


def test_ranks_of_a_node_may_have_unequal_places():
    places = (30, 50, 40, 40) * 4
    wishes = Wishes(algorithm=Algorithm.HIERARCHICAL, slots=POOLED)
    _, layout = planned(skewed(1), wishes, topology=topology_of(places))
    assert groups_are_on_nodes(layout, topology_of(places)).all()


def random_pool(rng):
    """A pool with hardly more places than experts, or some more."""
    num_nodes, per_node = int(rng.integers(2, 4)), int(rng.integers(1, 4))
    num_groups = num_nodes * int(rng.integers(1, 3))
    num_experts, num_ranks = num_groups * int(rng.integers(per_node, 5)), num_nodes * per_node
    num_layers = int(rng.integers(1, 6))
    slots = -(-num_experts // num_ranks) + int(rng.integers(0, 3))
    slots = min(slots, num_experts // num_nodes)
    least = -(-num_experts * num_layers // num_ranks) + int(rng.integers(0, 6))
    more = rng.integers(0, 4, num_ranks) * (rng.random() < 0.3)
    model = ModelShape(
        num_layers=num_layers, num_experts=num_experts, num_groups=num_groups, expert_bytes=1
    )
    topology = Topology(
        node_of_rank=tuple(str(rank // per_node) for rank in range(num_ranks)),
        slots_per_rank=slots,
        places_of_rank=tuple(np.minimum(least + more, slots * num_layers).tolist()),
    )
    return model, topology


def random_wishes(rng):
    algorithm = rng.choice([Algorithm.HIERARCHICAL, Algorithm.INCREMENTAL, Algorithm.LOCAL])
    locality = None if algorithm is Algorithm.HIERARCHICAL else rng.choice([0.0, 0.25])
    return Wishes(
        slots=POOLED,
        algorithm=algorithm,
        locality=locality,
        weighted=Weighting.ON if rng.random() < 0.3 else Weighting.OFF,
    )


@pytest.mark.parametrize("part", range(4))
def test_no_random_pool_exceeds_its_places_or_spreads_a_group(part):
    for number in range(part, NUM_POOLS, 4):
        rng = np.random.default_rng([SEED, number])
        model, topology = random_pool(rng)
        current = None
        for _ in range(3):
            sigma = rng.uniform(0.1, 2.0, (model.num_layers, 1))
            load = np.exp(sigma * rng.standard_normal((model.num_layers, model.num_experts)))
            wishes = random_wishes(rng)
            made, current = planned(load, wishes, current=current, topology=topology, model=model)
            assert made.balancedness <= made.bound + 1e-9
            if wishes.locality in {None, 0.0}:
                assert groups_are_on_nodes(current, topology, model).all(), number


def test_some_layers_are_placed_for_their_own_kinds_of_traffic():
    """Placed again beside others, a layer is placed as it would be alone."""
    kinds = np.stack([skewed(1), skewed(2)])
    topology = topology_of()
    where = {"model": MODEL, "topology": topology, "ranks": tuple(range(16)), "current": None}
    problem = Problem.of(kinds, weights=np.array([0.5, 0.5]), **where)
    free = np.zeros(8, dtype=bool)
    free[5:] = True
    beside = place_pooled(problem, free=free)[5:]
    fewer = Problem.of(
        kinds[:, 5:],
        weights=np.array([0.5, 0.5]),
        **where | {"model": ModelShape(num_layers=3, num_experts=64, num_groups=8, expert_bytes=1)},
    )
    assert np.array_equal(beside, place_pooled(fewer, free=np.ones(3, dtype=bool)))
