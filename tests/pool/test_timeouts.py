"""Waits that timed out: workers' are added up, and each says what happened."""

from dataclasses import replace

from equipoise.balancer.service.status import pool_status
from equipoise.planning.policy import Policy
from equipoise.policy.setting import SETTINGS
from equipoise.pool.counters import WRITE_TIMEOUT_S, Timeouts
from equipoise.wire.messages import WorkerTimeout


def timeouts():
    return Timeouts(Policy())


def step(reached, latest="epoch 3 ended"):
    return (WorkerTimeout(name="step", timeout_s=4.0, reached=reached, latest=latest),)


def of(timeouts, name):
    return next(one for one in timeouts.all() if one.name == name)


def test_workers_counts_are_added_up_and_repeated_ones_count_once():
    pool = timeouts()
    assert "step" not in {one.name for one in pool.all()}
    for worker, reached in (("a", 1), ("b", 2), ("a", 1), ("a", 3), ("b", 2)):
        assert pool.add(worker, boot_id="1", reported=step(reached)) == ()
    timeout = of(pool, "step")
    assert (timeout.timeout_s, timeout.reached, timeout.latest) == (4.0, 5, "a: epoch 3 ended")


def test_a_restarted_worker_counts_from_zero():
    pool = timeouts()
    pool.add("a", boot_id="1", reported=step(7))
    pool.add("a", boot_id="2", reported=step(0, latest=""))
    pool.add("a", boot_id="2", reported=step(1))
    assert of(pool, "step").reached == 8


def test_a_count_that_shrinks_takes_nothing_back():
    pool = timeouts()
    pool.add("a", boot_id="1", reported=step(7))
    pool.add("a", boot_id="1", reported=step(2))
    assert of(pool, "step").reached == 7


def test_a_timeout_of_a_newer_release_is_named_and_makes_no_series(serving_harness):
    harness = serving_harness
    worker = harness.ranks[1]
    report = worker.report()
    unknown = WorkerTimeout(name="teleport", timeout_s=1.0, reached=1)
    unknown_report = replace(report, stats=replace(report.stats, timeouts=(unknown, *step(1))))
    harness.say(worker, unknown_report)
    assert harness.pool.counters.rejections.of("report_timeouts") == 1
    shown = {one.name: one for one in pool_status(harness.pool, now=harness.now).timeouts}
    assert "teleport" not in shown
    assert shown["step"].latest == f"{worker.hello.worker}: epoch 3 ended"


def test_a_write_that_took_too_long_is_counted_and_one_that_failed_is_not(serving_harness):
    controller = serving_harness.controller
    controller.write_failed(None, reason="rejected", timed_out=False)
    controller.write_failed(None, reason="no answer", timed_out=True)
    store = of(controller.pool.counters.timeouts, "store")
    assert (store.timeout_s, store.reached, store.latest) == (WRITE_TIMEOUT_S, 1, "no answer")


def test_a_late_commit_is_counted_under_the_timeout_it_reached(make_harness, policy, skewed):
    harness = make_harness(policy=replace(policy, switch_timeout_s=7.0, stage_timeout_s=60.0))
    harness.serve()
    harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    harness.stage_all()
    harness.disconnected = set()
    for worker in harness.ranks:
        # The store no longer answers: the last switch requests a commit that never completes.
        value = worker.switch(step=80)
        harness.controller.message(worker.hello.worker, value, now=harness.now)
    harness.now += 7.0
    harness.controller.tick(now=harness.now)
    late = of(harness.pool.counters.timeouts, "commit")
    assert (late.timeout_s, late.reached) == (7.0, 1)
    assert "the store did not confirm it within 7 s" in late.latest
    assert of(harness.pool.counters.timeouts, "persist").reached == 0


def test_a_timeout_of_the_policy_has_its_name_in_the_status():
    values = {
        one.name: 70.0 + number
        for number, one in enumerate(SETTINGS)
        if one.path.startswith("timeouts.") and one.name.endswith("_timeout_s")
    }
    shown = {one.name: one.timeout_s for one in Timeouts(Policy(**values)).all()}
    for name, timeout_s in values.items():
        assert shown[name.removesuffix("_timeout_s")] == timeout_s
