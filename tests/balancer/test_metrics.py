"""The balancer's metrics: their values, their number, and that the docs list each of them."""

import time
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from equipoise.balancer.leadership.lease import LeaseTiming
from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.balancer.telemetry.metrics import BalancerCollector
from equipoise.balancer.telemetry.pool_metrics import MAX_RANKS_LISTED, PoolMetrics
from equipoise.planning.phase import Phase
from equipoise.planning.placing.chance import balancedness_by_chance
from equipoise.planning.topology import ModelShape
from equipoise.policy.book import PolicyBook
from equipoise.pool.counters import MAX_KINDS
from equipoise.pool.loads import PoolLoads
from equipoise.pool.member import Member
from equipoise.pool.pool import Pool
from equipoise.pool.records import Hold, PoolMemory
from equipoise.telemetry.errors import TelemetryError
from equipoise.telemetry.histogram import Histogram
from equipoise.telemetry.metrics_settings import MetricsPort
from equipoise.trust.credentials import Credentials
from equipoise.wire.messages import Wait, WorkerTimeout
from equipoise_api.v1 import status_pb2 as pb
from tests.support.authority import Authority
from tests.support.balancers import serving
from tests.support.deaths import die, notice, serve_all, with_spare_slots
from tests.support.scrapes import documented, ours, scrape, value_of
from tests.support.scripted_worker import rows_of_a_step
from tests.support.timed_fleet import TimedFleet


class OnePool:
    """A collector of one pool at a time that stands still."""

    def __init__(self, pool, *, now):
        self._pool, self._now = pool, now

    def collect(self):
        metrics = PoolMetrics(now=self._now)
        metrics.add(self._pool)
        return metrics.families()


def families_of(pool, *, now):
    registry = CollectorRegistry()
    registry.register(OnePool(pool, now=now))
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_a_pool_reports_its_balance_as_receivers_measured_it(serving_harness, skewed):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=10)
    families, window = families_of(harness.pool, now=harness.now), harness.pool.windows.closed[-1]
    per_layer = window.rank_load.mean(axis=1) / window.rank_load.max(axis=1)
    labels = {"pool": "tiny", "phase": "mixed"}
    assert value_of(families, "equipoise_balancedness", **labels) == pytest.approx(per_layer.mean())
    worst = value_of(families, "equipoise_balancedness_min_layer", **labels)
    assert worst == pytest.approx(per_layer.min())
    p5 = value_of(families, "equipoise_balancedness_p5_layer", **labels)
    assert worst <= p5 <= np.median(per_layer)
    by_chance = value_of(families, "equipoise_balancedness_by_chance", **labels)
    assert by_chance == pytest.approx(balancedness_by_chance(window.rank_load).mean())
    ratios = [
        value_of(families, "equipoise_rank_load_ratio", pool="tiny", rank=str(rank))
        for rank in range(4)
    ]
    assert np.mean(ratios) == pytest.approx(1.0)
    assert max(ratios) > 1.01


def leading(harness, *pools, empty_since_s=None):
    """The seat of a balancer that leads pools without a runner."""
    runners = {pool.name: SimpleNamespace(pool=pool, empty_since_s=empty_since_s) for pool in pools}
    return SimpleNamespace(
        led=SimpleNamespace(names=lambda: tuple(runners), find=runners.__getitem__),
        pools=SimpleNamespace(unreadable={}),
        policies=harness.policies,
        highest_term=1,
        not_ready="",
        store_fault="",
        timeouts=(),
    )


def test_a_pool_that_had_no_workers_for_a_day_has_no_series_and_so_no_alerts(serving_harness):
    seat = leading(serving_harness, serving_harness.pool, empty_since_s=100.0)
    for now, is_there in ((100.0 + 86_399, True), (100.0 + 86_401, False)):
        registry = CollectorRegistry()
        registry.register(BalancerCollector(seat, clock=lambda now=now: now))
        assert ('pool="tiny"' in generate_latest(registry).decode()) == is_there


def test_a_pool_without_metrics_hides_no_other(serving_harness, caplog):
    broken, whole = copy(serving_harness.pool), copy(serving_harness.pool)
    broken.name, broken.counters, whole.name = "a-broken", None, "b-whole"
    registry = CollectorRegistry()
    collector = BalancerCollector(
        leading(serving_harness, broken, whole), clock=lambda: serving_harness.now
    )
    registry.register(collector)
    for _ in range(3):
        text = generate_latest(registry).decode()
        assert 'equipoise_moves_total{pool="b-whole"} 0.0' in text
    assert "the metrics of pool a-broken failed (2 so far)" in caplog.text
    assert caplog.text.count("Traceback") == 2


def test_a_measure_has_the_same_name_as_in_the_status(serving_harness, skewed):
    serving_harness.run_traffic(skewed(1), seconds=40)
    metrics = families_of(serving_harness.pool, now=serving_harness.now)
    of_status = {*pb.PoolStatus.DESCRIPTOR.fields_by_name, *pb.GainStatus.DESCRIPTOR.fields_by_name}
    for name in (
        "balancedness", "balancedness_min_layer", "epoch", "gain_expected", "gain_realised",
        "generation", "intended_ranks", "window_assignments",
    ):  # fmt: skip
        assert f"equipoise_{name}" in metrics
        assert name in of_status


def test_a_window_without_traffic_has_no_assignments_and_no_balance(serving_harness, skewed):
    harness = serving_harness
    harness.run_traffic(skewed(1) * 0, seconds=10)
    families = families_of(harness.pool, now=harness.now)
    assert value_of(families, "equipoise_window_assignments", pool="tiny") == 0
    measures = ("balancedness", "balancedness_min_layer", "balancedness_by_chance",
                "rank_load_max_over_mean", "rank_load_ratio", "imbalance_ratio",
                "imbalance_seconds")  # fmt: skip
    for name in measures:
        family = families.get(f"equipoise_{name}")
        assert family is None or not family.samples, name


def test_a_pool_counts_decisions_waves_moves_and_the_time_they_took(serving_harness, skewed):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=20)
    families, pool = families_of(harness.pool, now=harness.now), harness.pool
    waves = value_of(families, "equipoise_waves_total", pool="tiny")
    assert waves == len(pool.rollouts.switches) > 0
    assert value_of(families, "equipoise_moves_total", pool="tiny") == sum(
        switch.moves for switch in pool.rollouts.switches
    )
    yes = value_of(families, "equipoise_decisions_total", pool="tiny", verdict="yes")
    no = value_of(families, "equipoise_decisions_total", pool="tiny", verdict="no")
    assert (yes, no) == (1, 1)
    assert value_of(families, "equipoise_switch_stall_seconds_count", pool="tiny") == waves
    assert value_of(families, "equipoise_wave_state_seconds_count", pool="tiny", state="staging")
    assert value_of(families, "equipoise_generation", pool="tiny") == pool.layouts.stored_generation


def test_ranks_are_counted_by_what_they_do(serving_harness):
    harness = serving_harness
    harness.lose(harness.ranks[3])
    families = families_of(harness.pool, now=harness.now)
    counts = {
        state: value_of(families, "equipoise_ranks", pool="tiny", state=state)
        for state in ("serving", "loading", "silent", "gone")
    }
    assert counts == {"serving": 3, "loading": 0, "silent": 0, "gone": 1}
    assert value_of(families, "equipoise_pool_health", pool="tiny", health="degraded") == 1


def test_judged_rollouts_are_counted_by_outcome_and_the_policy_is_named(serving_harness, skewed):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=50)
    families = families_of(harness.pool, now=harness.now)
    counts = {
        outcome: value_of(families, "equipoise_rollouts_judged_total", pool="tiny", outcome=outcome)
        for outcome in ("kept", "traffic_changed", "rolled_back")
    }
    assert counts == {"kept": 1, "traffic_changed": 0, "rolled_back": 0}
    hash_of = harness.pool.policy.in_force.digest
    assert value_of(families, "equipoise_policy_info", pool="tiny", hash=hash_of) == 1


def test_a_rank_that_stays_away_is_missing_from_the_intended_number(make_harness):
    harness = with_spare_slots(make_harness())
    harness.serve()
    die(harness, harness.ranks[3])
    notice(harness, *harness.ranks)
    serve_all(harness)
    families = families_of(harness.pool, now=harness.now)
    assert value_of(families, "equipoise_intended_ranks", pool="tiny") == 4
    assert value_of(families, "equipoise_ranks", pool="tiny", state="serving") == 3
    assert value_of(families, "equipoise_pool_health", pool="tiny", health="degraded") == 1


def fill_all_slots(harness, *, minutes):
    """A rank reports each minute that it decodes 4 of 4 requests, a step a second."""
    report = harness.ranks[0].report()
    load, first = replace(report.load, phase=Phase.DECODE), report.stats.steps
    for _ in range(minutes):
        harness.now += 60.0
        steps = first + round(harness.now)
        stats = replace(report.stats, steps=steps, max_requests=4, cache_tokens=100)
        report = replace(report, load=load, stats=stats)
        harness.pool.windows.accept(report, harness.pool.layouts.current, now=harness.now)


def test_the_ranks_advised_are_a_metric_once_they_are_known(serving_harness):
    harness = serving_harness
    fill_all_slots(harness, minutes=5)
    families = families_of(harness.pool, now=harness.now)
    assert not families["equipoise_advised_ranks"].samples
    fill_all_slots(harness, minutes=1)
    families = families_of(harness.pool, now=harness.now)
    assert value_of(families, "equipoise_advised_ranks", pool="tiny") == 5


def test_a_held_pool_and_a_rejected_policy_are_metrics(serving_harness):
    harness = serving_harness
    harness.pool.journal.hold = Hold(
        paused="admin/eve", pinned="admin/eve", pin=harness.pool.layouts.current
    )
    families = families_of(harness.pool, now=harness.now)
    assert value_of(families, "equipoise_pool_paused", pool="tiny") == 1
    assert value_of(families, "equipoise_pool_pinned", pool="tiny") == 1
    harness.pool.journal.hold = Hold()
    families = families_of(harness.pool, now=harness.now)
    assert value_of(families, "equipoise_pool_paused", pool="tiny") == 0
    assert value_of(families, "equipoise_pool_pinned", pool="tiny") == 0


async def test_a_follower_exports_a_rejected_policy_an_unreadable_store_and_its_certificates(
    tmp_path, policy
):
    store, policies, seen = SqliteStore(tmp_path / "state.sqlite"), PolicyBook(policy), []
    authority = Authority(tmp_path)
    async with serving(
        store,
        credentials=Credentials(authority.issue("balancer")),
        listen="127.0.0.1:0",
        policies=policies,
        drain_timeout_s=0.0,
        metrics=MetricsPort(metrics_listen="127.0.0.1:0", metrics_tls=True),
        on_metrics=seen.append,
    ):
        families = await scrape(seen[0], ca_file=authority.ca_file)
        assert documented("Certificates").items() <= ours(families).items()
        expires_s = value_of(
            families, "equipoise_certificate_expiry_timestamp_seconds", certificate="tls_cert"
        )
        assert expires_s > time.time()
        assert value_of(families, "equipoise_policy_rejected") == 0
        assert value_of(families, "equipoise_store_readable") == 1
        policies.reject("policy.yaml line 3: ...", now=1.0)
        families = await scrape(seen[0], ca_file=authority.ca_file)
        assert value_of(families, "equipoise_policy_rejected") == 1
        assert value_of(families, "equipoise_policy_rejections_total") == 1
    await store.close()


async def test_balancers_that_elect_tell_the_waits_of_it(tmp_path, policy):
    store = SqliteStore(tmp_path / "state.sqlite")
    seen = []
    async with serving(
        store,
        credentials=Credentials(),
        listen="127.0.0.1:0",
        policies=PolicyBook(policy),
        drain_timeout_s=0.0,
        metrics=MetricsPort(metrics_listen="127.0.0.1:0"),
        on_metrics=seen.append,
        timing=LeaseTiming.lasting(30.0),
    ):
        families = await scrape(seen[0])
    await store.close()
    assert documented("Election").items() <= ours(families).items()
    assert value_of(families, "equipoise_election_timeout_seconds", wait="lease") == 20
    assert value_of(families, "equipoise_election_timeouts_total", wait="register") == 0


def test_a_large_pool_has_at_most_2000_series(hello_of, policy):
    # 61 layers x 320 ranks, and every kind of rejection and timeout.
    series = _series_of_a_pool(hello_of, policy, num_layers=61, num_ranks=320)
    assert 640 < series <= 2000


def test_ranks_beyond_a_limit_have_no_series_of_their_own(hello_of, policy):
    few = _series_of_a_pool(hello_of, policy, num_layers=2, num_ranks=MAX_RANKS_LISTED)
    many = _series_of_a_pool(hello_of, policy, num_layers=2, num_ranks=MAX_RANKS_LISTED + 1)
    assert few <= 2000
    assert many < 500


async def test_the_running_balancer_exports_exactly_the_documented_metrics(
    serving_harness, skewed, tmp_path
):
    harness = serving_harness
    store = SqliteStore(tmp_path / "state.sqlite")
    seen = []
    async with serving(
        store,
        credentials=Credentials(),
        listen="127.0.0.1:0",
        policies=harness.policies,
        drain_timeout_s=0.0,
        metrics=MetricsPort(metrics_listen="127.0.0.1:0"),
        on_metrics=seen.append,
    ):
        families = await scrape(seen[0])
    await store.close()
    assert value_of(families, "equipoise_leader") == 1
    assert "process_resident_memory_bytes" in families
    for worker in harness.ranks:
        worker.nodes_a_step = rows_of_a_step(is_two_hop=True)
    TimedFleet(harness).run(skewed(1), seconds=50)
    fill_all_slots(harness, minutes=6)
    harness.pool.counters.rejections.count("report_shape", "worker worker-0: ...")
    metrics = {**ours(families), **ours(families_of(harness.pool, now=harness.now))}
    assert metrics == documented("Balancer") | documented("Every process")


async def test_a_metrics_port_in_use_is_a_one_line_error(tmp_path, policy):
    store = SqliteStore(tmp_path / "state.sqlite")
    seen = []

    def balancer(metrics_listen):
        return serving(
            store,
            credentials=Credentials(),
            listen="127.0.0.1:0",
            policies=PolicyBook(policy),
            drain_timeout_s=0.0,
            metrics=MetricsPort(metrics_listen=metrics_listen),
            on_metrics=seen.append,
        )

    async with balancer("127.0.0.1:0"):
        with pytest.raises(TelemetryError, match="cannot serve metrics on 127"):
            async with balancer(seen[0]):
                pass
    await store.close()


def test_a_histogram_counts_a_value_on_its_bound_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1", 2.0), ("2", 3.0), ("+Inf", 4.0)]
    assert (histogram.sum, histogram.count) == (10.0, 4)


def _series_of_a_pool(hello_of, policy, *, num_layers, num_ranks):
    pool = Pool("big", policies=PolicyBook(policy), memory=PoolMemory())
    timeouts = [WorkerTimeout(name=wait, timeout_s=1.0) for wait in Wait]
    pool.counters.timeouts.add("worker-0", boot_id="boot-1", reported=timeouts)
    for rank in range(num_ranks):
        hello = hello_of(f"worker-{rank}", num_ranks=num_ranks)
        pool.roster._members[hello.worker] = Member(
            hello=hello, last_heard_s=0.0, since_s=0.0, rank=rank, serving=True
        )
    pool.roster._note_seats()
    loads = PoolLoads(
        epoch=1,
        model=ModelShape(num_layers=num_layers, num_experts=256, num_groups=8, expert_bytes=1),
        num_ranks=num_ranks,
        policy=policy,
        remembered={},
        counted_from=1,
        now=0.0,
    )
    window = loads.close_window(number=1, generation=1, now=10.0)
    rank_load = np.random.default_rng(0).gamma(9.0, size=(num_layers, num_ranks))
    pool.windows._closed.append(replace(window, rank_load=rank_load, assignments=rank_load.sum()))
    for kind in range(2 * MAX_KINDS):
        pool.counters.rejections.count(f"kind_{kind}", "text")
    return sum(len(family.samples) for family in families_of(pool, now=10.0).values())
