"""Windows until ranks are balanced again after traffic shifts to other experts."""

import numpy as np

from equipoise.planning.balance import balancedness, compare, rank_loads
from equipoise.planning.costs import MeasuredCosts
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.load import LoadAverage, assignments_per_layer, detect_shift
from equipoise.planning.planner import plan
from equipoise.planning.policy import Policy
from equipoise.planning.topology import ModelShape, Topology
from equipoise.planning.verdict import judge

MODEL = ModelShape(num_layers=4, num_experts=32, num_groups=8, expert_bytes=1)
TOPOLOGY = Topology(node_of_rank=("a",) * 4 + ("b",) * 4, slots_per_rank=5)
WINDOWS_BEFORE, WINDOWS_AFTER = 8, 12
RECOVERED = 1 / 1.15  # The busiest rank carries 15 % more than the mean.


def windows_until_recovered(policy):
    """Windows after the shift before the first balanced one (or all), and the verdicts' reasons."""
    rng = np.random.default_rng(11)
    domains = rng.dirichlet(np.full(32, 0.6), size=(2, MODEL.num_layers))
    layout = contiguous_layout(num_layers=4, num_experts=32, num_ranks=8, slots_per_rank=5)
    slow, fast = (
        LoadAverage.start(num_layers=4, num_experts=32, half_life_s=half_life_s, now=0.0)
        for half_life_s in (policy.slow_half_life_s, policy.fast_half_life_s)
    )
    measured, reasons = [], []
    for index in range(WINDOWS_BEFORE + WINDOWS_AFTER):
        now = policy.interval_s * (index + 1)
        shares = domains[int(index >= WINDOWS_BEFORE)]
        window = np.stack([rng.multinomial(40_000, row) for row in shares]).astype(np.float64)
        measured.append(balancedness(rank_loads(layout.expert_of_slot, load=window, num_ranks=8)))
        slow, fast = slow.fold(window, now=now), fast.fold(window, now=now)
        shift = detect_shift(
            fast.per_second(),
            slow.per_second(),
            assignments=assignments_per_layer(window),
            factor=policy.shift_factor,
        )
        if shift.detected:
            slow = slow.restarted(window, duration_s=policy.interval_s, now=now)
        made = plan(
            slow.per_second(),
            model=MODEL,
            topology=TOPOLOGY,
            current=layout,
            algorithm=policy.algorithm,
        )
        target = layout.with_placement(made.expert_of_slot, generation=layout.generation + 1)
        on_average, on_window = compare(layout, target, slow.per_second(), window)
        verdict = judge(
            current=layout,
            target=target,
            on_average=on_average,
            on_window=on_window,
            on_expected=on_window,
            lasts_s=policy.payback_s,
            algorithm=made.algorithm,
            window=window,
            model=MODEL,
            policy=policy,
            now=now,
            last_switch_s=None,
            shift=shift,
            costs=MeasuredCosts(),
        )
        reasons.append(verdict.reason)
        if verdict.accepted:
            layout = target
    assert measured[WINDOWS_BEFORE - 1] > RECOVERED, "balanced before the shift"
    assert measured[WINDOWS_BEFORE] < 0.8, "the shift hurts"
    after = [value > RECOVERED for value in measured[WINDOWS_BEFORE:]]
    return after.index(True) if any(after) else len(after), reasons


def test_with_shift_detection_a_pool_recovers_within_two_windows():
    num_windows, reasons = windows_until_recovered(Policy())
    assert num_windows <= 2
    assert "shift: " in reasons[WINDOWS_BEFORE]


def test_without_shift_detection_the_long_average_lags():
    num_windows, _ = windows_until_recovered(Policy(shift_factor=1000))
    assert num_windows > 2
