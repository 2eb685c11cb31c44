"""Plans with uneven shares: never less balanced than even ones, and valid as layouts."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.balance import balancedness, balancedness_per_layer, compare, layout_loads
from equipoise.planning.costs import MeasuredCosts
from equipoise.planning.layout import Layout
from equipoise.planning.load import Shift
from equipoise.planning.moves import waves
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm, Policy, Weighting
from equipoise.planning.topology import ModelShape, Topology
from equipoise.planning.verdict import judge
from tests.support.holders import ranks_of_expert

NO_SHIFT = Shift(detected=False, distance=0.0, noise=0.0, reason="no shift")


def pool(*, num_experts, num_ranks, slots_per_rank, num_layers=2, num_groups=1, ranks_per_node=2):
    model = ModelShape(
        num_layers=num_layers, num_experts=num_experts, num_groups=num_groups, expert_bytes=100
    )
    nodes = tuple(f"node-{rank // ranks_per_node}" for rank in range(num_ranks))
    return model, Topology(node_of_rank=nodes, slots_per_rank=slots_per_rank)


FEW_SLOTS = pool(num_experts=28, num_ranks=16, slots_per_rank=2)
HALF_REDUNDANT = pool(num_experts=13, num_ranks=14, slots_per_rank=2)
MANY_SLOTS = pool(num_experts=16, num_ranks=4, slots_per_rank=5, num_groups=4)


def skewed(seed, *, num_experts, num_layers=2, sigma=0.7):
    return np.random.default_rng(seed).lognormal(0.0, sigma, (num_layers, num_experts))


def layout_of(made, model, topology, generation=1):
    return Layout(
        generation=generation,
        num_experts=model.num_experts,
        num_ranks=topology.num_ranks,
        expert_of_slot=made.expert_of_slot,
        share_of_slot=made.share_of_slot,
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sigma=st.floats(0.1, 2.5),
    chosen=st.sampled_from([FEW_SLOTS, HALF_REDUNDANT, MANY_SLOTS]),
    algorithm=st.sampled_from(list(Algorithm)),
    weighted=st.sampled_from([Weighting.AUTO, Weighting.ON]),
)
def test_no_layer_is_less_balanced_than_with_even_splits(seed, sigma, chosen, algorithm, weighted):
    model, topology = chosen
    load = skewed(seed, num_experts=model.num_experts, sigma=sigma)
    asked = {"model": model, "topology": topology, "algorithm": algorithm}
    even, made = plan(load, **asked), plan(load, weighted=weighted, **asked)
    assert (made.balancedness_of_layer >= even.balancedness_of_layer - 0.002).all()
    assert made.balancedness >= even.balancedness - 0.002
    assert made.balancedness <= made.bound + 1e-3
    loads = layout_loads(layout_of(made, model, topology), load)
    np.testing.assert_allclose(balancedness_per_layer(loads), made.balancedness_of_layer)


def test_few_redundant_slots_are_worth_more_with_uneven_shares():
    model, topology = FEW_SLOTS
    gains = []
    for seed in range(8):
        load = skewed(seed, num_experts=28)
        even = plan(load, model=model, topology=topology, algorithm=Algorithm.GLOBAL)
        made = plan(
            load,
            model=model,
            topology=topology,
            algorithm=Algorithm.GLOBAL,
            weighted=Weighting.AUTO,
        )
        assert made.share_of_slot is not None
        assert re.search("replicas serve uneven shares in [12] of 2 layers", made.reason)
        gains.append(made.balancedness - even.balancedness)
    assert np.mean(gains) > 0.015


def test_a_redundant_slot_for_each_of_two_makes_all_ranks_level():
    model, topology = HALF_REDUNDANT
    for seed in range(4):
        load = skewed(seed, num_experts=13)
        made = plan(
            load, model=model, topology=topology, algorithm=Algorithm.GLOBAL, weighted=Weighting.ON
        )
        layout_of(made, model, topology)
        assert made.balancedness > 0.9999


def test_replicas_of_an_expert_share_no_node_where_chains_are_short():
    model, topology = FEW_SLOTS
    load = np.full((2, 28), 1.0)
    load[:, :4] = 6.0
    made = plan(
        load, model=model, topology=topology, algorithm=Algorithm.GLOBAL, weighted=Weighting.ON
    )
    layout = layout_of(made, model, topology)
    for layer in range(2):
        for expert in range(28):
            nodes = [
                topology.node_of_rank[rank]
                for rank in ranks_of_expert(layout, layer=layer, expert=expert)
            ]
            assert len(set(nodes)) == len(nodes)


def test_without_weights_nothing_has_shares():
    model, topology = FEW_SLOTS
    made = plan(skewed(0, num_experts=28), model=model, topology=topology)
    assert made.share_of_slot is None


def drifted(seed, *, by=0.15):
    model, topology = FEW_SLOTS
    old = skewed(seed, num_experts=28)
    made = plan(
        old, model=model, topology=topology, algorithm=Algorithm.GLOBAL, weighted=Weighting.AUTO
    )
    new = old * np.random.default_rng(seed + 1).uniform(1 - by, 1 + by, old.shape)
    return layout_of(made, model, topology), new


def test_a_small_drift_is_met_by_other_shares_alone():
    model, topology = FEW_SLOTS
    current, load = drifted(0)
    stale = balancedness(layout_loads(current, load))
    made = plan(
        load,
        model=model,
        topology=topology,
        current=current,
        target_balancedness=stale + 0.01,
        weighted=Weighting.AUTO,
    )
    assert made.moves == 0
    assert "by shares alone" in made.reason
    assert made.balancedness >= stale + 0.01
    assert not layout_of(made, model, topology).same_placement(current)


def test_a_plan_without_weights_leaves_the_shares_that_are_better_than_none():
    model, topology = FEW_SLOTS
    current, load = drifted(4, by=0.01)
    made = plan(load, model=model, topology=topology, current=current, max_moves=0)
    np.testing.assert_array_equal(made.share_of_slot, current.share_of_slot)


def test_shares_are_even_again_when_a_rank_is_left_out():
    model, topology = pool(num_experts=16, num_ranks=4, slots_per_rank=6)
    load = skewed(5, num_experts=16, sigma=1.5)
    current = layout_of(
        plan(load, model=model, topology=topology, weighted=Weighting.ON), model, topology
    )
    assert current.share_of_slot is not None
    left = plan(load, model=model, topology=topology, current=current, exclude_ranks=frozenset({3}))
    assert left.share_of_slot is None


@pytest.mark.parametrize("target", [None, 0.9])
def test_incremental_plans_with_weights_reach_what_even_ones_do(target):
    model, topology = MANY_SLOTS
    old, new = skewed(6, num_experts=16), skewed(7, num_experts=16)
    asked = {"model": model, "topology": topology, "algorithm": Algorithm.INCREMENTAL}
    current = layout_of(plan(old, **asked), model, topology)
    even = plan(new, current=current, target_balancedness=target, **asked)
    made = plan(new, current=current, target_balancedness=target, weighted=Weighting.ON, **asked)
    wanted = even.balancedness if target is None else target
    assert made.balancedness >= wanted - 0.002
    assert target is None or made.moves <= even.moves


def judged(current, proposed, load):
    model, _ = FEW_SLOTS
    window = load * 1e5
    on_average, on_window = compare(current, proposed, load, window)
    return judge(
        current=current,
        target=proposed,
        on_average=on_average,
        on_window=on_window,
        on_expected=on_window,
        lasts_s=Policy().payback_s,
        algorithm=Algorithm.INCREMENTAL,
        window=window,
        model=model,
        policy=Policy(min_gain=0.005),
        now=100.0,
        last_switch_s=None,
        shift=NO_SHIFT,
        costs=MeasuredCosts(),
    )


def test_new_shares_alone_are_judged_and_cost_a_switch_but_no_bytes():
    current, load = drifted(0)
    model, topology = FEW_SLOTS
    made = plan(
        load,
        model=model,
        topology=topology,
        current=current,
        target_balancedness=balancedness(layout_loads(current, load)) + 0.01,
        weighted=Weighting.AUTO,
    )
    verdict = judged(current, layout_of(made, model, topology), load)
    assert verdict.accepted
    assert (verdict.moves, verdict.bytes, verdict.pull_s) == (0, 0, 0.0)
    assert verdict.reshared > 0
    assert verdict.lost_s == Policy().switch_stall_s
    assert f"0 moves of 0 B in total and other shares in {verdict.reshared} slots" in (
        verdict.reason
    )
    assert verdict.balancedness_proposed == pytest.approx(made.balancedness)


def test_the_same_shares_again_are_nothing_to_move():
    current, load = drifted(0)
    verdict = judged(current, current, load)
    assert not verdict.accepted
    assert verdict.reason.startswith("nothing to move")


def test_other_shares_are_one_wave_and_moves_bring_theirs_along():
    model, topology = FEW_SLOTS
    current, _ = drifted(0)
    asked = {"model": model, "topology": topology, "algorithm": Algorithm.GLOBAL}
    load = skewed(9, num_experts=28)
    target = layout_of(plan(load, weighted=Weighting.ON, **asked), model, topology)
    sizes = {"expert_bytes": 100, "max_wave_bytes": 100}
    target = current.with_placement(
        target.expert_of_slot, generation=2, share_of_slot=target.share_of_slot
    )
    made = waves(current, target, **sizes)
    assert len(made) == 2
    steps = [made[0].applied_to(current)]
    steps.append(made[1].applied_to(steps[0]))
    assert steps[-1].same_placement(target)
    half_way = steps[0].shares()
    changed = (steps[0].expert_of_slot != current.expert_of_slot).any(axis=1)
    np.testing.assert_array_equal(half_way[changed], target.shares()[changed])
    np.testing.assert_array_equal(half_way[~changed], current.shares()[~changed])
    even = current.with_placement(current.expert_of_slot, generation=2)
    (change,) = waves(current, even, **sizes)
    alone = change.applied_to(current)
    assert alone.share_of_slot is None
    np.testing.assert_array_equal(alone.expert_of_slot, current.expert_of_slot)
