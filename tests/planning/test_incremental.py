import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.balance import balancedness, balancedness_per_layer, rank_loads
from equipoise.planning.layout import Layout, contiguous_layout
from equipoise.planning.placing.from_scratch import place_globally
from equipoise.planning.placing.incremental import improve
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.relieve import relieve
from equipoise.planning.placing.search_state import Goal, SearchSpace
from equipoise.planning.planner import LEAST_LAYER_GAIN, plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology
from tests.support.eplb import eplb

NUM_LAYERS, NUM_EXPERTS, NUM_RANKS, SLOTS = 6, 48, 8, 7
MODEL = ModelShape(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, num_groups=4, expert_bytes=1)
TOPOLOGY = Topology(node_of_rank=("a",) * 4 + ("b",) * 4, slots_per_rank=SLOTS)


def loads(seed, *, num=2):
    return np.random.default_rng(seed).lognormal(size=(num, NUM_LAYERS, NUM_EXPERTS))


def layout_for(load):
    made = plan(load, model=MODEL, topology=TOPOLOGY, algorithm=Algorithm.GLOBAL)
    return Layout(
        generation=1,
        num_experts=NUM_EXPERTS,
        num_ranks=NUM_RANKS,
        expert_of_slot=made.expert_of_slot,
    )


def improved(load, current, **limits):
    return plan(
        load,
        model=MODEL,
        topology=TOPOLOGY,
        current=current,
        algorithm=Algorithm.INCREMENTAL,
        **limits,
    )


def reached(table, load):
    return balancedness(rank_loads(table, load=load, num_ranks=NUM_RANKS))


@given(st.integers(0, 10_000), st.sampled_from([None, 10, 40]), st.sampled_from([None, 0.9]))
@settings(max_examples=30, deadline=None)
def test_every_prefix_of_the_steps_is_a_valid_layout_and_no_worse(seed, max_moves, target):
    old, new = loads(seed)
    current = layout_for(old)
    problem = Problem.of(
        new, model=MODEL, topology=TOPOLOGY, current=current, ranks=tuple(range(NUM_RANKS))
    )
    made = improve(
        problem,
        layers=np.ones(MODEL.num_layers, dtype=np.bool_),
        fresh=place_globally(problem),
        standing=problem.balancedness_of_layer(problem.held),
        least_gain=LEAST_LAYER_GAIN,
        target=target,
        max_moves=max_moves,
    )
    table, before = current.expert_of_slot.copy(), reached(current.expert_of_slot, new)
    for step in made.steps:
        table[step.layer, step.slots] = step.experts
        current.with_placement(table, generation=2)
        after = reached(table, new)
        assert after - before == pytest.approx(step.gain, abs=1e-9)
        before = after
    np.testing.assert_array_equal(table, made.table)
    num_moves = sum(step.moves for step in made.steps)
    assert num_moves == (made.table != problem.held).sum()
    assert max_moves is None or num_moves <= max_moves
    slopes = [step.gain / step.moves for step in made.steps]
    assert slopes == sorted(slopes, reverse=True)


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_without_a_limit_it_is_as_balanced_as_the_published_greedy(seed):
    old, new = loads(seed)
    made = improved(new, layout_for(old))
    greedy = eplb(
        new,
        num_slots=NUM_RANKS * SLOTS,
        num_groups=1,
        num_nodes=1,
        num_ranks=NUM_RANKS,
        hierarchical=False,
    )
    of_greedy = balancedness_per_layer(rank_loads(greedy, load=new, num_ranks=NUM_RANKS))
    assert (made.balancedness_of_layer >= of_greedy - LEAST_LAYER_GAIN).all()


def test_a_target_is_reached_with_a_fraction_of_the_moves_of_a_new_plan():
    old, new = loads(1)
    current = layout_for(old)
    fresh = plan(new, model=MODEL, topology=TOPOLOGY, current=current, algorithm=Algorithm.GLOBAL)
    made = improved(new, current, target_balancedness=0.95)
    assert 0.95 <= made.balancedness < 0.97
    assert made.moves * 4 < fresh.moves
    assert f"by {made.moves} moves" in made.reason


def test_limits_make_auto_incremental():
    old, new = loads(2)
    chosen = {"model": MODEL, "topology": TOPOLOGY, "current": layout_for(old)}
    made = plan(new, target_balancedness=0.9, **chosen)
    assert made.algorithm is Algorithm.INCREMENTAL
    np.testing.assert_array_equal(
        made.expert_of_slot,
        improved(new, chosen["current"], target_balancedness=0.9).expert_of_slot,
    )


def test_nothing_moves_at_the_target():
    (load,) = loads(3, num=1)
    made = improved(load, layout_for(load), target_balancedness=0.9)
    assert made.moves == 0
    assert "has reached the target of 0.900" in made.reason


def test_a_target_out_of_reach_is_reported():
    old, new = loads(4)
    made = improved(new, layout_for(old), target_balancedness=0.99999)
    assert made.balancedness > 0.99
    assert "the target of 1.000 is out of reach" in made.reason


def test_the_curve_has_the_balance_for_any_number_of_moves():
    old, new = loads(5)
    current = layout_for(old)
    curve = improved(new, current).curve
    moves, balance = (np.array(values) for values in zip(*curve, strict=True))
    assert moves[0] == 0
    assert balance[0] == pytest.approx(reached(current.expert_of_slot, new))
    assert (np.diff(moves) > 0).all()
    slopes = np.diff(balance) / np.diff(moves)
    assert (np.diff(slopes) <= 1e-12).all()
    half = int(moves[len(moves) // 2])
    made = improved(new, current, max_moves=half)
    assert made.balancedness == pytest.approx(balance[len(moves) // 2], abs=1e-9)


def test_renaming_experts_only_renames_the_plan():
    old, new = loads(6)
    name = np.random.default_rng(6).permutation(NUM_EXPERTS)
    renamed = np.empty_like(new)
    renamed[:, name] = new
    current = layout_for(old)
    made = improved(new, current, target_balancedness=0.95)
    other = improved(
        renamed,
        current.with_placement(name[current.expert_of_slot], generation=1),
        target_balancedness=0.95,
    )
    np.testing.assert_array_equal(name[made.expert_of_slot], other.expert_of_slot)


def test_plans_are_deterministic():
    old, new = loads(7)
    first, second = (improved(new, layout_for(old), max_moves=50) for _ in range(2))
    np.testing.assert_array_equal(first.expert_of_slot, second.expert_of_slot)
    assert first.reason == second.reason


@pytest.mark.parametrize(("hot_slot", "near_slot"), [(6, 4), (0, 2)])
def test_between_equal_gains_the_move_with_a_source_on_its_node_is_made(hot_slot, near_slot):
    # Two slots a rank, two ranks a node; a spare replica of expert 2 on either node.
    start = np.array([1, 3, 2, 4, 2, 5, 1, 6], dtype=np.int32)
    start[hot_slot] = 0
    space = SearchSpace(
        np.arange(0, 9, 2), np.repeat(np.arange(4), 2), np.array([0, 0, 1, 1]),
        np.zeros(7, dtype=np.int64), 1.0, 0.0, 0.0,
    )  # fmt: skip
    load = np.array([[4.0], [1], [1], [1], [1], [1], [1]])
    path = relieve(start, load, space, Goal(np.array([3.1]), np.ones(1), np.inf))
    np.testing.assert_array_equal(path.steps[0], [near_slot, 0, -1, -1])


def test_layers_that_may_change_do_not_make_up_for_those_that_may_not():
    """Otherwise a target that is out of reach would have them placed from scratch."""
    model = ModelShape(num_layers=4, num_experts=64, num_groups=1, expert_bytes=1)
    topology = Topology(node_of_rank=("a",) * 16, slots_per_rank=6)
    start = contiguous_layout(num_layers=4, num_experts=64, num_ranks=16, slots_per_rank=6)
    load = np.random.default_rng(3).lognormal(size=(4, 64))
    problem = Problem.of(
        load, model=model, topology=topology, current=start, ranks=tuple(range(16))
    )
    made = improve(
        problem,
        layers=np.array([True, True, False, False]),
        fresh=place_globally(problem),
        standing=problem.balancedness_of_layer(problem.held),
        least_gain=LEAST_LAYER_GAIN,
        target=0.9,
    )
    reached = problem.balancedness_of_layer(made.table)
    np.testing.assert_array_equal(made.table[2:], problem.held[2:])
    assert 0.9 <= reached[:2].mean() < 0.95
    assert sum(step.moves for step in made.steps) == (made.table != problem.held).sum() < 100


def test_moves_that_restore_lost_experts_count_in_the_budget():
    before, after = loads(5)
    current = layout_for(before)

    def planned(max_moves):
        return improved(after, current, exclude_ranks=frozenset({3}), max_moves=max_moves)

    least = planned(0)
    assert least.moves > 0, "every expert must be on some rank"
    assert planned(least.moves).moves == least.moves
    assert least.moves < planned(least.moves + 3).moves <= least.moves + 3


@pytest.mark.parametrize("idle", [0, 1])
@pytest.mark.parametrize("locality", [None, 0.5])
def test_a_layer_that_one_kind_of_traffic_leaves_idle_is_planned_for_the_other(idle, locality):
    load, current = loads(6), layout_for(loads(7)[0])
    load[idle, 0] = 0.0
    made = improved(load, current, weights=np.array([0.5, 0.5]), locality=locality)
    busy = load[1 - idle, :1]
    first, before = made.expert_of_slot[:1], current.expert_of_slot[:1]
    assert reached(first, busy) > reached(before, busy)
    assert np.isfinite(made.balancedness)
