"""How long one turn of the event loop takes for a pool whose workers say what costs most.

The workers of a pool are one identity here: each connects with other kernels, on another node, and
reports what makes the balancer look at all others. Times are CPU times of the longest single call,
so they do not depend on other load; asserted is how they grow with the number of workers.
"""

import time
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from equipoise.planning.topology import ModelShape
from equipoise.wire.messages import GroupLost
from tests.support.pool_harness import PoolHarness
from tests.support.scripted_worker import ScriptedWorker, make_hello

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(900)]

MODEL = ModelShape(num_layers=1, num_experts=8, num_groups=1, expert_bytes=1000)
NUMBERS = (256, 512, 1024)
MOST_GROWTH = 3.0
"""Of the time, when there are twice as many workers."""

LEAST_S = 0.005
"""What takes less is not compared."""


class Stopwatch:
    """Keeps the longest turn of each kind."""

    def __init__(self):
        self.longest_s = defaultdict(float)

    def turn(self, kind, call):
        begin_s = time.thread_time()
        result = call()
        self.longest_s[kind] = max(self.longest_s[kind], time.thread_time() - begin_s)
        return result


def hostile(number, **changes):
    harness = PoolHarness(num_ranks=0)
    for place in range(number):
        name = f"worker-{place:04d}"
        backends = tuple(f"{'x' * 200}-{operation}=common|own-{place}" for operation in range(64))
        hello = make_hello(
            name,
            model=MODEL,
            slots_per_rank=2,
            node=f"node-{place:04d}",
            num_ranks=number,
            backends=backends if place % 2 else (),
            **changes,
        )
        harness.workers[name] = ScriptedWorker(hello)
    return harness


def observed(harness, watch, name=""):
    """Have the controller's turns measured."""
    controller = harness.controller
    for method, kind in (("hello", "Hello"), ("message", ""), ("lost", "leave"), ("tick", "tick")):
        call = getattr(controller, method)

        def timed(*args, _call=call, _kind=kind, **about):
            kind = name + (_kind or type(args[1]).__name__)
            return watch.turn(kind, lambda: _call(*args, **about))

        setattr(controller, method, timed)
    return harness


def lost(worker, others):
    zeros = np.zeros((1, worker.hello.slots_per_rank), dtype=np.int32)
    return GroupLost(
        epoch=worker.epoch, reason="x", expert_of_slot=zeros, generation=1, unreached=others
    )


def wait(harness, *, seconds):
    """Time passes, and all workers are heard."""
    harness.now += seconds
    for worker in harness.workers.values():
        harness.say(worker, worker.heartbeat())
    harness.tick()


def play(number):
    """Everything that such workers can say, in one life of a pool."""
    watch = Stopwatch()
    harness = observed(hostile(number), watch)
    workers = list(harness.workers.values())
    harness.assemble()
    wait(harness, seconds=61.0)
    seated = [worker for worker in workers if worker.join_epoch is not None]
    assert len(seated) > number // 2
    for worker in seated:
        harness.say(worker, worker.serving())
    names = tuple(worker.hello.worker for worker in seated)
    for worker in seated:
        others = tuple(name for name in names if name != worker.hello.worker)
        harness.say(worker, lost(worker, others))
    wait(harness, seconds=6.0)
    assert harness.pool.roster.epoch > 1
    for worker in seated[::2]:
        harness.say(worker, worker.serving())
    wait(harness, seconds=601.0)
    assert harness.pool.roster.epoch > 2
    after = observed(PoolHarness(num_ranks=0), watch, "found, ")
    after.workers, after.now = harness.workers, harness.now
    for place, worker in enumerate(seated):
        workers_of = tuple(peer.worker for peer in worker.join_epoch.peers)
        hello = worker.reconnecting()
        if place % 2:
            other = replace(hello.running, epoch=hello.running.epoch + 1, workers=workers_of)
            hello = replace(hello, running=other)
        after.hello(hello)
    after.tick(seconds=6.0)
    for worker in seated:
        after.lose(worker)
    return watch.longest_s


def test_the_longest_turn_grows_no_faster_than_the_pool(capsys):
    play(16)
    of_number = {number: play(number) for number in NUMBERS}
    kinds = sorted(of_number[NUMBERS[-1]])
    with capsys.disabled():
        print("\nlongest turn in ms, by number of workers:", *NUMBERS)
        for kind in kinds:
            times = [1e3 * of_number[number][kind] for number in NUMBERS]
            print(f"  {kind:24}", *(f"{one:8.1f}" for one in times))
    for fewer, more in pairwise(NUMBERS):
        for kind in kinds:
            least_s = max(of_number[fewer][kind], LEAST_S)
            assert of_number[more][kind] <= MOST_GROWTH * least_s, (kind, fewer, more)
