"""Waits that reached their bound: workers' are added up, and each says what happened."""

from dataclasses import replace

from equipoise.balancer.service.status import pool_status
from equipoise.planning.policy import Policy
from equipoise.pool.counters import WRITE_TIMEOUT_S, Bounds
from equipoise.wire.messages import WorkerBound


def bounds():
    return Bounds(Policy())


def step(reached, latest="epoch 3 ended"):
    return (WorkerBound(name="step", bound_s=4.0, reached=reached, latest=latest),)


def of(bounds, name):
    return next(bound for bound in bounds.all() if bound.name == name)


def test_what_workers_count_is_added_up_and_told_again_it_counts_once():
    pool = bounds()
    assert "step" not in {bound.name for bound in pool.all()}
    for worker, reached in (("a", 1), ("b", 2), ("a", 1), ("a", 3), ("b", 2)):
        assert pool.hear(worker, boot_id="1", told=step(reached)) == ()
    told = of(pool, "step")
    assert (told.bound_s, told.reached, told.latest) == (4.0, 5, "a: epoch 3 ended")


def test_a_worker_that_started_anew_counts_from_zero():
    pool = bounds()
    pool.hear("a", boot_id="1", told=step(7))
    pool.hear("a", boot_id="2", told=step(0, latest=""))
    pool.hear("a", boot_id="2", told=step(1))
    assert of(pool, "step").reached == 8


def test_a_count_that_shrinks_takes_nothing_back():
    pool = bounds()
    pool.hear("a", boot_id="1", told=step(7))
    pool.hear("a", boot_id="1", told=step(2))
    assert of(pool, "step").reached == 7


def test_a_bound_of_a_newer_release_is_named_and_makes_no_series(serving_bench):
    bench = serving_bench
    worker = bench.ranks[1]
    report = worker.report()
    unknown = WorkerBound(name="teleport", bound_s=1.0, reached=1)
    told = replace(report, stats=replace(report.stats, bounds=(unknown, *step(1))))
    bench.say(worker, told)
    assert bench.pool.refusals.of("report_bound") == 1
    shown = {one.name: one for one in pool_status(bench.pool, now=bench.now).bounds}
    assert "teleport" not in shown
    assert shown["step"].latest == f"{worker.hello.worker}: epoch 3 ended"


def test_a_write_that_took_too_long_is_counted_and_one_that_failed_is_not(serving_bench):
    controller = serving_bench.controller
    controller.write_failed(None, reason="refused", timed_out=False)
    controller.write_failed(None, reason="no answer", timed_out=True)
    store = of(controller.pool.bounds, "store")
    assert (store.bound_s, store.reached, store.latest) == (WRITE_TIMEOUT_S, 1, "no answer")
