"""Every sequence of a few faults around an epoch ends with a pool that serves.

The pool's controllers and the workers' `EpochState` are the product's; `Fleet` carries messages
between them. Faults follow one another at once, or after half a second in which ranks may form.
"""

import pickle
from dataclasses import replace

import pytest

from equipoise.pool.health import Health
from equipoise.pool.hello_checks import UsedNumbers
from equipoise.pool.records import EpochMembers, PoolMemory
from equipoise.worker.epoch_state import EpochState
from tests.model_checking.explorer import MAX_DEPTH
from tests.support.joining_workers import Fleet, JoiningWorker, memory_of
from tests.support.pool_harness import PoolHarness

NUM_WORKERS = 3
RECOVERY_S = 45
START_S = 1.8e9
LIAR = "worker-0"


def actions(fleet):
    """What may happen next, by name: each changes the fleet."""
    yield "half a second passes, ranks form", lambda one: one.live(seconds=0.5)
    yield "half a second passes, ranks do not form", lambda one: one.live(seconds=0.5, forms=False)
    yield "a balancer follows that knows nothing", lambda one: one.succeed()
    yield "a balancer follows, the store lost a write", lambda one: succeed(one, forgotten=1)
    yield "a balancer follows, the store lost none", lambda one: succeed(one, forgotten=0)
    for name, worker in fleet.workers.items():
        if worker.alive and name in fleet.harness.disconnected:
            yield f"{name} connects", lambda one, name=name: one.connect(name)
        elif worker.alive:
            yield f"{name}'s stream breaks", lambda one, name=name: one.cut(name)
        yield f"{name} restarts", lambda one, name=name: one.restart(name)
    yield f"{LIAR} restarts and lies about its numbers", lie


def lie(fleet):
    """The liar reports the highest numbers that are believed; ranks form in the next epoch."""
    liar, now, pool = fleet.workers[LIAR], fleet.harness.now, fleet.harness.pool
    known = min(pool.roster.highest_epoch, pool.layouts.next_generation - 1)
    for claim in sorted({2**52, int(now * 1000), known + 2**32}, reverse=True):
        fleet.kill(LIAR)
        liar.restart()
        liar.claim, liar.alive = claim, True
        fleet.connect(LIAR)
        if LIAR not in fleet.rejected:
            break
    liar.claim = 0
    fleet.live(seconds=8)


def succeed(fleet, *, forgotten):
    fleet.succeed(memory=memory_of(fleet.harness.writes, forgotten=forgotten))


def serves(fleet):
    """What is wrong with a fleet whose faults have ended; empty if nothing is."""
    for name, worker in fleet.workers.items():
        if not worker.alive:
            fleet.restart(name)
    fleet.connect(*[name for name in fleet.workers if name in fleet.harness.disconnected])
    fleet.live(seconds=RECOVERY_S)
    pool = fleet.harness.pool
    diagnosis = pool.diagnosis()
    if diagnosis.health is not Health.SERVING:
        return f"the pool is {diagnosis.health}: {diagnosis.reason}"
    epochs = {worker.epoch for worker in fleet.alive}
    if epochs != {pool.roster.epoch} or not all(worker.serves for worker in fleet.alive):
        return f"ranks serve in epochs {epochs}, the balancer is at {pool.roster.epoch}"
    return ""


def sequences(fleet, *, depth, story=()):
    """Every sequence of up to `depth` actions that follows, and the fleet after each."""
    yield story, fleet
    if len(story) == depth:
        return
    here = pickle.dumps(fleet)
    for label, act in actions(fleet):
        there = pickle.loads(here)
        act(there)
        yield from sequences(there, depth=depth, story=(*story, label))


def harness_of_today(**changes):
    harness = PoolHarness(**changes)
    harness.now = START_S
    return harness


class Worker(JoiningWorker):
    """A worker that may lie about its numbers."""

    claim = 0

    def greeting(self):
        hello = super().greeting()
        if not self.claim:
            return hello
        return replace(hello, highest_epoch=self.claim, highest_generation=self.claim)


def first_fault(*, depth, first=()):
    """The first sequence after which the pool does not serve, and how many there were.

    Each begins with the actions `first`.
    """
    names = tuple(f"worker-{number}" for number in range(NUM_WORKERS))
    before = PoolMemory(members=EpochMembers(epoch=56, workers=names))
    fleet = Fleet(harness_of_today, memory=before, num_ranks=NUM_WORKERS, kind=Worker)
    for act in first:
        act(fleet)
    num_seen = 0
    for story, after in sequences(fleet, depth=depth):
        num_seen += 1
        if wrong := serves(pickle.loads(pickle.dumps(after))):
            return "\n  ".join([wrong, *story]), num_seen
    return "", num_seen


def test_a_pool_serves_after_every_sequence_of_faults():
    wrong, num_seen = first_fault(depth=MAX_DEPTH)
    assert not wrong
    assert num_seen > 9**MAX_DEPTH


def ignore_in_silence(monkeypatch):
    """A worker ignores an epoch without an answer, and its Hello does not report why."""
    monkeypatch.setattr(EpochState, "rejection", lambda _state, _join_epoch: None)
    greeting = JoiningWorker.greeting
    silent = lambda worker: replace(greeting(worker), highest_epoch=0)  # noqa: E731
    monkeypatch.setattr(JoiningWorker, "greeting", silent)


def believe_relative_numbers(monkeypatch):
    """A worker is believed if it is at most 2^32 ahead of this balancer."""

    def fault(used, *, known, now):
        for what in ("epoch", "generation"):
            if getattr(used, what) > min(getattr(known, what) + 2**32, 2**52):
                return what, "too far ahead"
        return None

    monkeypatch.setattr(UsedNumbers, "fault", fault)


@pytest.mark.parametrize(
    ("plant", "first"), [(ignore_in_silence, ()), (believe_relative_numbers, (lie, lie))]
)
def test_a_planted_fault_of_epochs_is_found(plant, first, monkeypatch):
    plant(monkeypatch)
    wrong, num_seen = first_fault(depth=3 - len(first), first=first)
    assert wrong, f"not found in {num_seen} sequences"


def test_a_pool_serves_after_lies_and_every_sequence_of_faults():
    wrong, _ = first_fault(depth=MAX_DEPTH - 1, first=(lie, lie, lie))
    assert not wrong
