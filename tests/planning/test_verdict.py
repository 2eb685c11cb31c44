import dataclasses
import math

import numpy as np
import pytest

from equipoise.planning.balance import compare
from equipoise.planning.costs import MeasuredCosts, MeasuredWave
from equipoise.planning.layout import Layout
from equipoise.planning.load import Shift
from equipoise.planning.policy import Algorithm, Policy
from equipoise.planning.step_cost import StepCost, StepWindow
from equipoise.planning.topology import ModelShape
from equipoise.planning.verdict import judge

# One layer, four experts, two ranks. The first two experts are hot, and both lie on rank 0.
CURRENT = Layout(
    generation=4,
    num_experts=4,
    num_ranks=2,
    expert_of_slot=np.array([[0, 1, 2, 3]], dtype=np.int32),
)
APART = np.array([[0, 2, 1, 3]], dtype=np.int32)
MODEL = ModelShape(num_layers=1, num_experts=4, num_groups=1, expert_bytes=2**20)
HOT_PAIR = np.array([[900.0, 900.0, 100.0, 100.0]])
NO_SHIFT = Shift(detected=False, distance=0.01, noise=0.02, reason="no shift: steady")
POLICY = Policy(
    min_assignments=1000,
    min_gain=0.05,
    cooldown_s=30.0,
    bandwidth_bytes_per_s=2**20,
    pull_slowdown=0.1,
    switch_stall_s=0.15,
)


def verdict_on(**changed):
    case = {
        "current": CURRENT,
        "proposed": APART,
        "algorithm": Algorithm.GLOBAL,
        "average": HOT_PAIR,
        "window": HOT_PAIR,
        "model": MODEL,
        "policy": POLICY,
        "now": 100.0,
        "last_switch_s": 0.0,
        "shift": NO_SHIFT,
        "costs": MeasuredCosts(),
    }
    case |= changed
    current, proposed = case["current"], case.pop("proposed")
    case["target"] = current.with_placement(proposed, generation=current.generation + 1)
    on_average, on_window = compare(current, case["target"], case.pop("average"), case["window"])
    case.setdefault("on_expected", on_window)
    case.setdefault("lasts_s", case["policy"].payback_s)
    return judge(on_average=on_average, on_window=on_window, **case)


def test_a_plan_that_gains_is_accepted_with_its_gain_and_its_price():
    verdict = verdict_on()
    assert verdict.accepted
    assert verdict.balancedness_current == 1000 / 1800
    assert verdict.balancedness_proposed == 1.0
    assert (verdict.moves, verdict.bytes) == (2, 2 * 2**20)
    assert "from 0.556 to 1.000" in verdict.reason
    assert "2 moves of 2.0 MiB" in verdict.reason
    assert "no shift: steady" in verdict.reason


def test_even_shares_that_follow_from_replicas_are_not_spoken_of():
    held = np.array([[0, 1, 2, 0, 1, 3]], dtype=np.int32)
    wanted = np.array([[0, 1, 2, 0, 2, 3]], dtype=np.int32)  # Expert 1 loses a replica to 2.
    current = Layout(generation=4, num_experts=4, num_ranks=2, expert_of_slot=held)
    load = np.array([[100.0, 100.0, 900.0, 100.0]])
    verdict = verdict_on(current=current, proposed=wanted, average=load, window=load)
    assert verdict.accepted
    assert (verdict.moves, verdict.reshared) == (1, 0)


def test_too_few_assignments_decide_nothing():
    verdict = verdict_on(window=HOT_PAIR / 10)
    assert not verdict.accepted
    assert verdict.reason == (
        "the latest window has 200 assignments per layer, but a decision needs 1000"
    )


def test_a_switch_is_followed_by_a_cooldown():
    verdict = verdict_on(last_switch_s=90.0)
    assert not verdict.accepted
    assert verdict.reason == "the last switch was 10.0 s ago, and the cooldown is 30 s"


def test_a_shift_of_traffic_ends_the_cooldown():
    shift = dataclasses.replace(NO_SHIFT, detected=True)
    assert verdict_on(last_switch_s=90.0, shift=shift).accepted


def test_no_cooldown_before_the_first_switch():
    assert verdict_on(now=1.0, last_switch_s=None).accepted


def test_the_current_layout_is_no_change():
    verdict = verdict_on(proposed=CURRENT.expert_of_slot)
    assert not verdict.accepted
    assert verdict.moves == verdict.bytes == 0
    assert "nothing to move" in verdict.reason


def test_a_small_gain_is_not_worth_moving():
    nearly_even = np.array([[510.0, 500.0, 490.0, 500.0]])
    verdict = verdict_on(window=nearly_even)
    assert not verdict.accepted
    assert "gains too little on the traffic to expect" in verdict.reason
    assert "the minimum gain is 0.050" in verdict.reason


def test_a_plan_that_is_worse_on_the_latest_window_is_rejected_however_good_on_the_average():
    other_pair = np.array([[900.0, 100.0, 900.0, 100.0]])
    verdict = verdict_on(window=other_pair)
    assert not verdict.accepted
    assert verdict.reason == (
        "the plan is worse on the traffic to expect: balancedness would fall from 1.000 to 0.556"
    )


def test_a_plan_that_is_accepted_says_what_it_costs_and_when_it_pays():
    verdict = verdict_on()
    # Each rank pulls 1 MiB in 1 s and loses a tenth of it, and stands still for 0.15 s.
    assert verdict.pull_s == 1.0
    assert verdict.lost_s == pytest.approx(0.25)
    # A step takes 1000 where it took 1800: 0.444 s saved each second.
    assert verdict.payback_s == pytest.approx(0.25 / (1 - 1000 / 1800))
    assert "cost 0.25 s of serving and pay back after 0.562 s" in verdict.reason


def test_a_plan_that_pays_too_late_is_rejected_with_its_price():
    policy = dataclasses.replace(POLICY, payback_s=0.5)
    verdict = verdict_on(policy=policy)
    assert not verdict.accepted
    assert verdict.reason == (
        "the plan costs more than it gains: 2 moves of 2.0 MiB in total cost 0.25 s of serving "
        "(1 s of fetching) and pay back after 0.562 s; the limit is half of the 0.5 s that "
        "layouts last"
    )


def test_a_plan_of_several_generations_stalls_once_for_each():
    both_move = np.array([[2, 3, 0, 1]], dtype=np.int32)
    policy = dataclasses.replace(POLICY, max_wave_bytes=2**20)
    verdict = verdict_on(proposed=both_move, policy=policy, window=HOT_PAIR[:, [0, 2, 1, 3]])
    assert verdict.lost_s == pytest.approx(0.1 * 2.0 + 2 * 0.15)


@pytest.mark.parametrize("stall_s", [0.02, 0.1, 1.0])
def test_no_other_number_of_waves_loses_less(stall_s):
    """Losses of n equal waves, counted wave by wave."""
    policy = dataclasses.replace(POLICY, switch_stall_s=stall_s)
    most_bytes, time_saved = 64 * 2**20, 0.3

    def lost_s(num_waves):
        wave_s = 64.0 / num_waves  # A rank pulls 1 MiB in 1 s.
        unsaved = [time_saved * (1.0 - done / num_waves) * wave_s for done in range(num_waves)]
        return sum(unsaved) + num_waves * stall_s

    wave_bytes = MeasuredCosts().wave_bytes(
        most_bytes, time_saved=time_saved, expert_bytes=2**14, policy=policy
    )
    best = min(range(1, 200), key=lost_s)
    assert lost_s(round(most_bytes / wave_bytes)) == pytest.approx(lost_s(best), rel=0.01)


def test_waves_are_no_smaller_than_an_expert_or_their_messages_are_worth():
    def wave_bytes(expert_bytes, **changed):
        policy = dataclasses.replace(POLICY, **changed)
        return MeasuredCosts().wave_bytes(
            2**26, time_saved=0.3, expert_bytes=expert_bytes, policy=policy
        )

    assert wave_bytes(2**10, switch_stall_s=0.0) == math.ceil(0.1 * 2**20)
    assert wave_bytes(2**20, switch_stall_s=0.0) == 2**20
    assert wave_bytes(2**20, max_wave_bytes=2**21) == 2**21


def test_a_plan_that_gains_nothing_never_pays():
    verdict = verdict_on(proposed=np.array([[1, 0, 3, 2]], dtype=np.int32))
    assert not verdict.accepted
    assert verdict.payback_s == math.inf


def test_above_the_hysteresis_nothing_moves():
    policy = dataclasses.replace(POLICY, plan_below=0.5)
    verdict = verdict_on(policy=policy)
    assert not verdict.accepted
    assert verdict.reason == (
        "balanced enough: the latest window is at 0.556, and plans are made below 0.500"
    )
    assert verdict_on(policy=dataclasses.replace(POLICY, plan_below=0.6)).accepted


def test_ranks_with_unequal_slots_are_judged_by_what_they_own():
    current = Layout(
        generation=4,
        num_experts=4,
        num_ranks=2,
        expert_of_slot=np.array([[0, 1, 2, 3]], dtype=np.int32),
        slots_of_rank=(1, 3),
    )
    verdict = verdict_on(
        current=current, proposed=np.array([[2, 1, 0, 3]], dtype=np.int32), window=HOT_PAIR
    )
    assert verdict.balancedness_current == 1000 / 1100
    assert verdict.balancedness_proposed == 1000 / 1900
    assert verdict.pull_s == 1.0


WINDOW = StepWindow(
    step_s=20e-3, max_rank_load=1800 / 100, mean_rank_load=1000 / 100, num_steps=100
)
COST = StepCost(
    num_windows=20,
    fixed_s=5e-3,
    fixed_error_s=1e-4,
    per_assignment_s=500e-6,
    per_assignment_error_s=25e-6,
    per_row_s=600e-6,
    per_row_error_s=1e-5,
    spread=1e-4,
)
MEASURED = MeasuredCosts(step=WINDOW, step_cost=COST, num_windows=20)


def test_a_measured_cost_gives_the_gain_in_milliseconds_and_throughput():
    """The busiest rank has 8 of 18 assignments less per step: 4 of 20 ms."""
    verdict = verdict_on(costs=MEASURED)
    assert verdict.step.current_s == pytest.approx(20e-3)
    assert verdict.step.proposed_s == pytest.approx(16e-3)
    assert verdict.step.error_s == pytest.approx(8 * 25e-6)
    assert verdict.throughput_gain == pytest.approx(0.25)
    assert (
        "shortens a step of 20 ms by 4 ± 0.2 ms, which raises throughput by 25.0%" in verdict.reason
    )
    assert verdict.payback_s == pytest.approx(0.25 / 0.2)


def test_too_little_evidence_gives_an_upper_bound_and_says_so():
    for costs in (MeasuredCosts(), dataclasses.replace(MEASURED, step_cost=None)):
        verdict = verdict_on(costs=costs)
        assert verdict.step is None
        assert verdict.throughput_gain == pytest.approx(0.8)
        assert "it raises throughput by at most 80.0% (" in verdict.reason
        assert "at the policy's cost of moves" in verdict.reason
    noisy = dataclasses.replace(COST, per_assignment_error_s=400e-6)
    verdict = verdict_on(costs=dataclasses.replace(MEASURED, step_cost=noisy))
    assert "loads have varied too little" in verdict.reason


def test_experts_are_never_more_than_the_whole_of_a_step():
    much = dataclasses.replace(COST, per_assignment_s=1.0, per_assignment_error_s=1e-3)
    verdict = verdict_on(costs=dataclasses.replace(MEASURED, step_cost=much))
    assert verdict.step.proposed_s == pytest.approx(20e-3 * 1000 / 1800)


def test_measured_waves_replace_the_policy_s_cost_of_moves():
    slow = MeasuredWave(most_bytes=2**20, staging_s=4.0, stall_s=0.5)
    fast = MeasuredWave(most_bytes=2**20, staging_s=2.0, stall_s=0.05)
    few = verdict_on(costs=MeasuredCosts(waves=(fast, slow)))
    assert few.lost_s == pytest.approx(0.25)
    measured = verdict_on(costs=MeasuredCosts(waves=(fast, slow, fast)))
    assert measured.pull_s == pytest.approx(2.0)
    assert measured.lost_s == pytest.approx(2.0 * POLICY.pull_slowdown + 0.05)
    assert "at the cost of the latest 3 waves" in measured.reason


@pytest.mark.parametrize(("least", "accepted"), [(0.24, True), (0.26, False)])
def test_the_least_gain_may_be_given_as_throughput(least, accepted):
    policy = dataclasses.replace(POLICY, min_throughput_gain=least)
    verdict = verdict_on(policy=policy, costs=MEASURED)
    assert verdict.accepted is accepted
    if not accepted:
        assert verdict.reason == (
            "the plan gains too little on the traffic to expect: it shortens a step of 20 ms by 4 "
            "± 0.2 ms, which raises throughput by 25.0%, but the minimum gain is 26.0%"
        )


def test_before_steps_are_measured_the_upper_bound_must_reach_the_least_throughput():
    enough = dataclasses.replace(POLICY, min_throughput_gain=0.79)
    assert verdict_on(policy=enough).accepted
    more = dataclasses.replace(POLICY, min_throughput_gain=0.81)
    assert "it raises throughput by at most 80.0% (" in verdict_on(policy=more).reason


def test_a_window_with_too_few_steps_gives_an_upper_bound_for_that_reason():
    verdict = verdict_on(costs=dataclasses.replace(MEASURED, step=None))
    assert verdict.step is None
    assert (
        "by at most 80.0% (the latest window has fewer than 10 steps of a rank)" in verdict.reason
    )


def test_a_plan_that_returns_groups_to_their_nodes_need_not_gain_anything():
    worse = {"proposed": CURRENT.expert_of_slot, "returned_layers": 1}
    verdict = verdict_on(current=CURRENT.with_placement(APART, generation=4), **worse)
    assert verdict.accepted
    assert verdict.balancedness_proposed < verdict.balancedness_current
    assert "returns the expert groups of 1 layers to their nodes, as the policy asks" in (
        verdict.reason
    )
    assert not verdict_on(**worse, policy=dataclasses.replace(POLICY, pause=True)).accepted
    assert not verdict_on(**worse, window=HOT_PAIR / 1000).accepted
    assert not verdict_on(**worse, last_switch_s=90.0).accepted
