"""Workers that compute slower than their peers."""

import pytest

from equipoise.balancer.service.status import pool_status
from equipoise.planning.policy import Policy
from equipoise.wire.messages import GroupLost


@pytest.fixture
def policy_of():
    def policy(action, **values):
        return Policy(
            interval_s=10.0,
            min_assignments=100.0,
            slow_worker_windows=3,
            slow_worker_action=action,
            slow_worker_probation_s=60.0,
            **values,
        )

    return policy


def slow_down(harness, rank, factor):
    worker = harness.ranks[rank]
    worker.busy_us_a_step *= factor
    return worker


def test_a_slow_rank_is_shown_in_the_status_and_nothing_else_happens(
    make_harness, policy_of, skewed
):
    harness = make_harness(policy=policy_of("report"))
    harness.serve()
    slow_down(harness, 2, 5)
    harness.run_traffic(skewed(1), seconds=30)
    status = pool_status(harness.pool, now=harness.now)
    assert [bool(rank.trouble) for rank in status.ranks] == [False, False, True, False]
    assert "times as long to compute a step as the median rank" in status.ranks[2].trouble
    assert status.ranks[2].busy_step_us == 500
    assert status.ranks[2].slowdown > 2 > status.ranks[1].slowdown
    assert harness.pool.roster.epoch == 1
    assert harness.pool.counters.tally.slow_found == 1


def test_a_slow_rank_is_not_reported_before_enough_windows(make_harness, policy_of, skewed):
    harness = make_harness(policy=policy_of("report"))
    harness.serve()
    slow_down(harness, 2, 5)
    harness.run_traffic(skewed(1), seconds=20)
    assert not harness.pool.windows.slow


def test_by_policy_the_others_continue_without_it_and_it_returns(make_harness, policy_of, skewed):
    harness = make_harness(policy=policy_of("exclude"))
    for worker in harness.workers.values():
        worker.hello = type(worker.hello)(**{**_fields(worker.hello), "slots_per_rank": 11})
    harness.serve()
    slow = slow_down(harness, 2, 5)
    harness.run_traffic(skewed(1), seconds=30)
    harness.tick()
    pool, name = harness.pool, slow.hello.worker
    assert pool.roster.epoch == 2
    assert name not in [member.name for member in pool.roster.seated()]
    assert "continues without slow workers" in pool.membership.epochs[0].reason
    lost = GroupLost(epoch=1, reason="the others left", expert_of_slot=None)
    harness.say(slow, lost)
    for worker in _seated(harness):
        harness.say(worker, worker.serving())
    assert pool.roster.complete
    reason = (
        f"{name} gets no rank: it was slow in epoch 1 (rank 2 takes 2.1 times as long to compute a "
        "step as the median rank, in 3 consecutive windows); it may return at 00:18:10 UTC"
    )
    assert reason in pool.diagnosis().reason
    harness.tick(30.0)
    assert pool.roster.epoch == 2, "it is on probation"
    assert reason in pool.diagnosis().reason
    for worker in harness.workers.values():
        harness.say(worker, worker.heartbeat())
    harness.tick(31.0)
    for worker in harness.workers.values():
        harness.say(worker, worker.heartbeat())
    harness.tick()
    assert pool.roster.epoch == 3
    assert "it was slow" not in pool.diagnosis().reason
    assert name in [member.name for member in pool.roster.seated()]


def test_a_worker_that_cannot_be_spared_stays_and_the_pool_says_so(make_harness, policy_of, skewed):
    harness = make_harness(policy=policy_of("exclude"))
    harness.serve()
    slow_down(harness, 2, 5)
    harness.run_traffic(skewed(1), seconds=30)
    harness.tick()
    assert harness.pool.roster.epoch == 1
    reason = harness.pool.diagnosis().reason
    assert "slow, but needed for all experts to have slots" in reason
    assert "gets no rank" not in reason


def _seated(harness):
    names = {member.name for member in harness.pool.roster.seated()}
    return [worker for worker in harness.workers.values() if worker.hello.worker in names]


def _fields(hello):
    return {name: getattr(hello, name) for name in hello.__slots__}
