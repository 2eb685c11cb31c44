"""Deaths of a harness's workers, what survivors report, and workers that replace the dead."""

import re
from dataclasses import replace

from equipoise.pool.effects import WriteMembership
from equipoise.pool.health import Health
from equipoise.wire.messages import GroupLost


def with_spare_slots(harness):
    """Its workers have 12 slots, so that three of them hold the 32 experts."""
    for worker in harness.workers.values():
        worker.hello = replace(worker.hello, slots_per_rank=12)
    return harness


def lost(worker, reason="a peer rank failed or hangs"):
    """The message of a worker whose group ended."""
    return GroupLost(
        epoch=worker.epoch, reason=reason, expert_of_slot=worker.own(worker.layout.expert_of_slot)
    )


def die(harness, *victims):
    """Processes end: their streams too, and what they held is gone."""
    for victim in victims:
        harness.lose(victim, reason="its stream was cut")
        harness.disconnected.add(victim.hello.worker)
        del harness.workers[victim.hello.worker]


def notice(harness, *workers):
    for worker in workers:
        harness.say(worker, lost(worker))


def serve_all(harness):
    for worker in harness.ranks:
        harness.say(worker, worker.serving())


def trouble(pool):
    """What is wrong with a pool, other than that some of its workers are dead."""
    diagnosis = pool.diagnosis()
    if diagnosis.health is Health.DEGRADED and re.fullmatch(
        r"\d+ of \d+ ranks(: start \d+ more workers?, or restart .*)?", diagnosis.reason
    ):
        return ""
    return diagnosis.reason


def names(harness):
    return [worker.hello.worker for worker in harness.ranks]


def come(harness, worker_of, hello):
    """A new process says hello."""
    harness.workers[hello.worker] = worker_of(hello)
    harness.disconnected.discard(hello.worker)
    harness.hello(hello)


def epochs_written(harness):
    return [write.members.epoch for write in harness.writes if isinstance(write, WriteMembership)]


def check(harness):
    """What must hold at any time of workers that have joined an epoch."""
    ranks = harness.ranks
    assert [worker.rank for worker in ranks] == list(range(len(ranks)))
    (epoch,) = {worker.epoch for worker in ranks}
    (generation,) = {worker.layout.generation for worker in ranks}
    assert harness.pool.roster.epoch == epoch
    assert harness.pool.layouts.stored_generation == generation
    assert epochs_written(harness) == sorted(set(epochs_written(harness)))
    (table,) = {worker.layout.expert_of_slot.tobytes() for worker in ranks}
    assert table
    nodes = [worker.hello.node for worker in ranks]
    assert nodes == sorted(nodes), "ranks of a node are contiguous"
