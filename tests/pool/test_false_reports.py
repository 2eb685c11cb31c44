"""One rank that reports what is not true: nothing that no rank runs is committed."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.planning.rollout import State
from equipoise.pool.effects import WriteCommitted
from equipoise.pool.health import Health
from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.pool.layouts import MAX_KNOWN, PoolLayouts
from equipoise.pool.records import PoolMemory
from equipoise.wire.balancer_messages import Abort, Stage
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import Switched
from tests.support.scripted_worker import ScriptedWorker

WINDOW_S = 10


@pytest.fixture
def staging(serving_harness, skewed):
    """A pool of four ranks that were sent a Stage."""
    serving_harness.run_traffic(skewed(1), seconds=WINDOW_S, carry_out=False)
    assert all(worker.staged for worker in serving_harness.ranks)
    return serving_harness


def beat(harness, *, seconds, but=()):
    """All ranks but some send heartbeats for a while."""
    for _ in range(seconds):
        harness.now += 1.0
        for worker in harness.ranks:
            if worker.rank not in but:
                harness.say(worker, worker.heartbeat())
        harness.tick()


def false_switch(worker):
    """A Switched of a rank that goes on with what it ran."""
    believed = ScriptedWorker(worker.hello)
    believed.take(worker.join_epoch)
    believed.run(worker.staged.layout)
    return Switched(
        epoch=worker.epoch,
        rank=worker.rank,
        generation=worker.staged.layout.generation,
        step=70,
        stall_us=1,
        median_step_us=900,
        checksums=believed.checksums(),
    )


def committed(harness):
    return [write.generation for write in harness.writes if isinstance(write, WriteCommitted)]


@pytest.mark.parametrize("state", ["staging", "staged"])
@pytest.mark.parametrize("beats", [True, False], ids=["its heartbeat denies it", "it is silent"])
def test_a_false_switch_is_not_committed_and_its_rank_is_named(staging, skewed, state, beats):
    harness, liar = staging, staging.ranks[2]
    if state == "staged":
        harness.stage_all()
    generation = liar.staged.layout.generation
    before = harness.pool.layouts.current.generation
    harness.say(liar, false_switch(liar))
    for _ in range(4):
        beat(harness, seconds=9, but=() if beats else (2,))
        harness.say(liar, liar.report())  # So that it does not count as lost.
    assert committed(harness) == []
    assert harness.pool.layouts.current.generation == before
    assert "rank 2 reported the switch, but " in harness.decisions()[-1].reason
    assert all(harness.sent_to(worker.hello.worker, Abort) for worker in harness.ranks)
    # What is planned next starts from what ranks run.
    harness.run_traffic(skewed(1), seconds=4 * WINDOW_S)
    latest = harness.sent_to("worker-0", Stage)[-1]
    assert (latest.base_generation, latest.layout.generation) >= (before, generation + 1)
    assert harness.pool.rollouts.completed >= 1


def test_the_commit_does_not_wait_for_a_dead_rank(staging):
    harness = staging
    harness.stage_all()
    ranks = harness.ranks
    generation = ranks[0].staged.layout.generation
    harness.say(ranks[0], ranks[0].switch())
    harness.lose(ranks[3])
    assert committed(harness) == [], "two ranks have not said yet whether they switched"
    harness.say(ranks[1], ranks[1].switch())
    harness.say(ranks[2], ranks[2].switch())
    assert committed(harness) == [generation]


@pytest.mark.parametrize("stored", [True, False], ids=["active", "switched"])
def test_a_late_switch_at_another_step_leaves_the_commit_and_is_named(staging, stored):
    harness, liar = staging, staging.ranks[3]
    harness.stage_all()
    harness.store_fault = "" if stored else "the store does not answer"
    switches = [worker.switch(step=70) for worker in harness.ranks]
    for worker, switched in zip(harness.ranks, switches, strict=True):
        harness.say(worker, switched)
    wave, decisions = harness.pool.rollouts.latest, harness.decisions()
    assert wave.state is (State.ACTIVE if stored else State.SWITCHED)
    harness.say(liar, replace(switches[3], step=99))
    assert harness.pool.rollouts.latest is wave
    assert harness.pool.rollouts.aborted == 0
    assert harness.decisions() == decisions
    (fault,) = harness.pool.agreement.faults
    assert fault == (
        f"rank 3 ({liar.hello.worker}) reports that it switched to generation "
        f"{wave.target.generation} at step 99, but the pool did at step 70: restart it"
    )
    harness.say(liar, switches[3])
    assert not harness.pool.agreement.faults


def test_a_heartbeat_of_another_layout_under_the_number_confirms_no_switch(staging):
    staging.stage_all()
    first, *others = staging.ranks
    target = staging.pool.rollouts.current.target
    staging.say(first, first.switch(step=70))
    for worker in others:
        beat_of_another = replace(
            worker.heartbeat(),
            generation=target.generation,
            staged_generation=0,
            layout_digest=other_layout(target).digest(),
        )
        staging.say(worker, beat_of_another)
    assert not committed(staging)
    assert len(staging.pool.agreement.faults) == 3
    for worker in others:
        staging.say(worker, worker.switch(step=70))
    assert committed(staging) == [target.generation]


def test_a_late_switch_of_an_earlier_wave_changes_nothing_and_is_named(serving_harness, skewed):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=WINDOW_S, carry_out=False)
    harness.stage_all()
    switches = [worker.switch(step=70) for worker in harness.ranks]
    for worker, switched in zip(harness.ranks, switches, strict=True):
        harness.say(worker, switched)
    harness.run_traffic(skewed(2), seconds=3 * WINDOW_S)
    running, liar = harness.pool.layouts.current, harness.ranks[3]
    assert running.generation > switches[3].generation
    member = harness.pool.roster.seated()[3]
    harness.say(liar, replace(switches[3], step=99))
    assert member.generation == running.generation
    assert np.array_equal(member.held, liar.own(running.expert_of_slot))
    assert not harness.pool.quarantine.workers
    (fault,) = harness.pool.agreement.faults
    assert "switched to generation 2 at step 99, but the pool did at step 70" in fault
    harness.say(liar, switches[3])
    assert not harness.pool.agreement.faults
    assert harness.pool.agreement.is_settled


@pytest.mark.parametrize("liar", [0, 2, 3], ids=["first", "amid", "last"])
def test_the_rank_that_reports_another_step_of_the_switch_is_named_until_it_agrees(staging, liar):
    staging.stage_all()
    liar = staging.ranks[liar]
    switches = [worker.switch(step=71 if worker is liar else 70) for worker in staging.ranks]
    for worker, switched in zip(staging.ranks, switches, strict=True):
        staging.say(worker, switched)
    diagnosis = staging.pool.diagnosis()
    assert diagnosis.health is Health.DEGRADED
    assert diagnosis.reason == (
        f"rank {liar.rank} ({liar.hello.worker}) reports that it switched to generation 2 at step "
        "71, but the pool did at step 70: restart it"
    )
    assert not staging.pool.agreement.is_settled
    staging.say(liar, replace(switches[liar.rank], step=70))
    assert staging.pool.diagnosis().health is Health.SERVING


def test_ranks_none_of_which_agree_about_the_switch_are_all_named(staging):
    staging.stage_all()
    for step, worker in enumerate(staging.ranks):
        staging.say(worker, worker.switch(step=70 + step))
    reason = staging.pool.diagnosis().reason
    for step, worker in enumerate(staging.ranks):
        assert (
            f"({worker.hello.worker}) reports that it switched to generation 2 at step {70 + step}"
            in reason
        )
    assert "but other ranks at others: restart it" in reason


def other_layout(layout):
    return layout.with_placement(
        np.ascontiguousarray(layout.expert_of_slot[:, ::-1]), generation=layout.generation
    )


@pytest.mark.parametrize("kind", ["staged", "switched", "serving"])
def test_a_message_about_another_layout_under_the_number_is_rejected_and_named(staging, kind):
    harness, worker = staging, staging.ranks[2]
    value = {
        "staged": worker.answer_staged,
        "switched": lambda: false_switch(worker),
        "serving": worker.serving,
    }[kind]()
    wrong = other_layout(harness.pool.layouts.get(value.generation)).digest()
    with pytest.raises(InvalidMessageError, match=f"{worker.hello.worker} reports") as caught:
        harness.say(worker, replace(value, layout_digest=wrong))
    assert caught.value.kind == f"{kind}_layout"
    assert wrong[:8].hex() in str(caught.value)
    harness.say(worker, replace(value, layout_digest=b""))


def test_a_heartbeat_of_another_layout_under_the_number_is_named_until_it_is_right(
    serving_harness, skewed
):
    harness, worker = serving_harness, serving_harness.ranks[2]
    current = harness.pool.layouts.current
    wrong = other_layout(current).digest()
    harness.say(worker, replace(worker.heartbeat(), layout_digest=wrong))
    fault = harness.pool.agreement.faults[0]
    assert fault == (
        f"rank 2 ({worker.hello.worker}) runs layout {wrong[:8].hex()} as generation "
        f"{current.generation}, whose layout is {current.digest()[:8].hex()}: restart it"
    )
    harness.run_traffic(skewed(1), seconds=2 * WINDOW_S)
    assert harness.sent_to("worker-0", Stage) == [], "nothing is planned meanwhile"
    harness.say(worker, replace(worker.heartbeat(), layout_digest=current.digest()))
    assert not harness.pool.agreement.faults
    harness.run_traffic(skewed(1), seconds=WINDOW_S)
    assert harness.sent_to("worker-0", Stage)


def test_invented_generations_do_not_evict_what_is_rolled_out(staging):
    harness, liar = staging, staging.ranks[3]
    layouts, wave = harness.pool.layouts, harness.pool.rollouts.current
    claims = ScriptedWorker(liar.hello)
    claims.take(liar.join_epoch)
    for ahead in range(1, 2 * MAX_KNOWN):
        generation = wave.target.generation + ahead
        claims.run(liar.layout.with_placement(liar.layout.expert_of_slot, generation=generation))
        with pytest.raises(RejectedWorkerError, match=f"runs generation {generation}, but"):
            harness.hello(claims.reconnecting())
    assert layouts.get(wave.base.generation) is not None
    assert layouts.get(wave.target.generation).same_placement(wave.target)
    wrong = other_layout(wave.target).digest()
    with pytest.raises(InvalidMessageError, match="as layout"):
        harness.say(liar, replace(false_switch(liar), layout_digest=wrong))


def test_invented_generations_do_not_evict_what_the_store_has(serving_harness):
    base = serving_harness.pool.layouts.current
    layouts = PoolLayouts(
        PoolMemory(committed=base, proposed=base.with_placement(base.expert_of_slot, generation=2))
    )
    for generation in range(3, 3 * MAX_KNOWN):
        layouts.run(base.with_placement(base.expert_of_slot, generation=generation))
    assert layouts.committed is base
    assert layouts.get(2) is layouts.proposed
    assert layouts.get(3) is None, "others are forgotten"


def test_a_pool_whose_rank_0_sends_no_table_says_so_until_it_does(harness, skewed):
    harness.assemble()
    first = harness.ranks[0]
    for worker in harness.ranks:
        harness.say(worker, replace(worker.serving(), expert_checksums=None))
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DEGRADED
    assert diagnosis.reason == (
        f"rank 0 ({first.hello.worker}) has not sent the checksums of the checkpoint: restart it"
    )
    harness.say(first, first.serving())
    assert harness.pool.diagnosis().health is Health.SERVING
    harness.run_traffic(skewed(1), seconds=WINDOW_S)
    assert harness.sent_to("worker-0", Stage)


def test_an_emptied_store_and_one_rank_of_another_generation_are_named_until_they_agree(
    make_harness, serving_harness
):
    harness = make_harness()
    harness.workers, harness.now = serving_harness.workers, serving_harness.now
    liar = serving_harness.ranks[3]
    truth = liar.layout
    liar.run(truth.with_placement(truth.expert_of_slot, generation=truth.generation + 1))
    for worker in serving_harness.ranks:
        harness.hello(worker.reconnecting())
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DEGRADED
    assert diagnosis.reason == (
        f"rank 3 ({liar.hello.worker}) runs generation 2, but 3 of 4 ranks run generation 1: "
        "restart it"
    )
    liar.run(truth)
    harness.say(liar, liar.heartbeat())
    harness.tick(1.0)
    assert harness.pool.diagnosis().health is Health.SERVING
    assert harness.pool.agreement.is_settled


def test_a_rank_that_runs_a_generation_nobody_made_is_named(serving_harness):
    liar = serving_harness.ranks[2]
    serving_harness.say(liar, replace(liar.heartbeat(), generation=2**40))
    diagnosis = serving_harness.pool.diagnosis()
    assert diagnosis.health is not Health.SERVING
    assert (
        f"rank 2 ({liar.hello.worker}) runs generation {2**40}, but the pool runs generation 1"
        in diagnosis.reason
    )
    assert serving_harness.pool.roster.seated()[2].generation == 1
    serving_harness.say(liar, liar.heartbeat())
    assert serving_harness.pool.diagnosis().health is Health.SERVING
