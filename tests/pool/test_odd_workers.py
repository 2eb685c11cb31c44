"""Before a pool's first epoch most workers decide what it is, whoever comes first."""

from dataclasses import replace

import pytest

from equipoise.planning.phase import Phase
from equipoise.planning.topology import ModelShape
from equipoise.pool.health import Health
from equipoise.pool.hello_checks import RejectedWorkerError, SharedBackends
from equipoise.pool.odd_workers import MAX_KINDS, odd_workers
from equipoise.wire.balancer_messages import Rejection
from equipoise.wire.messages import GroupLost
from tests.support.deaths import die, lost, with_spare_slots
from tests.support.pool_harness import POLICY

START_S = int(POLICY.start_timeout_s)
GOOD = ("gemm=triton|reference", "permute=triton")

ODD = {
    "slots": ({"slots_per_rank": 13}, "slots per rank is 13, but 3 workers of the pool have 12"),
    "model": (
        {"model": ModelShape(num_layers=4, num_experts=32, num_groups=8, expert_bytes=1000)},
        "num_layers=4",
    ),
    "kernels": (
        {"kernels": "odd", "backends": ("gemm=odd", "permute=triton")},
        "computes with odd, and no backend of gemm is available to it and 3 workers",
    ),
    "phase": ({"phase": Phase.DECODE}, "phase is decode, but 3 workers of the pool have mixed"),
}


@pytest.fixture
def harness(make_harness):
    harness = with_spare_slots(make_harness())
    for worker in harness.workers.values():
        worker.hello = replace(worker.hello, backends=GOOD)
    return harness


def make_odd(harness, name, what):
    changes, reason = ODD[what]
    worker = harness.workers[name]
    worker.hello = replace(worker.hello, **changes)
    return worker, reason


def live(harness, *, seconds):
    for _ in range(seconds):
        for worker in harness.workers.values():
            if worker.hello.worker in harness.pool.roster.members:
                harness.say(worker, worker.heartbeat())
        harness.tick(seconds=1.0)
        for member in harness.pool.roster.seated():
            worker = harness.workers.get(member.name)
            if worker and worker.join_epoch and worker.epoch == harness.pool.roster.epoch:
                harness.say(worker, worker.serving())


def seated(harness):
    return sorted(member.name for member in harness.pool.roster.seated())


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("what", ODD)
def test_the_odd_one_of_four_keeps_no_other_out_whenever_it_comes(harness, what, place):
    odd, reason = make_odd(harness, "worker-0", what)
    hellos = [harness.workers[f"worker-{number}"].hello for number in (1, 2, 3)]
    hellos.insert(place, odd.hello)
    for hello in hellos:
        harness.hello(hello)
    live(harness, seconds=START_S + 2)
    assert seated(harness) == ["worker-1", "worker-2", "worker-3"]
    assert harness.pool.agreement.is_settled
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DEGRADED
    assert "worker-0 is quarantined: " in diagnosis.reason
    assert reason in diagnosis.reason
    (rejection,) = harness.sent_to("worker-0", Rejection)
    assert not rejection.fatal


def test_two_against_two_open_nothing_and_say_why(harness):
    for name in ("worker-0", "worker-1"):
        make_odd(harness, name, "slots")
    harness.assemble()
    live(harness, seconds=START_S + 2)
    assert harness.pool.roster.epoch == 0
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.WAITING
    assert "none of them the majority" in diagnosis.reason
    odd = harness.workers["worker-0"]
    harness.lose(odd)
    odd.hello = replace(odd.hello, slots_per_rank=12, boot_id="boot-2")
    harness.hello(odd.hello)
    live(harness, seconds=START_S + 2)
    assert seated(harness) == ["worker-0", "worker-2", "worker-3"]


def test_once_the_epoch_is_open_a_worker_of_another_shape_is_rejected(harness, hello_of):
    harness.serve()
    for changes, _ in ODD.values():
        hello = replace(harness.workers["worker-0"].hello, worker="worker-9", **changes)
        with pytest.raises(RejectedWorkerError):
            harness.hello(hello)


def test_an_odd_worker_that_stays_keeps_no_newcomer_out(harness, worker_of):
    make_odd(harness, "worker-0", "kernels")
    harness.assemble()
    live(harness, seconds=START_S + 2)
    newcomer = replace(harness.workers["worker-1"].hello, worker="worker-5")
    harness.workers["worker-5"] = worker_of(newcomer)
    harness.hello(newcomer)
    live(harness, seconds=3)
    assert seated(harness) == ["worker-1", "worker-2", "worker-3", "worker-5"]


@pytest.mark.parametrize("place", range(5))
def test_after_a_change_of_leader_a_worker_of_another_shape_keeps_no_rank_out(
    harness, make_harness, worker_of, place
):
    harness.serve()
    after = make_harness()
    after.workers, after.now = harness.workers, harness.now + 5.0
    odd = replace(harness.workers["worker-0"].hello, worker="worker-9", slots_per_rank=32)
    odd = replace(odd, num_ranks=1, group_lost=GroupLost(epoch=9, reason="x", expert_of_slot=None))
    hellos = [worker.reconnecting() for worker in harness.ranks]
    hellos.insert(place, odd)
    after.workers["worker-9"] = worker_of(odd)
    for hello in hellos:
        after.hello(hello)
    assert seated(after) == [f"worker-{number}" for number in range(4)]
    assert after.pool.roster.epoch == 1
    assert after.pool.layouts.committed.generation == 1
    assert "worker-9" in after.pool.diagnosis().reason


def test_without_ranks_the_majority_of_those_that_remain_decides(harness):
    """Three of four restart with other slots: the one that was a rank does not bar them."""
    harness.serve()
    old = harness.workers["worker-0"]
    for number in (1, 2, 3):
        worker = harness.workers[f"worker-{number}"]
        harness.lose(worker)
        worker.hello = replace(worker.hello, slots_per_rank=16, boot_id="boot-2")
    harness.say(old, lost(old))
    for number in (1, 2, 3):
        harness.hello(harness.workers[f"worker-{number}"].hello)
    live(harness, seconds=START_S + 2)
    assert seated(harness) == ["worker-1", "worker-2", "worker-3"]


def test_the_odd_one_does_not_get_the_pool_while_all_others_restart(harness):
    odd = harness.workers["worker-3"]
    odd.hello = replace(odd.hello, slots_per_rank=32)
    harness.assemble()
    live(harness, seconds=START_S + 2)
    good = [harness.workers[f"worker-{number}"] for number in range(3)]
    assert seated(harness) == [worker.hello.worker for worker in good]
    for worker in good:
        harness.lose(worker)
    live(harness, seconds=START_S - 1)
    for worker in good:
        worker.hello = replace(worker.hello, boot_id="boot-2")
        harness.hello(worker.hello)
    live(harness, seconds=START_S + 2)
    assert seated(harness) == [worker.hello.worker for worker in good]


def test_the_odd_one_gets_a_pool_that_all_others_have_left(harness):
    odd = harness.workers["worker-3"]
    odd.hello = replace(odd.hello, slots_per_rank=32)
    harness.assemble()
    live(harness, seconds=START_S + 2)
    for number in range(3):
        harness.lose(harness.workers[f"worker-{number}"])
    live(harness, seconds=START_S + 2)
    assert seated(harness) == ["worker-3"]


def test_the_worker_that_expects_another_number_of_ranks_is_named(harness):
    """It may be right, as when a pool grows worker by worker, so it is not quarantined."""
    odd = harness.workers["worker-2"]
    odd.hello = replace(odd.hello, num_ranks=2**16)
    harness.assemble()
    named = (
        "1 of 4 workers (worker-2) expect 65536 ranks, the others 4 at most: start all workers "
        "with the same --num-ranks"
    )
    waiting = harness.pool.diagnosis()
    assert (waiting.health, named in waiting.reason) == (Health.WAITING, True)
    live(harness, seconds=START_S + 2)
    diagnosis = harness.pool.diagnosis()
    assert (diagnosis.health, named in diagnosis.reason) == (Health.DEGRADED, True)
    harness.lose(odd)
    assert "workers (" not in harness.pool.diagnosis().reason


def many_kinds(harness, hello_of, number):
    """As many workers as `number`, each with other kernels, that all share a backend."""
    for place in range(number):
        name = f"of-{place:04d}"
        backends = (f"gemm=common|own-{place}", "permute=triton")
        harness.hello(hello_of(name, num_ranks=number + 1, slots_per_rank=12, backends=backends))


def test_an_odd_worker_does_not_decide_whether_the_last_rank_has_room_for_all_experts(harness):
    # One worker of its 40 slots could hold all 32 experts; one of the others cannot.
    odd = harness.workers["worker-0"]
    odd.hello = replace(odd.hello, slots_per_rank=40)
    for worker in harness.workers.values():
        harness.hello(worker.hello)
    live(harness, seconds=START_S + 2)
    last, *others = (harness.workers[f"worker-{number}"] for number in (1, 2, 3))
    epoch = harness.pool.roster.epoch
    die(harness, *others)
    harness.say(last, lost(last))
    live(harness, seconds=30)
    assert harness.pool.roster.epoch == epoch
    assert harness.pool.diagnosis().health is Health.DOWN
    assert (
        "12 slots cannot hold 32 experts: 3 workers are needed" in harness.pool.diagnosis().reason
    )


def test_workers_whose_kernels_all_differ_are_compared_once_each_and_no_further_than_a_few(
    make_harness, hello_of, monkeypatch
):
    joined = []
    join = SharedBackends.join
    monkeypatch.setattr(
        SharedBackends, "join", lambda shared, one: joined.append(one) or join(shared, one)
    )
    for number in (MAX_KINDS, 3 * MAX_KINDS):
        harness = make_harness()
        many_kinds(harness, hello_of, number)
        joined.clear()
        odd = odd_workers(harness.pool.roster)
        assert len(joined) == MAX_KINDS
        assert len(odd) == number - MAX_KINDS
    assert "16 other sets of kernels are as common" in odd[f"of-{number - 1:04d}"].reason


@pytest.mark.parametrize(
    ("backends", "operation"),
    [
        ((), None),
        (("gemm=a|b",), None),
        (("gemm=a|b", "gemm=b|c", "gemm=b"), None),
        (("gemm=a|b", "gemm=b|c", "gemm=a|c"), "gemm"),
        (("gemm=a", "permute=a"), "gemm"),
        (("gemm=a permute=b", "gemm=a permute=c"), "permute"),
        (("gemm=a permute=b", "gemm=c permute=c"), "gemm"),
    ],
)
def test_workers_share_their_kernels_if_one_backend_of_each_operation_is_left(backends, operation):
    shared = SharedBackends()
    found = [shared.join(tuple(one.split())) for one in backends]
    assert (found[-1] if found else None) == operation
    assert not any(found[:-1])
