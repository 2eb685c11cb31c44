import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.layout import Layout
from equipoise.planning.placing.locality import place_locally
from equipoise.planning.placing.problem import Problem
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology

MODEL = ModelShape(num_layers=4, num_experts=64, num_groups=8, expert_bytes=1)
TOPOLOGY = Topology(node_of_rank=tuple(f"n{rank // 4}" for rank in range(16)), slots_per_rank=5)


def skewed_load(seed):
    """Some groups carry more than others, so that nodes cannot be even."""
    rng = np.random.default_rng(seed)
    of_group = np.repeat(rng.lognormal(sigma=0.4, size=(4, 8)), 8, axis=1)
    return of_group * rng.lognormal(sigma=0.8, size=(4, 64))


def problem(load):
    return Problem.of(load, model=MODEL, topology=TOPOLOGY, current=None, ranks=tuple(range(16)))


def off_home(load, table, homes):
    """Load of each layer served on other nodes than by the placement `homes`."""
    node_of_slot = np.repeat(np.arange(4), 20)
    total = np.zeros(4)
    for layer, slots in enumerate(table):
        home = dict(zip(homes[layer].tolist(), node_of_slot.tolist(), strict=True))
        replicas = np.bincount(slots, minlength=64)
        for slot, expert in enumerate(slots.tolist()):
            if home[expert] != node_of_slot[slot]:
                total[layer] += load[layer, expert] / replicas[expert]
    return total


@given(st.integers(0, 1000), st.floats(0.01, 0.99))
@settings(max_examples=25, deadline=None)
def test_no_more_load_leaves_its_home_node_than_the_locality_allows(seed, locality):
    load = skewed_load(seed)
    homes, table = (place_locally(problem(load), locality=dial) for dial in (0.0, locality))
    Layout(generation=1, num_experts=64, num_ranks=16, expert_of_slot=table)
    allowed = locality * 0.75 * load.sum(axis=1)
    assert (off_home(load, table, homes) <= allowed * (1 + 1e-6)).all()
    better = problem(load).balancedness_of_layer
    assert (better(table) >= better(homes) - 1e-9).all()


def test_the_ends_of_locality_are_hierarchical_and_global():
    load = skewed_load(1)
    at_ends = [plan(load, model=MODEL, topology=TOPOLOGY, locality=dial) for dial in (0.0, 1.0)]
    named = [
        plan(load, model=MODEL, topology=TOPOLOGY, algorithm=algorithm)
        for algorithm in (Algorithm.HIERARCHICAL, Algorithm.GLOBAL)
    ]
    for by_dial, by_name in zip(at_ends, named, strict=True):
        np.testing.assert_array_equal(by_dial.expert_of_slot, by_name.expert_of_slot)
    assert at_ends[0].off_node_share == 0.0
    assert at_ends[1].off_node_share > 0.4


def test_a_quarter_of_locality_gains_most_of_the_balance():
    load = skewed_load(2)
    strict, mild, free = (
        plan(load, model=MODEL, topology=TOPOLOGY, locality=dial) for dial in (0.0, 0.25, 1.0)
    )
    assert strict.balancedness < 0.9
    assert free.balancedness > 0.995
    assert mild.balancedness > 0.98
    assert mild.off_node_share < 0.19
    assert mild.algorithm is Algorithm.LOCAL
    assert f"{1 - mild.off_node_share:.1%} of the load stays on its home node" in mild.reason


def test_a_higher_locality_value_never_loses_balance():
    load = skewed_load(3)
    balance = [
        plan(load, model=MODEL, topology=TOPOLOGY, locality=dial).balancedness
        for dial in (0.0, 0.05, 0.1, 0.2, 0.4)
    ]
    assert balance == pytest.approx(sorted(balance), abs=0.002)


def test_without_home_nodes_a_local_plan_is_global_and_gives_the_reason():
    model = ModelShape(num_layers=4, num_experts=64, num_groups=1, expert_bytes=1)
    made = plan(skewed_load(4), model=model, topology=TOPOLOGY, locality=0.2)
    assert made.algorithm is Algorithm.GLOBAL
    assert "not hierarchical: 1 groups do not divide evenly over 4 nodes" in made.reason
    assert made.off_node_share == 0.0


def test_a_local_plan_returns_load_to_its_nodes_also_at_a_loss():
    load = skewed_load(5)
    free = plan(load, model=MODEL, topology=TOPOLOGY, algorithm=Algorithm.GLOBAL)
    assert free.off_node_share > 0.4
    current = Layout(generation=1, num_experts=64, num_ranks=16, expert_of_slot=free.expert_of_slot)
    chosen = {"model": MODEL, "topology": TOPOLOGY, "locality": 0.1}
    made = plan(load, current=current, **chosen)
    assert made.returned_layers == 4
    assert made.off_node_share <= 0.075
    assert made.balancedness < free.balancedness
    held = current.with_placement(made.expert_of_slot, generation=2)
    drifted = load * np.random.default_rng(6).lognormal(sigma=0.02, size=load.shape)
    again = plan(drifted, current=held, **chosen)
    assert again.returned_layers == 0
