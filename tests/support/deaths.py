"""What befalls the workers of a bench: deaths, what survivors say, and who comes in their place."""

from dataclasses import replace

from equipoise.pool.effects import WriteMembership
from equipoise.wire.messages import GroupLost


def with_spare_slots(bench):
    """Its workers have 12 slots, so that three of them hold the 32 experts."""
    for worker in bench.workers.values():
        worker.hello = replace(worker.hello, slots_per_rank=12)
    return bench


def lost(worker, reason="a peer rank failed or hangs"):
    """What a worker says whose group is over."""
    return GroupLost(
        epoch=worker.epoch, reason=reason, expert_of_slot=worker.own(worker.layout.expert_of_slot)
    )


def die(bench, *victims):
    """Processes end: their streams too, and what they held is gone."""
    for victim in victims:
        bench.lose(victim, reason="its stream was cut")
        bench.disconnected.add(victim.hello.worker)
        del bench.workers[victim.hello.worker]


def notice(bench, *workers):
    for worker in workers:
        bench.say(worker, lost(worker))


def serve_all(bench):
    for worker in bench.ranks:
        bench.say(worker, worker.serving())


def names(bench):
    return [worker.hello.worker for worker in bench.ranks]


def come(bench, worker_of, hello):
    """A new process says hello."""
    bench.workers[hello.worker] = worker_of(hello)
    bench.disconnected.discard(hello.worker)
    bench.hello(hello)


def epochs_written(bench):
    return [write.members.epoch for write in bench.writes if isinstance(write, WriteMembership)]


def check(bench):
    """What must hold at any time of workers that were told their place."""
    ranks = bench.ranks
    assert [worker.rank for worker in ranks] == list(range(len(ranks)))
    (epoch,) = {worker.epoch for worker in ranks}
    (generation,) = {worker.layout.generation for worker in ranks}
    assert bench.pool.roster.epoch == epoch
    assert bench.pool.layouts.stored_generation == generation
    assert epochs_written(bench) == sorted(set(epochs_written(bench)))
    (table,) = {worker.layout.expert_of_slot.tobytes() for worker in ranks}
    assert table
    nodes = [worker.hello.node for worker in ranks]
    assert nodes == sorted(nodes), "ranks of a node are contiguous"
