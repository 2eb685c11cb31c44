"""What a pool keeps of Hellos, and how much of it."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from equipoise.planning.layout import Layout
from equipoise.planning.topology import ModelShape
from equipoise.pool import room
from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.pool.member import bytes_of
from equipoise.wire import checks
from equipoise.wire.balancer_messages import JoinEpoch
from equipoise.wire.checks import MAX_RANKS
from equipoise.wire.convert import from_balancer, to_worker
from equipoise.wire.messages import GroupLost, RunningState


def claiming(worker, *, swapped=0, **changes):
    """The Hello of a worker that runs an epoch which the balancer did not open."""
    hello = worker.reconnecting()
    layout = hello.running.layout
    table = layout.expert_of_slot.copy()
    table[0, [0, swapped]] = table[0, [swapped, 0]]
    own = layout.with_placement(table, generation=layout.generation)
    return replace(hello, running=replace(hello.running, layout=own), **changes)


@pytest.fixture
def restarted(serving_harness, make_harness):
    """A balancer that knows nothing of the workers that run; gives both."""
    return make_harness(), list(serving_harness.workers.values())


def kept(harness):
    return {name: one.hello for name, one in harness.pool.roster.members.items()}


def test_of_a_hello_names_and_numbers_stay_and_no_tables(restarted):
    harness, workers = restarted
    harness.hello(claiming(workers[0]))
    held = np.zeros((3, 10), np.int32)
    lost = GroupLost(epoch=1, reason="a rank died", expert_of_slot=held)
    harness.hello(replace(workers[1].hello, group_lost=lost))
    assert {(one.running, one.group_lost) for one in kept(harness).values()} == {(None, None)}


def test_workers_that_run_the_same_share_one_layout(restarted):
    harness, workers = restarted
    for worker in workers[:3]:
        harness.hello(claiming(worker))
    members = harness.pool.roster.members.values()
    assert len({id(one.claim.layout) for one in members}) == 1
    assert len({id(one.claim.workers) for one in members}) == 1


def test_a_pool_is_full_when_its_workers_report_too_much_and_has_room_when_they_leave(
    restarted, monkeypatch
):
    harness, workers = restarted
    first, second, *_ = workers
    harness.hello(claiming(first))
    monkeypatch.setattr(room, "MAX_BYTES", 11_000)
    with pytest.raises(RejectedWorkerError, match=r"pool tiny.*worker-\d|report would") as caught:
        harness.hello(claiming(second, swapped=1))
    assert caught.value.kind == room.POOL_FULL
    assert second.hello.worker in str(caught.value)
    assert second.hello.worker not in kept(harness)
    harness.hello(claiming(first))  # It replaces itself.
    harness.lose(first)
    harness.hello(claiming(second, swapped=1))


def test_names_count_with_the_width_of_their_characters(make_harness, hello_of, monkeypatch):
    monkeypatch.setattr(room, "MAX_BYTES", 1 << 20)
    harness = make_harness()
    wide = tuple(f"{number:02}={'a' * 246}😀" for number in range(64))
    most = room.MAX_BYTES // bytes_of(hello_of("worker-0", num_ranks=MAX_RANKS, backends=wide))
    assert 10 < most <= room.MAX_BYTES // sum(map(sys.getsizeof, wide))
    for number in range(most):
        harness.hello(hello_of(f"worker-{number}", num_ranks=MAX_RANKS, backends=wide))
    with pytest.raises(RejectedWorkerError, match="report would take 1 MiB") as full:
        harness.hello(hello_of("one-more", num_ranks=MAX_RANKS, backends=wide))
    assert full.value.kind == room.POOL_FULL


def test_as_many_workers_as_a_pool_may_have_fit_with_the_names_of_a_large_fleet(hello_of):
    name = ".".join(["worker-0", "n" * 63, "n" * 63, "n" * 63, "n" * 50])
    texts = ("host", "zone", "device", "kernels", "latent_form", "rendezvous_address", "address")
    backends = tuple(f"operation_{number}=triton|reference|torch" for number in range(10))
    hello = hello_of(name, node=name, backends=backends, **dict.fromkeys(texts, name))
    assert MAX_RANKS * bytes_of(hello) < room.MAX_BYTES


def test_a_pool_has_a_limited_number_of_workers(restarted, monkeypatch):
    harness, workers = restarted
    monkeypatch.setattr(room, "MAX_RANKS", 2)
    harness.hello(workers[0].hello)
    harness.hello(workers[1].hello)
    with pytest.raises(RejectedWorkerError, match="has 2 workers, the most that a pool may have"):
        harness.hello(workers[2].hello)
    harness.hello(workers[1].hello)


def test_a_pool_grows_up_to_the_largest_layout_that_its_ranks_accept(
    serving_harness, worker_of, hello_of, monkeypatch
):
    harness, most = serving_harness, 6 * 3 * 10
    for module in (room, checks):
        monkeypatch.setattr(module, "MAX_CELLS", most)
    workers = [worker_of(hello_of(f"worker-{number}")) for number in range(4, 7)]
    harness.workers |= {worker.hello.worker: worker for worker in workers}
    *some, last = workers
    for worker in some:
        harness.hello(worker.hello)
    with pytest.raises(RejectedWorkerError, match=r"3 layers x 10 slots.*than the 180 slots") as no:
        harness.hello(last.hello)
    assert no.value.kind == room.POOL_FULL
    harness.tick(1.0)
    del harness.workers[last.hello.worker]
    for worker in harness.ranks:
        (*_, join) = harness.sent_to(worker.hello.worker, JoinEpoch)
        assert from_balancer(to_worker(join), hello=worker.hello).layout.num_ranks == 6
    for worker in harness.ranks:
        harness.say(worker, worker.serving())
    harness.lose(some[0])
    with pytest.raises(RejectedWorkerError, match="has 6 workers with"):
        harness.hello(last.hello)  # The one that is gone may return with what it runs.
    harness.hello(some[0].reconnecting())  # It is a rank again, and not one worker more.
    assert harness.pool.roster.complete
    harness.lose(some[0])
    for worker in [one for one in harness.ranks if one is not some[0]]:
        held = worker.own(worker.layout.expert_of_slot)
        harness.say(worker, GroupLost(epoch=worker.epoch, reason="broke", expert_of_slot=held))
    assert harness.pool.roster.num_ranks == 5
    harness.hello(last.hello)


@pytest.fixture
def large_claim(hello_of):
    """The Hello of a worker that runs a layout of its own, with as many slots as there may be."""

    def build(number):
        workers = (f"w-{number}", *(f"other-{rank}" for rank in range(7)))
        table = np.arange(2**18, dtype=np.int32)[None, :] % 8
        table[0, [8 * number, 8 * number + 1]] = 1, 0
        running = RunningState(
            epoch=1 + number,
            rank=0,
            workers=workers,
            staged_generation=0,
            layout=Layout(generation=1, num_experts=8, num_ranks=8, expert_of_slot=table),
            checksums=np.zeros((1, 2**15, 16), np.uint8),
        )
        model = ModelShape(num_layers=1, num_experts=8, num_groups=1, expert_bytes=1)
        return hello_of(workers[0], model=model, slots_per_rank=2**15, num_ranks=8, running=running)

    return build


def test_large_hellos_take_a_bounded_amount_of_memory(make_harness, large_claim, monkeypatch):
    monkeypatch.setattr(room, "MAX_BYTES", 8 << 20)
    harness, num_rejected = make_harness(), 0
    for number in range(30):
        try:
            harness.hello(large_claim(number))
        except RejectedWorkerError:
            num_rejected += 1
    members = harness.pool.roster.members.values()
    assert len(members) == 30 - num_rejected > 1
    tables = [
        table
        for one in members
        for table in (one.claim.layout.expert_of_slot, one.claim.checksums, one.held)
    ]
    assert sum(table.nbytes for table in tables) <= room.MAX_BYTES
    assert all(one.held.base is None for one in members), "it keeps no other table in memory"
