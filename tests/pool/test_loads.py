"""Windows and averages of one pool."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.planning.counters import LoadReport
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.phase import Phase
from equipoise.planning.policy import Policy
from equipoise.planning.topology import ModelShape
from equipoise.pool.loads import PoolLoads
from equipoise.pool.records import AverageRecord
from equipoise.wire.messages import RankStats, Report

MODEL = ModelShape(num_layers=2, num_experts=8, num_groups=1, expert_bytes=1)
LAYOUT = contiguous_layout(num_layers=2, num_experts=8, num_ranks=2, slots_per_rank=4)
# Reports so rare that none is overdue.
POLICY = Policy(interval_s=10.0, shift_factor=2, report_interval_s=1000.0)
FIRST_HALF = np.tile([1000.0] * 4 + [0.0] * 4, (2, 1))
SECOND_HALF = FIRST_HALF[:, ::-1]


def make_loads(*, remembered=None, counted_from=1, now=0.0, model=MODEL, policy=POLICY):
    return PoolLoads(
        epoch=1,
        model=model,
        num_ranks=2,
        policy=policy,
        remembered=remembered or {},
        counted_from=counted_from,
        now=now,
    )


class Ranks:
    """Two ranks that count what they receive."""

    def __init__(self, loads, *, layout=LAYOUT, phase=Phase.MIXED) -> None:
        self.loads = loads
        self.phase = phase
        self.layout = layout
        self.assignments = np.zeros((2, 8))
        self.steps = 0

    def receive(self, assignments, *, ranks=(0, 1), steps=10, now=0.0):
        self.assignments = self.assignments + assignments
        self.steps += steps
        for rank in ranks:
            own = self.assignments[:, 4 * rank : 4 * rank + 4]
            load = LoadReport(
                boot_id="boot",
                epoch=1,
                rank=rank,
                generation=self.layout.generation,
                phase=self.phase,
                assignments=own.astype(np.uint64),
            )
            stats = RankStats(
                steps=self.steps,
                tokens_processed=0,
                tokens_generated=0,
                median_step_us=0,
                active_requests=0,
                queued_requests=0,
            )
            self.loads.accept(Report(load=load, stats=stats), self.layout, now=now)


def close(loads, *, number=1, now):
    return loads.close_window(number=number, generation=1, now=now)


def test_loads_of_both_phases_add_up_and_a_window_has_the_only_reported_phase():
    loads = make_loads()
    decode, prefill = (Ranks(loads, phase=phase) for phase in (Phase.DECODE, Phase.PREFILL))
    decode.receive(FIRST_HALF)
    pure = close(loads, now=10.0)
    assert pure.phase is Phase.DECODE
    decode.receive(FIRST_HALF)
    prefill.receive(SECOND_HALF)
    both = close(loads, number=2, now=20.0)
    assert both.phase is Phase.MIXED
    np.testing.assert_allclose(both.load, FIRST_HALF + SECOND_HALF)
    assert both.balancedness == pytest.approx(1.0)
    assert close(loads, number=3, now=30.0).phase is Phase.MIXED


def test_a_window_is_due_after_the_interval_and_intervals_do_not_drift():
    loads = make_loads()
    ranks = Ranks(loads)
    ranks.receive(FIRST_HALF)
    assert not loads.is_due(now=9.9)
    assert loads.is_due(now=10.4)
    close(loads, now=10.4)
    ranks.receive(FIRST_HALF)
    assert not loads.is_due(now=19.9)
    assert loads.is_due(now=20.0)


def test_a_window_waits_for_the_first_report_of_each_rank_until_it_is_overdue():
    loads = make_loads(policy=replace(POLICY, report_interval_s=10.0))
    ranks = Ranks(loads)
    ranks.receive(FIRST_HALF, ranks=(0,), now=9.0)
    assert not loads.is_due(now=12.0)
    ranks.receive(FIRST_HALF, ranks=(1,), now=13.0)
    assert loads.is_due(now=13.0)
    assert not close(loads, now=13.0).doubt
    ranks.receive(FIRST_HALF, ranks=(0,), now=42.0)
    assert not loads.is_due(now=42.0)
    assert loads.is_due(now=44.0)
    assert close(loads, number=2, now=44.0).unheard == (1,)


def test_after_a_long_pause_one_window_closes_not_many():
    loads = make_loads()
    close(loads, now=95.0)
    assert not loads.is_due(now=96.0)


def test_a_window_holds_only_its_own_reports():
    loads = make_loads()
    ranks = Ranks(loads)
    ranks.receive(FIRST_HALF)
    first = close(loads, now=10.0)
    ranks.receive(SECOND_HALF)
    second = close(loads, number=2, now=20.0)
    assert np.array_equal(first.load, FIRST_HALF)
    assert np.array_equal(second.load, SECOND_HALF)
    assert first.balancedness == pytest.approx(0.5), "one of two ranks had it all"
    assert first.max_over_mean == pytest.approx(2.0)
    assert first.assignments == 8000
    assert not first.switched


def test_a_window_tells_how_far_slots_were_from_their_shares():
    loads = make_loads(model=replace(MODEL, num_experts=6))
    layout = contiguous_layout(num_layers=2, num_experts=6, num_ranks=2, slots_per_rank=4)
    assert np.flatnonzero(layout.expert_of_slot[0] == 0).tolist() == [0, 6]
    ranks = Ranks(loads, layout=layout)
    assignments = np.full((2, 8), 500.0)
    assignments[1, [1, 7]] = [600.0, 400.0]
    ranks.receive(assignments)
    shares = close(loads, now=10.0).shares
    assert (shares.layer, shares.expert, shares.planned, shares.assignments) == (1, 1, 0.5, 1000.0)
    assert abs(shares.realised - 0.5) == pytest.approx(0.1)
    assert shares.misplaced == pytest.approx(100 / 4000)
    assert close(loads, number=2, now=20.0).shares is None


def test_ranks_that_reported_for_different_spans_are_compared_by_the_step():
    loads = make_loads()
    ranks = Ranks(loads)
    even = np.full((2, 8), 100.0)
    ranks.receive(even)
    ranks.receive(even, ranks=(0,))
    window = close(loads, now=10.0)
    assert window.rank_load[0] == pytest.approx([400.0, 400.0])
    assert window.load == pytest.approx(even)
    assert window.balancedness == pytest.approx(1.0)
    assert loads.slow.per_second() == pytest.approx(even / 10.0)


def test_a_window_in_which_a_rank_was_not_heard_and_the_next_are_in_no_average():
    loads = make_loads(policy=replace(POLICY, report_interval_s=1.0))
    ranks = Ranks(loads)
    ranks.receive(FIRST_HALF, now=9.0)
    close(loads, now=10.0)
    known = loads.slow.per_second()
    ranks.receive(SECOND_HALF, now=12.0)
    ranks.receive(FIRST_HALF, ranks=(0,), now=19.0)
    cut = close(loads, number=2, now=20.0)
    assert cut.doubt == "incomplete window: no report from rank 1"
    ranks.receive(FIRST_HALF, now=29.0)
    returned = close(loads, number=3, now=30.0)
    assert returned.doubt == (
        "rank 1 reported again after 17 s: its load covers more than the window"
    )
    for window in (cut, returned):
        assert not window.shift.detected
        assert window.shift.reason == "no shift: not counted"
    np.testing.assert_array_equal(loads.slow.per_second(), known)
    ranks.receive(FIRST_HALF, now=34.5)
    ranks.receive(FIRST_HALF, now=39.0)
    assert not close(loads, number=4, now=40.0).doubt, "a gap inside a window is part of it"


@pytest.mark.parametrize(("steps", "is_doubtful"), [(250, False), (1700, True), (15, True)])
def test_a_rank_whose_steps_differ_too_much_is_named(steps, is_doubtful):
    loads = make_loads()
    ranks = Ranks(loads)
    ranks.receive(FIRST_HALF, ranks=(0,), steps=500)
    ranks.steps = 0
    ranks.receive(FIRST_HALF, ranks=(1,), steps=steps)
    doubt = close(loads, now=10.0).doubt
    assert bool(doubt) is is_doubtful
    assert not is_doubtful or "their loads cannot be compared" in doubt


@pytest.mark.parametrize(
    ("is_mixed", "others", "steps", "is_doubtful"),
    [
        (False, 16, 0, True),
        (False, 0, 16, True),
        (False, 16, 4, False),  # Scaled to as many steps.
        (True, 16, 4, True),
        (True, 16, 12, False),
    ],
)
def test_a_rank_with_far_fewer_steps_in_a_short_window_is_named(
    is_mixed, others, steps, is_doubtful
):
    """Its load is missing: engines add up theirs every few passes, and ranks report apart."""
    loads = make_loads()
    even = np.full((2, 8), 100.0)
    for rank, num_steps in ((0, others), (1, steps)):
        one = Ranks(loads)
        one.receive(even * num_steps, ranks=(rank,), steps=num_steps)
        if is_mixed and num_steps:
            one.layout = one.layout.with_placement(one.layout.expert_of_slot, generation=2)
            one.assignments[:] = 0
            one.receive(even * num_steps, ranks=(rank,), steps=0)
    doubt = close(loads, now=10.0).doubt
    assert bool(doubt) is is_doubtful
    assert not is_doubtful or "their loads cannot be compared" in doubt


def test_a_shift_makes_both_averages_forget_and_the_next_window_once_more():
    loads = make_loads()
    ranks = Ranks(loads)
    for number in range(1, 7):
        ranks.receive(FIRST_HALF)
        assert not close(loads, number=number, now=10.0 * number).shift.detected
    # Traffic turns in the middle of a window, so that window is half of each.
    ranks.receive((FIRST_HALF + SECOND_HALF) / 2)
    mixed = close(loads, number=7, now=70.0)
    assert mixed.shift.detected
    assert loads.slow.per_second() == pytest.approx(mixed.load / 10.0)
    # No requests for a while, which says nothing about the distribution of traffic.
    close(loads, number=8, now=70.5)
    ranks.receive(SECOND_HALF)
    close(loads, number=9, now=80.5)
    assert loads.slow.per_second() == pytest.approx(SECOND_HALF / 10.0)
    assert loads.fast.per_second() == pytest.approx(SECOND_HALF / 10.0)
    ranks.receive(SECOND_HALF)
    assert not close(loads, number=10, now=90.5).shift.detected


@pytest.mark.parametrize("lie", [0.0, 1e6], ids=["a shift", "a report that lied"])
def test_what_happened_once_is_a_shift_once_and_not_for_half_lives(lie):
    """Windows are shorter than the fast half-life, so what was is long in both averages."""
    policy = replace(POLICY, interval_s=2.0, fast_half_life_s=5.0, slow_half_life_s=60.0)
    loads, chance = make_loads(policy=policy), np.random.default_rng(1)
    ranks = Ranks(loads)
    shifts = []
    for number in range(1, 41):
        traffic = SECOND_HALF if number > 20 and not lie else FIRST_HALF
        ranks.receive(chance.poisson(traffic / 4) + (lie * np.eye(2, 8) if number == 20 else 0.0))
        shifts.append(close(loads, number=number, now=2.0 * number).shift.detected)
    # A lie is one shift there and one back.
    assert 1 <= sum(shifts) <= 2
    assert not any(shifts[:19])
    late = loads.slow.per_second()
    assert late == pytest.approx(traffic / 8, abs=10.0)


def test_steady_traffic_is_averaged_exactly_and_never_a_shift():
    loads = make_loads()
    ranks = Ranks(loads)
    for number in range(1, 20):
        ranks.receive(FIRST_HALF)
        assert not close(loads, number=number, now=10.0 * number).shift.detected
    assert loads.slow.per_second() == pytest.approx(FIRST_HALF / 10.0)


def test_averages_continue_after_a_restart_if_they_fit():
    loads = make_loads()
    Ranks(loads).receive(FIRST_HALF)
    close(loads, now=10.0)
    records = loads.records(now=10.0)
    resumed = make_loads(remembered=records, now=500.0)
    assert resumed.slow.per_second() == pytest.approx(FIRST_HALF / 10.0)
    other_shape = AverageRecord(
        half_life_s=60.0, time_unix_s=0.0, weight_s=1.0, decayed_load=np.ones((2, 9))
    )
    fresh = make_loads(remembered={"slow": other_shape})
    assert not fresh.slow.per_second().any()


def test_a_half_life_that_changed_keeps_what_is_remembered():
    record = AverageRecord(
        half_life_s=61.0, time_unix_s=0.0, weight_s=2.0, decayed_load=np.full((2, 8), 6.0)
    )
    resumed = make_loads(remembered={"slow": record})
    assert resumed.slow.half_life_s == POLICY.slow_half_life_s
    assert resumed.slow.per_second() == pytest.approx(np.full((2, 8), 3.0))


def test_counters_that_began_before_we_listened_are_a_baseline():
    loads = make_loads(counted_from=2)
    ranks = Ranks(loads)
    ranks.receive(FIRST_HALF * 50, steps=500)
    ranks.receive(FIRST_HALF)
    window = close(loads, now=10.0)
    assert np.array_equal(window.load, FIRST_HALF)


def test_how_loads_vary_survives_a_restart_where_a_policy_plans_for_risk():
    loads = make_loads(policy=replace(POLICY, risk_z=1.0, shift_factor=1000))
    ranks = Ranks(loads)
    for window in range(1, 5):
        ranks.receive(FIRST_HALF if window % 2 else FIRST_HALF[:, ::-1])
        close(loads, now=10.0 * window)
    assert loads.slow.variance().any()
    resumed = make_loads(remembered=loads.records(now=40.0), now=500.0)
    assert resumed.slow.at_risk(1.0) == pytest.approx(loads.slow.at_risk(1.0))
    torn = {**loads.records(now=40.0), "slow": loads.records(now=41.0)["slow"]}
    assert not make_loads(remembered=torn, now=500.0).slow.variance().any()
    assert "slow squares" not in make_loads().records(now=0.0)


def test_a_pool_keeps_the_tables_that_are_asked_for_and_the_figures_of_many_windows(
    serving_harness,
):
    load = np.full((3, 32), 50.0)
    serving_harness.run_traffic(load, seconds=80)
    for _ in range(3):
        serving_harness.tick(10.0)
    windows = list(serving_harness.pool.windows.closed)
    assert len(windows) > 8
    busy = [window for window in windows if window.assignments]
    with_tables = [window.number for window in windows if window.load.size]
    assert with_tables == [*(window.number for window in busy[-4:]), windows[-1].number]
    assert all(window.balancedness > 0 for window in busy)
