"""A balancer that ended anywhere, and the next one that finds its file and the ranks."""

import pytest

from equipoise.balancer.persistence import recall
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
from equipoise.wire.messages import Abort, JoinEpoch, Stage


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
def restart(tmp_path, make_bench):
    """Ends a bench's balancer; gives the bench of its successor, with the same workers."""

    async def restarted(bench, *, forget=()):
        store = SqliteStore(tmp_path / "state.sqlite")
        for write in bench.writes:
            if not isinstance(write, forget):
                await put(store, write)
        await store.close()
        reopened = SqliteStore(tmp_path / "state.sqlite")
        memory = await recall(reopened, "tiny")
        await reopened.close()
        successor = make_bench(memory=memory)
        successor.now = bench.now + 5.0
        successor.workers = bench.workers
        return successor

    return restarted


def reconnect(bench):
    for worker in bench.ranks:
        bench.hello(worker.reconnecting())


async def test_ranks_that_served_on_are_taken_as_they_are(serving_bench, skewed, restart):
    serving_bench.run_traffic(skewed(1), seconds=10)
    bench = await restart(serving_bench)
    reconnect(bench)
    assert bench.pool.diagnosis().health is Health.SERVING
    assert bench.pool.roster.epoch == 1
    assert bench.pool.layouts.committed.generation == 2
    for name in bench.workers:
        (join_epoch,) = bench.sent_to(name, JoinEpoch)
        assert join_epoch.layout.generation == 2


async def test_averages_and_the_last_decision_survive(serving_bench, skewed, restart):
    serving_bench.run_traffic(skewed(1), seconds=20)
    known = serving_bench.pool.windows.loads.slow.per_second()
    bench = await restart(serving_bench)
    assert bench.pool.journal.last_decision.sequence == 2
    reconnect(bench)
    assert bench.pool.windows.loads.slow.per_second() == pytest.approx(known)


async def test_assignments_counted_before_the_restart_are_no_load_of_the_first_window(
    serving_bench, skewed, restart
):
    serving_bench.run_traffic(skewed(1), seconds=30)
    bench = await restart(serving_bench)
    reconnect(bench)
    bench.run_traffic(skewed(1), seconds=10)
    # The first report of each rank is the baseline, so nine seconds of ten are measured.
    assert bench.pool.windows.closed[-1].assignments == pytest.approx(3 * 9 * 10_000, rel=0.01)


async def test_last_counters_of_a_generation_before_the_restart_are_no_fault(
    serving_bench, skewed, restart
):
    serving_bench.run_traffic(skewed(1), seconds=10, carry_out=False)
    old_reports = [worker.report() for worker in serving_bench.ranks]
    serving_bench.carry_out_rollout()
    bench = await restart(serving_bench)
    reconnect(bench)
    for worker, report in zip(bench.ranks, old_reports, strict=True):
        assert report.load.generation < worker.layout.generation
        bench.say(worker, report)
    bench.run_traffic(skewed(1), seconds=10)
    assert bench.pool.windows.closed[-1].assignments == pytest.approx(3 * 9 * 10_000, rel=0.01)


async def test_staging_that_was_cut_short_is_aborted(serving_bench, skewed, restart):
    serving_bench.run_traffic(skewed(1), seconds=10, carry_out=False)
    bench = await restart(serving_bench)
    bench.ranks[0].staged, kept = None, bench.ranks[0].staged
    reconnect(bench)
    assert kept.layout.generation == 2
    for worker in bench.ranks:
        assert {abort.generation for abort in bench.sent_to(worker.hello.worker, Abort)} == {2}
        assert worker.staged is None
    bench.run_traffic(skewed(1), seconds=10)
    assert bench.pool.layouts.committed.generation == 3, "2 was used and is not used again"


async def test_a_generation_that_all_have_staged_goes_on(serving_bench, skewed, restart):
    serving_bench.run_traffic(skewed(1), seconds=10, carry_out=False)
    bench = await restart(serving_bench)
    reconnect(bench)
    for worker in bench.ranks:
        assert bench.sent_to(worker.hello.worker, Abort) == []
        bench.say(worker, worker.switch(step=99))
    assert bench.pool.layouts.committed.generation == 2


async def test_a_switch_that_was_not_committed_is(serving_bench, skewed, restart):
    serving_bench.run_traffic(skewed(1), seconds=10)
    bench = await restart(serving_bench, forget=WriteCommitted)
    assert bench.pool.layouts.committed.generation == 1
    reconnect(bench)
    assert bench.pool.layouts.committed.generation == 2
    assert bench.pool.rollouts.current is None
    assert bench.pool.diagnosis().health is Health.SERVING


async def test_a_switch_that_some_ranks_have_yet_to_tell_is_waited_for(
    serving_bench, skewed, restart
):
    serving_bench.run_traffic(skewed(1), seconds=10, carry_out=False)
    bench = await restart(serving_bench)
    early, late = bench.ranks[:2], bench.ranks[2:]
    for worker in early:
        worker.switch(step=99)
    reconnect(bench)
    assert bench.pool.layouts.stored_generation == 1
    for worker in late:
        bench.say(worker, worker.switch(step=99))
    assert bench.pool.layouts.stored_generation == 2


async def test_a_balancer_without_its_file_learns_the_pool_from_its_ranks(
    serving_bench, skewed, make_bench
):
    serving_bench.run_traffic(skewed(1), seconds=10)
    bench = make_bench()
    bench.workers = serving_bench.workers
    reconnect(bench)
    assert bench.pool.diagnosis().health is Health.SERVING
    assert bench.pool.roster.epoch == 1
    assert bench.pool.layouts.committed.generation == 2
    bench.run_traffic(skewed(2), seconds=20)
    assert bench.pool.layouts.committed.generation == 3


async def test_a_store_that_went_back_in_time_learns_from_the_ranks_and_reuses_no_number(
    serving_bench, restart, skewed
):
    bench = serving_bench
    bench.run_traffic(skewed(1), seconds=10)
    older = list(bench.writes)
    bench.run_traffic(skewed(2), seconds=30)
    running = bench.ranks[0].layout
    bench.writes = older
    successor = await restart(bench)
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
    serving_bench, skewed, restart
):
    serving_bench.run_traffic(skewed(1), seconds=10)
    bench = await restart(serving_bench)
    for worker in bench.workers.values():
        worker.join_epoch = None
    bench.assemble()
    for worker in bench.ranks:
        assert worker.epoch == 2, "numbers are not used again"
        assert worker.layout.generation == 2


async def test_a_fleet_of_another_shape_starts_anew_with_the_next_number(
    serving_bench, restart, make_bench
):
    bench = await restart(serving_bench)
    bench.workers = make_bench(num_ranks=8).workers
    bench.assemble()
    assert len(bench.ranks) == 8
    assert bench.ranks[0].layout.generation == 2
    assert bench.ranks[0].layout.num_ranks == 8
