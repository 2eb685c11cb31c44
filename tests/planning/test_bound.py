import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.placing.bound import upper_bounds
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology


@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(0, 3), st.floats(0.3, 3.0))
@settings(max_examples=100, deadline=None)
def test_no_plan_is_better_than_the_bound(seed, num_ranks, spare, tail):
    load = np.random.default_rng(seed).pareto(tail, size=(3, 12)) + 1e-3
    slots = -(-12 // num_ranks) + spare
    made = plan(
        load,
        model=ModelShape(num_layers=3, num_experts=12, num_groups=1, expert_bytes=1),
        topology=Topology(node_of_rank=("a",) * num_ranks, slots_per_rank=slots),
        algorithm=Algorithm.GLOBAL,
    )
    bounds = upper_bounds(load, num_slots=num_ranks * slots, num_ranks=num_ranks)
    assert (made.balancedness_of_layer <= bounds * (1 + 1e-6)).all()
    assert made.bound == pytest.approx(bounds.mean())


def test_an_expert_too_hot_for_its_replicas_limits_the_balance():
    # Four ranks, one spare slot: expert 0 is at best halved, to 4 where the mean is 2.75.
    bounds = upper_bounds(np.array([[8.0, 1.0, 1.0, 1.0]]), num_slots=5, num_ranks=4)
    assert bounds == pytest.approx([2.75 / 4.0])


def test_an_expert_cannot_have_more_replicas_than_there_are_ranks():
    bounds = upper_bounds(np.array([[8.0, 0.0]]), num_slots=8, num_ranks=2)
    assert bounds == pytest.approx([1.0])


def test_a_layer_without_load_is_balanced():
    np.testing.assert_array_equal(upper_bounds(np.zeros((2, 4)), num_slots=4, num_ranks=2), 1.0)
