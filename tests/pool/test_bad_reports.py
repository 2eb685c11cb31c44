"""Reports that are missing, repeated, replayed or false: what the pool counts, and what it does."""

import random
from dataclasses import replace

import numpy as np
import pytest

from equipoise.planning.counters import LoadCounters
from equipoise.planning.errors import InvalidReportError
from equipoise.planning.policy import Policy
from equipoise.pool.health import Health
from equipoise.wire.balancer_messages import Stage
from tests.support.deaths import die, notice, serve_all, with_spare_slots

WINDOW_S = 10


def run_without(harness, load, *, seconds, rank):
    """All ranks serve; one of them beats and tells no load."""
    for _ in range(seconds):
        harness.now += 1.0
        for worker in harness.ranks:
            worker.serve_traffic(load)
            harness.say(worker, worker.heartbeat() if worker.rank == rank else worker.report())
        harness.tick()
        harness.carry_out_rollout()


def test_nothing_is_planned_while_a_ranks_load_is_missing(serving_harness, skewed):
    harness = serving_harness
    run_without(harness, skewed(1), seconds=3 * WINDOW_S, rank=2)
    assert harness.sent_to("worker-0", Stage) == []
    assert [one.accepted for one in harness.decisions()] == [False] * 3
    assert harness.decisions()[-1].reason.endswith("incomplete window: no report from rank 2")
    assert harness.pool.diagnosis().health is Health.SERVING, "it serves, and says that it is there"
    # Its counters are cumulative, and what was not reported is not the load of the next window.
    reported = 3 * 10_000 * WINDOW_S
    harness.run_traffic(skewed(1), seconds=WINDOW_S)
    returned = harness.pool.windows.closed[-1]
    assert returned.assignments == pytest.approx(reported, rel=0.01)
    assert returned.doubt.startswith("rank 2 reported again after 31 s")
    harness.run_traffic(skewed(1), seconds=2 * WINDOW_S)
    assert harness.pool.rollouts.completed >= 1


def test_windows_wait_for_reports_that_come_more_seldom_up_to_a_bound(make_harness, skewed):
    harness = make_harness(
        policy=Policy(interval_s=10.0, min_assignments=100.0, report_interval_s=10.0)
    )
    harness.serve()
    run_without(harness, skewed(1), seconds=2 * WINDOW_S, rank=2)
    assert not harness.pool.windows.closed
    run_without(harness, skewed(1), seconds=WINDOW_S + 1, rank=2)
    assert harness.pool.windows.closed[-1].unheard == (2,)


@pytest.mark.parametrize("assignments", [2**53, 10**12])
def test_a_rank_that_counts_what_no_slot_can_receive_is_rejected_and_named(
    serving_harness, skewed, assignments
):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=WINDOW_S - 1)
    liar = harness.ranks[3]
    lie = liar.report()
    counters = lie.load.assignments.copy()
    counters[1, 4] += np.uint64(assignments)
    with pytest.raises(
        InvalidReportError, match="rank 3 reports that layer 1, own slot 4"
    ) as caught:
        harness.say(liar, replace(lie, load=replace(lie.load, assignments=counters)))
    assert caught.value.kind == "report_implausible"
    harness.run_traffic(skewed(1), seconds=1)
    assert harness.pool.windows.closed[-1].assignments == pytest.approx(3 * 10 * 10_000, rel=0.01)


def test_a_lie_that_could_be_true_costs_balance_for_some_windows_and_nothing_else(
    serving_harness, skewed
):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=5 * WINDOW_S)
    settled = harness.pool.windows.closed[-1].balancedness
    liar = harness.ranks[3]
    # A thousand times the pool's real load; afterwards it counts on from there.
    liar.assignments[:, 0] += np.uint64(100_000_000)
    harness.run_traffic(skewed(1), seconds=4 * WINDOW_S)
    for write in harness.decisions():
        assert np.isfinite([write.balancedness_current, write.balancedness_proposed]).all()
    for average in (harness.pool.windows.loads.fast, harness.pool.windows.loads.slow):
        assert np.isfinite(average.per_second()).all()
    harness.run_traffic(skewed(1), seconds=26 * WINDOW_S)
    assert harness.pool.windows.closed[-1].balancedness > settled - 0.05
    assert harness.pool.diagnosis().health is Health.SERVING


@pytest.mark.parametrize("takes_back", [False, True], ids=["stays", "is corrected"])
def test_a_lie_about_one_layer_is_seen_and_not_averaged(serving_harness, skewed, takes_back):
    """As bits that turned on the way make it: the next report may say the truth again."""
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=5 * WINDOW_S)
    before, known = harness.pool.windows.closed[-1], harness.pool.windows.loads.slow.per_second()
    liar = harness.ranks[3]
    liar.assignments[1, 4] += np.uint64(100_000_000)
    harness.run_traffic(skewed(1), seconds=1)
    if takes_back:
        liar.assignments[1, 4] -= np.uint64(100_000_000)
    harness.run_traffic(skewed(1), seconds=WINDOW_S)
    doubtful = harness.pool.windows.closed[-1]
    assert doubtful.doubt.startswith("layer 1 counted 100")
    assert "on rank 3" in doubtful.doubt
    assert harness.decisions()[-1].reason == f"nothing is planned on this window: {doubtful.doubt}"
    np.testing.assert_array_equal(harness.pool.windows.loads.slow.per_second(), known)
    harness.run_traffic(skewed(1), seconds=3 * WINDOW_S)
    after = harness.pool.windows.closed[-1]
    assert not after.doubt
    assert after.assignments == pytest.approx(before.assignments, rel=0.05)
    assert after.balancedness > before.balancedness - 0.05


@pytest.mark.parametrize("count", ["steps", "busy_us"])
def test_a_false_count_of_steps_or_time_misleads_no_comparison_of_ranks(
    serving_harness, skewed, count
):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=5 * WINDOW_S)
    before = harness.pool.windows.closed[-1]
    liar = harness.ranks[3]
    liar.serve_traffic(skewed(1))
    lie = liar.report()
    false = getattr(lie.stats, count) + 100_000
    harness.say(liar, replace(lie, stats=replace(lie.stats, **{count: false})))
    harness.run_traffic(skewed(1), seconds=2 * WINDOW_S)
    after = harness.pool.windows.closed[-1]
    np.testing.assert_allclose(after.pace.busy_us, before.pace.busy_us)
    assert after.balancedness == pytest.approx(before.balancedness, abs=0.05)
    impossible = replace(lie.stats, **{count: 2**53})
    with pytest.raises(InvalidReportError, match="rank 3 reports 9007") as caught:
        harness.say(liar, replace(liar.report(), stats=impossible))
    assert caught.value.kind == "report_implausible"


@pytest.mark.parametrize("seed", range(3))
def test_whatever_becomes_of_reports_on_the_way_the_average_is_that_of_exactly_once(
    make_harness, skewed, seed
):
    check_exactly_once(make_harness, skewed(1), seed=seed)


def test_counters_that_count_a_repeated_report_again_would_be_noticed(
    make_harness, skewed, monkeypatch
):
    def forget(_counters, report, _known):
        return np.zeros_like(report.assignments)

    monkeypatch.setattr(LoadCounters, "_previous", forget)
    with pytest.raises(AssertionError, match="Not equal"):
        check_exactly_once(make_harness, skewed(1), seed=0)


def check_exactly_once(make_harness, load, *, seed):
    fair, foul = (learned(make_harness(), load, weather=weather(seed)) for weather in WEATHERS)
    np.testing.assert_allclose(foul, fair, rtol=1e-9)


def learned(harness, load, *, weather):
    """What a pool believes of the load after three windows of reports in some weather."""
    harness.serve()
    for second in range(3 * WINDOW_S):
        harness.now += 1.0
        for worker in harness.ranks:
            worker.serve_traffic(load)
            is_last = second % WINDOW_S == WINDOW_S - 1
            for report in weather(worker.hello.worker, worker.report(), is_last=is_last):
                try:
                    harness.say(worker, report)
                except InvalidReportError as late:
                    assert late.kind == "report_shrinking_counter"  # noqa: PT017 - it is late
        harness.tick()
    return harness.pool.windows.loads.slow.per_second()


def fair(_seed):
    return lambda _worker, report, *, is_last: [report]


def foul(seed):
    """Loses, doubles, holds back, shuffles and replays; the last of a window comes through."""
    rng, sent = random.Random(seed), {}

    def reports(worker, report, *, is_last):
        earlier = sent.setdefault(worker, [])
        replayed = rng.sample(earlier, min(len(earlier), rng.randrange(3)))
        earlier.append(report)
        arriving = [*replayed, *([report] * rng.choice((0, 1, 1, 2)))]
        rng.shuffle(arriving)
        return [*arriving, report] if is_last else arriving

    return reports


WEATHERS = (fair, foul)


def test_a_report_of_a_generation_with_other_ranks_is_rejected_and_harms_no_other(harness, skewed):
    with_spare_slots(harness)
    harness.serve()
    die(harness, harness.ranks[0])
    notice(harness, *harness.ranks)
    serve_all(harness)
    stale = harness.ranks[0].report()
    former = harness.pool.layouts.current.generation - 1
    stale = replace(stale, load=replace(stale.load, generation=former))
    assert harness.pool.layouts.get(former).num_ranks != len(harness.ranks)
    with pytest.raises(InvalidReportError, match="another epoch: it had"):
        harness.say(harness.ranks[0], stale)
    windows = harness.pool.windows.num_closed
    harness.run_traffic(skewed(1), seconds=WINDOW_S)
    assert harness.pool.windows.num_closed == windows + 1
    assert harness.pool.windows.closed[-1].assignments > 0


@pytest.mark.parametrize("cut_s", [4, 17, 40, 120])
@pytest.mark.parametrize("has_stream", [False, True], ids=["stream cut", "reports lost"])
def test_a_gap_in_a_ranks_reports_becomes_no_load_and_no_rollout(
    serving_harness, skewed, cut_s, has_stream
):
    harness, load = serving_harness, skewed(1)
    harness.run_traffic(load, seconds=12 * WINDOW_S + 3)
    before = harness.pool.windows.loads.slow.per_second()
    generation, windows = harness.pool.layouts.current.generation, harness.pool.windows.num_closed
    cut = harness.ranks[2]
    if not has_stream:
        harness.lose(cut)
    for _ in range(cut_s):
        harness.now += 1.0
        for worker in harness.ranks:
            worker.serve_traffic(load)
            if worker is not cut:
                harness.say(worker, worker.report())
            elif has_stream:
                harness.say(worker, worker.heartbeat())
        harness.tick()
    if not has_stream:
        harness.hello(cut.reconnecting())
    harness.run_traffic(load, seconds=8 * WINDOW_S)
    assert harness.pool.layouts.current.generation == generation
    closed = list(harness.pool.windows.closed)[windows - harness.pool.windows.num_closed :]
    assert len(closed) >= 8
    assert not any(window.shift.detected for window in closed)
    np.testing.assert_allclose(
        harness.pool.windows.loads.slow.per_second().sum(axis=0), before.sum(axis=0), rtol=0.02
    )
    if cut_s > 3 * WINDOW_S:
        doubts = [window.doubt for window in closed if window.doubt]
        assert any("no report from rank 2" in doubt for doubt in doubts)
        assert doubts[-1].startswith(f"rank 2 reported again after {cut_s + 1} s")
