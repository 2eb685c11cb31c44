"""Two processes with one worker's name, one after the other: the rank belongs to one of them."""

from dataclasses import replace

import pytest

from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.pool.records import EpochMembers, PoolMemory
from tests.support.deaths import trouble
from tests.support.joining_workers import Fleet, JoiningWorker, memory_of

NAME = "worker-1"

AN_OUTAGE_S = 30


@pytest.fixture
def fleet(make_harness):
    fleet = Fleet(make_harness)
    fleet.live(seconds=1)
    assert fleet.harness.pool.roster.complete
    return fleet


def visit(fleet):
    """Another process of that name comes while the rank's stream is broken, and leaves again."""
    fleet.cut(NAME)
    fleet.harness.hello(replace(fleet.workers[NAME].hello, boot_id="another"))
    fleet.harness.lose(fleet.workers[NAME])


@pytest.mark.parametrize("is_found", [False, True], ids=["opened here", "found"])
def test_a_rank_returns_although_another_process_had_its_name_meanwhile(fleet, is_found):
    if is_found:
        fleet.succeed(memory_of(fleet.harness.writes))
        fleet.connect()
        fleet.live(seconds=1)
    visit(fleet)
    assert not fleet.harness.pool.roster.complete
    fleet.connect(NAME)
    fleet.live(seconds=1)
    assert fleet.rejections == []
    assert trouble(fleet.harness.pool) == ""
    assert fleet.harness.pool.roster.complete
    assert fleet.harness.pool.roster.epoch == 1


@pytest.mark.parametrize("kind", ["hello_generation", "hello_layout", "hello_rank_taken"])
def test_what_it_runs_is_checked_then_too(fleet, kind):
    visit(fleet)
    hello = fleet.workers[NAME].reconnecting()
    running, layout = hello.running, hello.running.layout
    mirrored = layout.expert_of_slot[:, ::-1]
    other = {
        "hello_generation": replace(running, layout=replace(layout, generation=2)),
        "hello_layout": replace(running, layout=replace(layout, expert_of_slot=mirrored)),
        "hello_rank_taken": replace(running, rank=0),
    }[kind]
    with pytest.raises(RejectedWorkerError) as rejected:
        fleet.harness.hello(replace(hello, running=other))
    assert rejected.value.kind == kind


def test_a_process_does_not_take_up_the_rank_of_another_one_of_its_name(fleet):
    """One whose group ended long ago: it would be late for a rank assigned before it came."""
    former = fleet.workers[NAME]
    fleet.cut(NAME)
    fleet.workers[NAME] = JoiningWorker(replace(former.hello, boot_id="another"))
    fleet.connect(NAME)
    fleet.live(seconds=fleet.harness.pool.policy.values.join_timeout_s + AN_OUTAGE_S)
    assert fleet.harness.pool.roster.complete
    former.fail("a peer is gone")
    fleet.kill(NAME)
    fleet.workers[NAME] = former
    fleet.connect(NAME)
    fleet.live(seconds=AN_OUTAGE_S)
    assert former.serves
    assert trouble(fleet.harness.pool) == ""
    assert len(fleet.harness.pool.roster.seated()) == 4


def test_a_worker_whose_rank_went_to_a_later_group_is_heard_on_a_new_stream(make_harness):
    """Its earlier stream has not ended yet: it serves in an epoch that no longer counts."""
    harness = make_harness(num_ranks=2)
    later = make_harness(
        num_ranks=3, memory=PoolMemory(members=EpochMembers(epoch=8, workers=("worker-9",)))
    )
    for one in (harness, later):
        for worker in one.workers.values():
            worker.hello = replace(worker.hello, slots_per_rank=16)
    later.workers = {
        f"later-{number}": replace_name(worker, f"later-{number}")
        for number, worker in enumerate(later.workers.values())
    }
    harness.serve()
    later.serve()
    harness.workers |= later.workers
    for worker in later.workers.values():
        harness.hello(worker.reconnecting())
    assert harness.pool.roster.epoch == later.pool.roster.epoch
    harness.hello(replace(harness.workers["worker-0"].reconnecting(), highest_epoch=1))
    assert harness.pool.roster.members["worker-0"].connected


def replace_name(worker, name):
    worker.hello = replace(
        worker.hello, worker=name, address=f"{name}:1", rendezvous_address=f"{name}:2"
    )
    return worker
