"""A pool serves one phase: its policy, its load and its decisions are those of the phase."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.balancer.service.status import decision_to_proto, pool_status, pool_summary
from equipoise.planning.errors import InvalidReportError
from equipoise.planning.phase import Phase
from equipoise.pool.records import DecisionKind, PoolMemory

HEAD = "apiVersion: equipoise.dev/v1alpha1\nkind: BalancePolicy\n"
FILE = f"{HEAD}pools: {{readers: {{phase: prefill, interval: 3s}}}}"


@pytest.fixture
def prefill(make_harness):
    harness = make_harness()
    make_prefill(harness)
    return harness


def make_prefill(harness):
    for worker in harness.workers.values():
        worker.hello = replace(worker.hello, phase=Phase.PREFILL, latent_form="v1/a")


def hot():
    load = np.ones((3, 32))
    load[:, :4] = 60.0
    return load


def test_status_and_decisions_name_the_phase(prefill):
    prefill.serve()
    prefill.run_traffic(hot(), seconds=11)
    (decision,) = prefill.decisions()
    assert decision_to_proto(decision).phase == "prefill"
    assert prefill.pool.windows.latest.phase is Phase.PREFILL
    status = pool_status(prefill.pool, now=prefill.now)
    assert (status.phase, status.ranks[0].latent_form) == ("prefill", "v1/a")
    assert status.ranks[0].boot_id == "boot-1"
    summary = pool_summary(prefill.pool)
    assert (summary.phase, list(summary.latent_forms)) == ("prefill", ["v1/a"])


def test_load_of_another_phase_feeds_no_layout_of_this_pool(prefill):
    prefill.serve()
    worker = prefill.ranks[0]
    worker.serve_traffic(hot())
    report = worker.report()
    other = replace(report, load=replace(report.load, phase=Phase.DECODE))
    with pytest.raises(InvalidReportError, match="worker-0 reports decode load, but it serves pre"):
        prefill.say(worker, other)
    assert prefill.pool.windows.loads._window.close(now=prefill.now).slot_load.sum() == 0


def test_a_policy_by_phase_is_in_force_once_a_worker_tells_the_phase(prefill):
    assert prefill.policies.offer(FILE, source="policy.yaml", now=prefill.now)
    prefill.tick()
    assert prefill.pool.policy.values.interval_s != 3
    assert not prefill.decisions()
    prefill.serve()
    prefill.tick()
    assert prefill.pool.policy.values.interval_s == 3


def test_a_restarted_balancer_does_not_record_the_policy_of_the_phase_as_a_change(make_harness):
    first = make_harness()
    make_prefill(first)
    assert first.policies.offer(FILE, source="policy.yaml", now=first.now)
    first.serve()
    first.run_traffic(hot(), seconds=11)
    (latest, *_) = [one for one in first.decisions() if one.kind is DecisionKind.PLAN]
    again = make_harness(memory=PoolMemory(last_decision=replace(latest, sequence=9)))
    make_prefill(again)
    assert again.policies.offer(FILE, source="policy.yaml", now=again.now)
    again.tick()
    again.serve()
    again.tick()
    assert again.pool.policy.values.interval_s == 3
    assert not again.decisions()
