"""Who is quarantined is in the status, and each change is a decision."""

from dataclasses import replace

import pytest

from equipoise.balancer.service.status import pool_status
from equipoise.pool.quarantine_records import MAX_RECORDS, PERIOD_S
from equipoise.pool.records import DecisionKind, PoolMemory


@pytest.fixture
def odd(serving_harness, hello_of):
    """A worker with another checkpoint, which has connected to a pool that serves."""
    hello = hello_of("worker-9", checkpoint_fingerprint="other")
    serving_harness.hello(hello)
    serving_harness.tick(0.1)
    return hello


def records(harness):
    return [one for one in harness.decisions() if one.kind is DecisionKind.QUARANTINE]


def test_a_quarantined_worker_is_in_the_status_and_in_the_decisions(serving_harness, odd):
    harness = serving_harness
    began_s = harness.now
    harness.tick(5.0)
    (shown,) = pool_status(harness.pool, now=harness.now).quarantined
    assert (shown.worker, shown.boot_id, shown.until_restart) == ("worker-9", "boot-1", False)
    assert "its checkpoint is other" in shown.reason
    assert shown.since_unix_s == pytest.approx(began_s, abs=1.0)
    (record,) = records(harness)
    assert record.accepted
    assert record.reason == f"worker worker-9 (boot boot-1) is quarantined: {shown.reason}"
    assert record.base_generation == harness.pool.layouts.stored_generation
    assert harness.pool.journal.last_decision == record


def test_its_release_is_a_decision_too(serving_harness, odd, hello_of):
    harness = serving_harness
    harness.hello(hello_of("worker-9", boot_id="boot-2"))
    harness.tick(0.1)
    assert not pool_status(harness.pool, now=harness.now).quarantined
    began, ended = records(harness)
    assert (began.accepted, ended.accepted) == (True, False)
    assert ended.reason.startswith("worker worker-9 (boot boot-1) is no longer quarantined; the")


def test_a_worker_that_restarts_again_and_again_leaves_room_for_other_decisions(
    serving_harness, odd
):
    harness = serving_harness
    for boot in range(2, 100):
        harness.hello(replace(odd, boot_id=f"boot-{boot}"))
        harness.tick(0.1)
    assert len(records(harness)) == MAX_RECORDS
    harness.tick(PERIOD_S)
    harness.hello(replace(odd, boot_id="boot-100"))
    harness.tick(0.1)
    assert len(records(harness)) == MAX_RECORDS + 2


def test_a_quarantine_does_not_look_like_another_policy(serving_harness, odd, make_harness):
    (record,) = records(serving_harness)
    after = make_harness(memory=PoolMemory(last_decision=record))
    after.tick(0.1)
    assert not [one for one in after.decisions() if one.kind is DecisionKind.POLICY]
