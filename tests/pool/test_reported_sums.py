"""Sums of what ranks and gateways report stay in range, however often they report their maximum."""

from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from equipoise.balancer.service.status import decision_to_proto, pool_status, pool_summary
from equipoise.balancer.store.records import checked_average, pack_entry, unpack_entry
from equipoise.balancer.telemetry.pool_metrics import PoolMetrics
from equipoise.planning.errors import InvalidReportError
from equipoise.pool.records import DecisionRecord
from equipoise.wire.checks import MAX_COUNT, MAX_EXPERT_BYTES
from equipoise.wire.convert import from_worker, to_balancer
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.plain import as_json
from equipoise_api.v1 import worker_link_pb2 as pb
from tests.support.limits import extremes, highest

ENOUGH = 2**64 // MAX_COUNT + 2
"""Times that the highest count must be added to exceed every field of the status."""


class Collected:
    def __init__(self, harness):
        self._harness = harness

    def collect(self):
        metrics = PoolMetrics(now=self._harness.now)
        metrics.add(self._harness.pool)
        return metrics.families()


def shown(harness):
    """The status as JSON, after everything else that shows the pool, and what the store gets."""
    registry = CollectorRegistry()
    registry.register(Collected(harness))
    assert b"equipoise_timeouts_total" in generate_latest(registry)
    assert pool_summary(harness.pool).pool == harness.pool.name
    for record in harness.decisions():
        decision_to_proto(record)
        assert unpack_entry(DecisionRecord, 1, pack_entry(record)).kind is record.kind
    if harness.pool.windows.loads is not None:
        for average in harness.pool.windows.loads.records(now=harness.now).values():
            checked_average(average)
    return as_json(pool_status(harness.pool, now=harness.now))


def heard(harness, worker, message):
    """Hand a message to the pool as it comes off the wire; whether it was accepted."""
    try:
        harness.say(worker, from_worker(message, hello=worker.hello))
    except (InvalidMessageError, InvalidReportError):
        return False
    return True


def wrapped(report):
    return pb.ConnectRequest(load_report=report)


def decode_for(worker):
    return lambda report: from_worker(wrapped(report), hello=worker.hello)


def highest_report(worker):
    """A report of the rank's place, with every number in it at its maximum."""
    place = {"epoch", "rank", "generation", "phase"}
    report = to_balancer(worker.report()).load_report
    return wrapped(highest(report, decode_for(worker), kept=place))


def of_name(listed, name):
    return next(one for one in listed if one["name"] == name)


@pytest.mark.parametrize("again", [0, MAX_COUNT], ids=["a count that falls", "a name twice"])
def test_a_wait_that_timed_out_most_often_counts_once(serving_harness, again):
    harness, worker = serving_harness, serving_harness.ranks[0]
    message = to_balancer(worker.report())
    for _ in range(ENOUGH):
        for reached in (MAX_COUNT, again):
            del message.load_report.timeouts[:]
            message.load_report.timeouts.add(name="step", timeout_s=1.0, reached=reached)
            heard(harness, worker, message)
    assert of_name(shown(harness)["timeouts"], "step")["reached"] == MAX_COUNT


def test_no_name_is_twice_in_a_report(serving_harness):
    worker = serving_harness.ranks[0]
    message = to_balancer(worker.report())
    for reached in (1, 2):
        message.load_report.timeouts.add(name="step", timeout_s=1.0, reached=reached)
    with pytest.raises(InvalidMessageError, match="names 'step' twice") as caught:
        from_worker(message, hello=worker.hello)
    assert caught.value.kind == "report_timeouts"


def test_processes_without_end_leave_their_counts_in_range(serving_harness):
    """Counts of workers and of gateways begin again with each process."""
    harness, worker = serving_harness, serving_harness.ranks[0]
    message = to_balancer(worker.report())
    message.load_report.timeouts.add(name="step", timeout_s=1.0, reached=MAX_COUNT)
    for number in range(ENOUGH):
        worker.hello = replace(worker.hello, boot_id=f"boot-{number}")
        heard(harness, worker, message)
        harness.controller.count_poison(f"gateway-{number}", MAX_COUNT)
    status = shown(harness)
    assert of_name(status["timeouts"], "step")["reached"] == MAX_COUNT
    assert status["poison_requests"] == MAX_COUNT


def test_the_sum_over_a_large_pools_ranks_is_in_range(serving_harness):
    harness = serving_harness
    worker = harness.ranks[0]
    one = from_worker(highest_report(worker), hello=worker.hello)
    assert one.stats.held_tokens == MAX_COUNT
    member = harness.pool.roster.seated()[0]
    member.note_stats(one.stats)
    harness.pool.roster.seated = lambda: [member] * ENOUGH
    assert pool_summary(harness.pool).handovers.held_tokens == MAX_COUNT


def test_reports_at_the_maximum_leave_everything_readable(serving_harness):
    """Alternately the highest and the lowest counts, in every order, for many windows."""
    harness = serving_harness
    lows = {worker.rank: to_balancer(worker.report()) for worker in harness.ranks}
    for worker in harness.ranks:
        low, top = lows[worker.rank], highest_report(worker)
        others = map(wrapped, extremes(low.load_report, decode_for(worker)))
        for message in (top, low, *others, top, low):
            heard(harness, worker, message)
        harness.tick(1.0)
        shown(harness)
    for _ in range(40):
        harness.tick(1.0)
        for worker in harness.ranks:
            heard(harness, worker, lows[worker.rank])
    assert harness.pool.windows.num_closed >= 2
    shown(harness)


def test_a_window_that_counts_too_much_for_the_status_is_shown(serving_harness):
    """The steps of most ranks are what the loads of the others are scaled to."""
    harness = serving_harness
    for worker in harness.ranks:
        message = to_balancer(worker.report()).load_report
        counts = np.full(worker.assignments.shape, 2**24 if worker.rank else 2**53, "<u8")
        message.steps = 1 if worker.rank == 3 else MAX_COUNT
        message.assignments = counts.tobytes()
        message.busy_us = message.step_us = MAX_COUNT
        assert heard(harness, worker, wrapped(message))
    harness.tick(20.0)
    assert harness.pool.windows.latest.assignments > 2**64
    status = shown(harness)
    assert status["window_assignments"] == status["windows"][-1]["assignments"] == MAX_COUNT


def test_rows_between_nodes_are_summed_without_overflow(serving_harness):
    harness = serving_harness
    for worker in harness.ranks:
        message = to_balancer(worker.report()).load_report
        message.steps = 10
        message.nodes.rows_by_nodes.extend([0, 0, MAX_COUNT])
        message.nodes.direct_rows = message.nodes.remote_nodes = MAX_COUNT
        assert heard(harness, worker, wrapped(message))
    harness.tick(20.0)
    traffic = shown(harness)["node_traffic"]
    assert traffic["rows_by_nodes"] == [0, 0, MAX_COUNT]
    assert traffic["nodes"] == pytest.approx(2.0)
    assert traffic["remote_nodes"] == pytest.approx(1.0)


def test_the_rows_of_a_rank_are_together_a_count(serving_harness):
    worker = serving_harness.ranks[0]
    message = to_balancer(worker.report())
    message.load_report.nodes.rows_by_nodes.extend([MAX_COUNT, 1])
    with pytest.raises(InvalidMessageError, match="the sum of rows_by_nodes"):
        from_worker(message, hello=worker.hello)


def test_moving_every_expert_of_the_largest_kind_is_in_range(make_harness, skewed):
    harness = make_harness()
    for worker in harness.workers.values():
        model = replace(worker.hello.model, expert_bytes=MAX_EXPERT_BYTES)
        worker.hello = replace(worker.hello, model=model)
    harness.serve()
    harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    status = shown(harness)
    assert MAX_EXPERT_BYTES <= status["rollout"]["bytes"] <= MAX_COUNT
    assert MAX_EXPERT_BYTES <= status["last_decision"]["bytes"] <= MAX_COUNT


def test_an_expert_larger_than_any_layout_can_count_is_rejected(serving_harness):
    message = to_balancer(serving_harness.ranks[0].hello)
    message.hello.model.expert_bytes = MAX_EXPERT_BYTES + 1
    with pytest.raises(InvalidMessageError, match="expert_bytes must be from 1 to 2\\^35"):
        from_worker(message, hello=None)
