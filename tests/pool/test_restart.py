"""A balancer that ended anywhere, and the next one that finds its file and the ranks."""

import pytest

from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.pool.effects import (
    WriteAdopted,
    WriteAverage,
    WriteCommitted,
    WriteDecision,
    WriteMembership,
    WriteProposed,
)
from equipoise.pool.health import Health
from equipoise.wire.balancer_messages import Abort, JoinEpoch, Stage


async def put(store, write):
    match write:
        case WriteProposed():
            await store.put_proposed("tiny", write.layout, term=1)
        case WriteCommitted():
            await store.commit("tiny", write.generation, previous=write.previous, term=1)
        case WriteAdopted():
            await store.adopt("tiny", write.layout, term=1)
        case WriteMembership():
            await store.put_membership("tiny", write.members, term=1)
        case WriteAverage():
            await store.put_average("tiny", write.name, write.record, term=1)
        case WriteDecision():
            await store.add_decision("tiny", write.record, term=1)


@pytest.fixture
def restart(tmp_path, make_harness):
    """Ends a harness's balancer; gives the harness of its successor, with the same workers."""

    async def restarted(harness, *, forget=()):
        store = SqliteStore(tmp_path / "state.sqlite")
        await store.fence(term=1)
        for write in harness.writes:
            if not isinstance(write, forget):
                await put(store, write)
        await store.close()
        reopened = SqliteStore(tmp_path / "state.sqlite")
        memory = await reopened.recall("tiny")
        await reopened.close()
        successor = make_harness(memory=memory)
        successor.now = harness.now + 5.0
        successor.workers = harness.workers
        return successor

    return restarted


def reconnect(harness):
    for worker in harness.ranks:
        harness.hello(worker.reconnecting())


async def test_ranks_that_served_on_are_taken_as_they_are(serving_harness, skewed, restart):
    serving_harness.run_traffic(skewed(1), seconds=10)
    harness = await restart(serving_harness)
    reconnect(harness)
    assert harness.pool.diagnosis().health is Health.SERVING
    assert harness.pool.roster.epoch == 1
    assert harness.pool.layouts.committed.generation == 2
    for name in harness.workers:
        (join_epoch,) = harness.sent_to(name, JoinEpoch)
        assert join_epoch.layout.generation == 2


async def test_a_store_with_another_layout_under_the_number_takes_over_that_of_the_ranks(
    serving_harness, skewed, restart
):
    serving_harness.run_traffic(skewed(1), seconds=10)
    ran = serving_harness.ranks[0].layout
    other = ran.with_placement(ran.expert_of_slot[:, ::-1].copy(), generation=ran.generation)
    serving_harness.writes.append(WriteAdopted(layout=other))
    harness = await restart(serving_harness)
    assert harness.pool.layouts.current.digest() == other.digest()
    reconnect(harness)
    assert harness.pool.layouts.current.digest() == ran.digest()
    adopted = [write for write in harness.writes if isinstance(write, WriteAdopted)]
    assert [write.layout.digest() for write in adopted] == [ran.digest()]
    harness.run_traffic(skewed(2), seconds=30)
    assert harness.pool.rollouts.completed >= 1


async def test_a_rank_that_runs_another_layout_under_the_number_is_named(
    serving_harness, skewed, restart
):
    serving_harness.run_traffic(skewed(1), seconds=10)
    harness = await restart(serving_harness)
    *others, odd = harness.ranks
    for worker in others:
        harness.hello(worker.reconnecting())
    ran = odd.layout
    odd.layout = ran.with_placement(ran.expert_of_slot[:, ::-1].copy(), generation=2)
    harness.hello(odd.reconnecting())
    assert (
        "worker-3 gets no rank: it runs generation 2 as layout" in harness.pool.diagnosis().reason
    )
    assert harness.pool.layouts.current.same_placement(ran)
    odd.layout = ran
    harness.hello(odd.reconnecting())
    assert harness.pool.diagnosis().health is Health.SERVING


async def test_averages_and_the_last_decision_survive(serving_harness, skewed, restart):
    serving_harness.run_traffic(skewed(1), seconds=20)
    known = serving_harness.pool.windows.loads.slow.per_second()
    harness = await restart(serving_harness)
    assert harness.pool.journal.last_decision.sequence == 2
    reconnect(harness)
    assert harness.pool.windows.loads.slow.per_second() == pytest.approx(known)


async def test_a_new_leader_learns_kinds_of_traffic_from_the_average_on(
    serving_harness, skewed, restart
):
    serving_harness.run_traffic(skewed(1), seconds=60)
    (known,) = serving_harness.pool.windows.traffic.kinds
    harness = await restart(serving_harness)
    assert not harness.pool.windows.traffic.kinds
    reconnect(harness)
    harness.run_traffic(skewed(1), seconds=10)
    (kind,) = harness.pool.windows.traffic.kinds
    assert kind.average.shares == pytest.approx(known.average.shares, abs=0.01)
    assert kind.average.samples > 0.8 * known.average.samples, "more than a window's"


async def test_assignments_counted_before_the_restart_are_no_load_of_the_first_window(
    serving_harness, skewed, restart
):
    serving_harness.run_traffic(skewed(1), seconds=30)
    harness = await restart(serving_harness)
    reconnect(harness)
    harness.run_traffic(skewed(1), seconds=10)
    # The first report of each rank is the baseline, so nine seconds of ten are measured.
    assert harness.pool.windows.closed[-1].assignments == pytest.approx(3 * 9 * 10_000, rel=0.01)


async def test_last_counters_of_a_generation_before_the_restart_are_no_fault(
    serving_harness, skewed, restart
):
    serving_harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    old_reports = [worker.report() for worker in serving_harness.ranks]
    serving_harness.carry_out_rollout()
    harness = await restart(serving_harness)
    reconnect(harness)
    for worker, report in zip(harness.ranks, old_reports, strict=True):
        assert report.load.generation < worker.layout.generation
        harness.say(worker, report)
    harness.run_traffic(skewed(1), seconds=10)
    assert harness.pool.windows.closed[-1].assignments == pytest.approx(3 * 9 * 10_000, rel=0.01)


async def test_staging_that_was_cut_short_is_aborted(serving_harness, skewed, restart):
    serving_harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    harness = await restart(serving_harness)
    harness.ranks[0].staged, kept = None, harness.ranks[0].staged
    reconnect(harness)
    assert kept.layout.generation == 2
    for worker in harness.ranks:
        assert {abort.generation for abort in harness.sent_to(worker.hello.worker, Abort)} == {2}
        assert worker.staged is None
    harness.run_traffic(skewed(1), seconds=10)
    assert harness.pool.layouts.committed.generation == 3, "2 was used and is not used again"


async def test_a_layout_proposed_for_other_ranks_is_not_resumed(
    serving_harness, make_harness, restart
):
    # The balancer was cut off while it opened an epoch of more ranks, which never served.
    larger = make_harness(num_ranks=8)
    larger.assemble()
    more = larger.ranks[0].layout
    layout = more.with_placement(more.expert_of_slot, generation=2)
    serving_harness.writes.append(WriteProposed(layout=layout))
    harness = await restart(serving_harness)
    assert harness.pool.layouts.proposed.num_ranks == 8
    reconnect(harness)
    assert harness.pool.diagnosis().health is Health.SERVING
    assert harness.pool.layouts.committed.generation == 1
    assert harness.pool.rollouts.latest is None
    assert harness.pool.rollouts.moves == 0, "as status and metrics show them"


async def test_a_generation_that_all_have_staged_continues(serving_harness, skewed, restart):
    serving_harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    harness = await restart(serving_harness)
    reconnect(harness)
    for worker in harness.ranks:
        assert harness.sent_to(worker.hello.worker, Abort) == []
        harness.say(worker, worker.switch(step=99))
    assert harness.pool.layouts.committed.generation == 2


async def test_a_switch_that_was_not_committed_is(serving_harness, skewed, restart):
    serving_harness.run_traffic(skewed(1), seconds=10)
    harness = await restart(serving_harness, forget=WriteCommitted)
    assert harness.pool.layouts.committed.generation == 1
    reconnect(harness)
    assert harness.pool.layouts.committed.generation == 2
    assert harness.pool.rollouts.current is None
    assert harness.pool.diagnosis().health is Health.SERVING


async def test_a_switch_that_some_ranks_have_yet_to_tell_is_waited_for(
    serving_harness, skewed, restart
):
    serving_harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    harness = await restart(serving_harness)
    early, late = harness.ranks[:2], harness.ranks[2:]
    for worker in early:
        worker.switch(step=99)
    reconnect(harness)
    assert harness.pool.layouts.stored_generation == 1
    for worker in late:
        harness.say(worker, worker.switch(step=99))
    assert harness.pool.layouts.stored_generation == 2


async def test_a_balancer_without_its_file_learns_the_pool_from_its_ranks(
    serving_harness, skewed, make_harness
):
    serving_harness.run_traffic(skewed(1), seconds=10)
    harness = make_harness()
    harness.workers = serving_harness.workers
    reconnect(harness)
    assert harness.pool.diagnosis().health is Health.SERVING
    assert harness.pool.roster.epoch == 1
    assert harness.pool.layouts.committed.generation == 2
    harness.run_traffic(skewed(2), seconds=20)
    assert harness.pool.layouts.committed.generation == 3


async def test_a_store_that_went_back_in_time_learns_from_the_ranks_and_reuses_no_number(
    serving_harness, restart, skewed
):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=10)
    older = list(harness.writes)
    harness.run_traffic(skewed(2), seconds=30)
    running = harness.ranks[0].layout
    harness.writes = older
    successor = await restart(harness)
    assert successor.pool.layouts.next_generation <= running.generation, "it forgot that much"
    reconnect(successor)
    adopted = [write.layout for write in successor.writes if isinstance(write, WriteAdopted)]
    assert [layout.generation for layout in adopted] == [running.generation]
    assert adopted[0].same_placement(running)
    successor.run_traffic(skewed(3), seconds=30)
    staged = [message.layout.generation for message in successor.sent_to("worker-0", Stage)]
    assert staged
    assert min(staged) > running.generation


async def test_a_fleet_that_restarted_with_its_balancer_starts_in_the_committed_layout(
    serving_harness, skewed, restart
):
    serving_harness.run_traffic(skewed(1), seconds=10)
    committed = serving_harness.pool.layouts.committed
    assert committed.generation == 2
    harness = await restart(serving_harness)
    for worker in harness.workers.values():
        worker.join_epoch = None
    harness.assemble()
    for worker in harness.ranks:
        assert worker.epoch > 1, "numbers are not used again"
        assert worker.layout.generation > 2, "nor for the same layout: it may not be the latest"
        assert worker.layout.same_placement(committed)


async def test_a_fleet_of_another_shape_starts_over_with_a_higher_number(
    serving_harness, restart, make_harness
):
    harness = await restart(serving_harness)
    harness.workers = make_harness(num_ranks=8).workers
    harness.assemble()
    assert len(harness.ranks) == 8
    assert harness.ranks[0].layout.generation > 1
    assert harness.ranks[0].layout.num_ranks == 8
