"""A pool under a policy that changes: nothing is lost, and every decision names its policy."""

import numpy as np
import pytest

from equipoise.balancer.service.status import decision_to_proto, pool_status
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.policy.digest import digest
from equipoise.pool.records import DecisionKind, DecisionRecord, PoolMemory
from equipoise.wire.balancer_messages import JoinEpoch

HEAD = "apiVersion: equipoise.dev/v1alpha1\nkind: BalancePolicy\n"


@pytest.fixture
def hot():
    """Load that asks for another layout: a few experts of each layer carry most of it."""
    load = np.ones((3, 32))
    load[:, :4] = 60.0
    return load


def offer(harness, body):
    taken = harness.policies.offer(HEAD + body, source="policy.yaml", now=harness.now)
    harness.tick()
    return taken


def test_decisions_name_the_policy_that_made_them(make_harness, hot):
    harness = make_harness()
    harness.serve()
    harness.run_traffic(hot, seconds=11)
    (first,) = harness.decisions()
    assert first.kind is DecisionKind.PLAN
    assert first.policy_hash == harness.pool.policy.in_force.digest == pool_hash(harness)
    assert decision_to_proto(first).policy_hash == first.policy_hash


def pool_hash(harness):
    return pool_status(harness.pool, now=harness.now).policy.hash


def test_a_change_is_recorded_with_what_differs(make_harness):
    harness = make_harness()
    harness.serve()
    harness.tick()
    before = pool_hash(harness)
    assert offer(harness, "pools: {tiny: {interval: 3s, judging: {minGain: 0.2}}}")
    (record,) = harness.decisions()
    assert (record.kind, record.accepted) == (DecisionKind.POLICY, True)
    assert record.policy_hash == pool_hash(harness) != before
    for words in (
        before,
        record.policy_hash,
        "policy.yaml",
        "interval 10s → 3s",
        "judging.minGain",
    ):
        assert words in record.reason
    assert pool_status(harness.pool, now=harness.now).policy.source == "policy.yaml"


def test_other_pools_overrides_and_comments_change_nothing(make_harness):
    harness = make_harness()
    harness.serve()
    harness.tick()
    before = pool_hash(harness)
    values = "judging: {minAssignments: 100}"
    assert offer(harness, f"# why\ndefaults: {{{values}}}\npools: {{other: {{pause: true}}}}")
    assert pool_hash(harness) == before
    assert harness.decisions() == []


def test_averages_keep_their_values_when_half_lives_change(make_harness, hot):
    harness = make_harness()
    harness.serve()
    harness.run_traffic(hot, seconds=5)
    harness.run_traffic(hot, seconds=6)
    slow, fast = (
        harness.pool.windows.loads.slow.per_second(),
        harness.pool.windows.loads.fast.per_second(),
    )
    assert slow.any()
    offer(harness, "defaults: {averages: {slowHalfLife: 5m, fastHalfLife: 20s}}")
    assert harness.pool.windows.loads.slow.per_second() == pytest.approx(slow)
    assert harness.pool.windows.loads.fast.per_second() == pytest.approx(fast)
    assert harness.pool.windows.loads.slow.half_life_s == 300


def test_a_shorter_interval_closes_the_open_window_sooner(make_harness, hot):
    harness = make_harness()
    harness.serve()
    harness.run_traffic(hot, seconds=4)
    assert harness.pool.windows.num_closed == 0
    offer(harness, "defaults: {interval: 2s}")
    assert harness.pool.windows.num_closed == 1


def test_a_pause_keeps_everything_in_place_and_says_so(make_harness, hot):
    harness = make_harness()
    harness.serve()
    offer(harness, "defaults: {pause: true, judging: {minAssignments: 100}}")
    harness.run_traffic(hot, seconds=11)
    decision = harness.decisions()[-1]
    assert not decision.accepted
    assert "pause" in decision.reason
    assert harness.pool.rollouts.current is None
    offer(harness, "defaults: {judging: {minAssignments: 100}}")
    harness.run_traffic(hot, seconds=10)
    assert any(one.accepted and one.kind is DecisionKind.PLAN for one in harness.decisions())


def test_a_policy_that_changed_meanwhile_takes_a_plan_back(make_harness, hot, monkeypatch):
    harness = make_harness()
    harness.serve()
    controller = harness.controller
    proposed = controller.proposed

    def changed_meanwhile(proposal, **about):
        harness.policies.offer(HEAD + "defaults: {interval: 9s}", source="f", now=harness.now)
        controller.tick(now=harness.now)
        return proposed(proposal, **about)

    monkeypatch.setattr(controller, "proposed", changed_meanwhile)
    harness.run_traffic(hot, seconds=11)
    decision = harness.decisions()[-1]
    assert not decision.accepted
    assert decision.reason.startswith("the policy changed while this was planned: ")


def test_a_policy_that_changes_every_second_moves_things_no_more_often(make_harness, hot):
    harness = make_harness()
    harness.serve()
    load = hot * 10
    for second in range(40):
        offer(harness, f"defaults: {{judging: {{minAssignments: {100 + second % 2}}}}}")
        harness.run_traffic(load if second < 20 else load[:, ::-1], seconds=1)
    plans = [one for one in harness.decisions() if one.kind is DecisionKind.PLAN]
    assert harness.pool.windows.num_closed == len(plans) == 4
    assert 1 <= sum(one.accepted for one in plans) <= 4


def test_a_rejected_policy_changes_nothing_and_is_shown_until_a_good_one_comes(make_harness):
    harness = make_harness()
    harness.serve()
    offer(harness, "defaults: {interval: 7s}")
    before = harness.pool.policy.in_force
    revision = harness.pool.revision
    assert not offer(harness, "defaults: {intervall: 5s}")
    assert harness.pool.policy.in_force == before
    assert harness.pool.revision > revision, "watchers hear of it"
    shown = pool_status(harness.pool, now=harness.now).policy
    assert (shown.hash, shown.num_rejected) == (before.digest, 1)
    assert "line 3: defaults.intervall" in shown.rejection
    offer(harness, "defaults: {interval: 5s}")
    assert not pool_status(harness.pool, now=harness.now).policy.rejection


def test_timeouts_follow_the_policy_and_keep_their_counts(make_harness):
    harness = make_harness()
    harness.serve()
    harness.pool.counters.timeouts.note("stage", "it took too long")
    offer(harness, "defaults: {timeouts: {stage: 7s}}")
    (stage,) = (one for one in harness.pool.counters.timeouts.all() if one.name == "stage")
    assert (stage.timeout_s, stage.reached) == (7.0, 1)


def test_a_shorter_silence_waits_for_workers_that_still_beat_slowly(make_harness):
    harness = make_harness()
    harness.serve()
    assert harness.sent_to("worker-0", JoinEpoch)[-1].heartbeat_interval_s == 1.0
    offer(harness, "defaults: {heartbeatInterval: 100ms, timeouts: {report: 300ms}}")
    harness.tick(1.5)
    assert not harness.pool.attendance.silent
    harness.tick(1.0)
    assert len(harness.pool.attendance.silent) == 4


def test_a_change_while_no_balancer_led_is_recorded_by_the_next_one(make_harness):
    last = DecisionRecord(
        sequence=3,
        time_unix_s=1.0,
        accepted=False,
        reason="",
        base_generation=1,
        policy_hash="0123456789ab",
    )
    harness = make_harness(memory=PoolMemory(last_decision=last))
    harness.tick()
    (record,) = harness.decisions()
    assert record.kind is DecisionKind.POLICY
    assert "instead of 0123456789ab" in record.reason


def test_pools_have_policies_of_their_own():
    book = PolicyBook(Policy(), now=5.0)
    assert book.of("a", None).source == "command line"
    text = HEAD + "defaults: {interval: 20s}\npools: {b: {interval: 30s}}"
    assert book.offer(text, source="f", now=6.0)
    assert [book.of(name, None).values.interval_s for name in "ab"] == [20, 30]
    assert book.of("a", None).digest == digest(Policy(interval_s=20.0))
    assert book.of("a", None).loaded_s == 6.0
