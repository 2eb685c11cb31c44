"""A rank whose process dies or hangs delays the others for a bounded time."""

import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from equipoise.engines.lockstep import Lockstep, LockstepError
from tests.engines.seats import Ranks
from tests.support.forking import forking

TABLE = [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, 0]]
TIMEOUT_S = 2.0
BOUND_S = 120.0


def run_rank(rank, folder, pipe):
    """Take passes until balancing stops, and fifty more; then say what happened."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ranks = Ranks(
        TABLE,
        num_experts=4,
        lockstep_of=lambda one: Lockstep(
            dist.group.WORLD, rank=one, num_ranks=2, timeout_s=TIMEOUT_S
        ),
    )
    seat = ranks.seats[rank]
    longest_s, is_ready, after = 0.0, False, 0
    while after < 50:
        began_s = time.perf_counter()
        try:
            seat.on_step()
        except LockstepError as error:
            pipe.send(("ended", str(error), time.perf_counter() - began_s))
            break
        longest_s = max(longest_s, time.perf_counter() - began_s)
        after += bool(seat.stopped)
        if seat.is_ready and not is_ready:
            is_ready, longest_s = True, 0.0
            pipe.send("ready")
        if pipe.poll():
            pipe.recv()
            base = seat.held.contents
            same = base.layout.with_placement(
                base.layout.expert_of_slot, generation=seat.generation + 1
            )
            assert seat.offer(seat.held.prepare(base, base.changed(same, {}), {}))
        time.sleep(0.005)
    else:
        pipe.send(("stopped", seat.stopped, longest_s))
    os._exit(0)


def give_up(rank, folder, pipe):
    """Wait for a peer that starts no collective; then end the group, as a process that exits."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    lockstep = Lockstep(dist.group.WORLD, rank=rank, num_ranks=2, timeout_s=TIMEOUT_S)
    pipe.send("ready")
    if rank == 1:
        time.sleep(BOUND_S)
    with pytest.raises(LockstepError):
        lockstep.gather(torch.zeros(1)).result()
    del lockstep
    dist.destroy_process_group()
    gc.collect()
    pipe.send("ended")
    os._exit(0)


@pytest.fixture
def processes(tmp_path, request):
    context = forking()
    pairs = [context.Pipe() for _ in range(2)]
    target = getattr(request, "param", run_rank)
    found = [
        context.Process(target=target, args=(rank, str(tmp_path), pairs[rank][1]))
        for rank in range(2)
    ]
    for one in found:
        one.start()
    for ours, _ in pairs:
        assert ours.poll(BOUND_S)
        assert ours.recv() == "ready"
    yield found, [ours for ours, _ in pairs]
    for one in found:
        one.kill()
        one.join()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (signal.SIGKILL, "a rank is gone"),
        (signal.SIGSTOP, f"not all ranks answered within {TIMEOUT_S:g} s"),
    ],
)
def test_a_lost_rank_stops_balancing_and_passes_go_on(processes, fault, reason):
    found, pipes = processes
    os.kill(found[1].pid, fault)
    assert pipes[0].poll(BOUND_S)
    what, told, longest_s = pipes[0].recv()
    assert what == "stopped"
    assert reason in told
    assert longest_s < TIMEOUT_S + 3.0


def test_a_rank_that_hangs_when_ranks_may_have_agreed_ends_the_engine(processes):
    found, pipes = processes
    pipes[0].send("stage")
    time.sleep(0.5)
    os.kill(found[1].pid, signal.SIGSTOP)
    assert pipes[0].poll(BOUND_S)
    what, reason, waited_s = pipes[0].recv()
    assert what == "ended"
    assert "not all ranks answered" in reason
    assert waited_s < TIMEOUT_S + 3.0


@pytest.mark.parametrize("processes", [give_up], indirect=True)
def test_a_rank_whose_peer_never_took_part_can_exit(processes):
    _, pipes = processes
    assert pipes[0].poll(10 * TIMEOUT_S)
    assert pipes[0].recv() == "ended"
