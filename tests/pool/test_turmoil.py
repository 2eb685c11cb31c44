"""Messages are lost or late, processes restart, in any order: in the end store and ranks agree."""

import random

import pytest

from equipoise.planning.rollout import Persisted, Wave
from equipoise.pool.effects import (
    WriteAdopted,
    WriteCommitted,
    WriteDecision,
    WriteMembership,
    WriteProposed,
)
from equipoise.pool.health import Health
from equipoise.pool.records import PoolMemory
from equipoise.wire.balancer_messages import Stage

ACTIONS = 100


class Turmoil:
    """A pool whose ranks agree on switches among themselves, and whose every link may break."""

    def __init__(self, make_harness, skewed, seed) -> None:
        self.random = random.Random(seed)
        self.make_harness = make_harness
        self.skewed = skewed
        self.harness = make_harness()
        self.harness.serve()
        self.verified = {}
        self.layouts = {}
        self.writes = []
        self.step = 0

    @property
    def workers(self):
        return self.harness.ranks

    def name(self, worker):
        return worker.hello.worker

    def connected(self, worker):
        return self.name(worker) not in self.harness.disconnected

    def say(self, worker, value):
        if self.connected(worker):
            self.harness.say(worker, value)

    # What may happen

    def traffic(self):
        load = self.skewed(self.random.randrange(3))
        self.harness.now += 1.0
        for worker in self.workers:
            worker.serve_traffic(load)
            self.say(worker, worker.report())
        self.harness.tick()

    def window(self):
        for _ in range(10):
            self.traffic()

    def silence(self):
        self.harness.tick(seconds=self.random.choice([1.0, 7.0, 40.0]))

    def heartbeats(self):
        for worker in self.workers:
            self.say(worker, worker.heartbeat())

    def break_link(self):
        worker = self.random.choice(self.workers)
        if self.connected(worker):
            self.harness.disconnected.add(self.name(worker))
            self.harness.lose(worker)

    def mend_links(self):
        for worker in self.workers:
            if not self.connected(worker):
                self.harness.disconnected.discard(self.name(worker))
                self.harness.hello(worker.reconnecting())

    def stage_one(self):
        worker = self.random.choice(self.workers)
        if worker.staged is not None:
            self.verified[self.name(worker)] = worker.staged.layout.generation
            self.say(worker, worker.answer_staged())

    def stage_many(self):
        for _ in range(8):
            self.stage_one()

    def reject_one(self):
        worker = self.random.choice(self.workers)
        if worker.staged is not None and self.name(worker) not in self.verified:
            rejection = worker.reject("no memory")
            worker.staged = None
            self.say(worker, rejection)

    def take_a_step(self):
        """All switch if all have verified the same generation, without asking the balancer."""
        self.step += 1
        held = {worker.staged.layout.generation if worker.staged else 0 for worker in self.workers}
        verified = {self.verified.get(self.name(worker), 0) for worker in self.workers}
        if len(held) == 1 and held == verified and 0 not in held:
            self.verified.clear()
            for worker in self.workers:
                switched = worker.switch(step=self.step)
                self.say(worker, switched)

    def restart_balancer(self):
        workers, now = self.harness.workers, self.harness.now
        self.check_books()
        self.writes += self.harness.writes
        self.harness = self.make_harness(memory=memory_of(self.writes))
        self.harness.workers, self.harness.now = workers, now
        self.harness.disconnected = set(workers)

    def fail_writes(self):
        self.harness.store_fault = self.random.choice(["", "", "", "disk full"])

    # What must hold

    def check_books(self):
        for _, message in self.harness.sent:
            if isinstance(message, Stage):
                layout = message.layout
                known = self.layouts.setdefault(layout.generation, layout)
                assert known.same_placement(layout), "a generation is one layout for ever"
        proposed = {
            write.layout.generation
            for write in self.writes + self.harness.writes
            if isinstance(write, WriteProposed)
        }
        assert self.layouts.keys() <= proposed, "nothing is staged that was not written"
        assert len({worker.layout.generation for worker in self.workers}) == 1

    def drop_forgotten(self):
        for worker in self.workers:
            if worker.staged is None:
                self.verified.pop(self.name(worker), None)

    def calm_down(self):
        self.harness.store_fault = ""
        self.mend_links()
        for _ in range(80):
            self.heartbeats()
            self.harness.tick(seconds=1.0)
            self.stage_many()
            self.drop_forgotten()
            self.take_a_step()


def memory_of(writes):
    layouts, committed, membership, decision = {}, None, None, None
    for write in writes:
        match write:
            case WriteProposed():
                layouts[write.layout.generation] = write.layout
            case WriteAdopted():
                layouts[write.layout.generation] = committed = write.layout
            case WriteCommitted():
                committed = layouts[write.generation]
            case WriteMembership():
                membership = write.members
            case WriteDecision():
                decision = write.record
    above = [number for number in layouts if committed and number > committed.generation]
    return PoolMemory(
        committed=committed,
        proposed=layouts[max(above)] if above else None,
        next_generation=max(layouts, default=0) + 1,
        members=membership,
        last_decision=decision,
    )


@pytest.mark.parametrize("seed", range(12))
def test_after_any_turmoil_the_committed_layout_is_what_all_ranks_run(make_harness, skewed, seed):
    turmoil = Turmoil(make_harness, skewed, seed)
    go_through(turmoil)
    turmoil.calm_down()
    turmoil.check_books()
    pool = turmoil.harness.pool
    assert pool.diagnosis().health is Health.SERVING, pool.diagnosis().reason
    assert pool.rollouts.current is None
    running = turmoil.workers[0].layout
    assert pool.layouts.stored_generation == running.generation
    assert pool.layouts.committed.same_placement(running)


def test_a_balancer_that_stages_before_it_has_written_would_be_noticed(
    make_harness, skewed, monkeypatch
):
    begin = Wave.begin

    def begin_staging(*, target, now, **about):
        wave, _ = begin(target=target, now=now, **about)
        return wave.step(Persisted(generation=target.generation), now=now)

    monkeypatch.setattr(Wave, "begin", begin_staging)
    with pytest.raises(AssertionError, match="nothing is staged that was not written"):
        go_through(Turmoil(make_harness, skewed, seed=0))


def go_through(turmoil):
    """Whatever may happen, in an order that the seed says; books are looked at every time."""
    actions = [
        *[turmoil.window] * 4,
        turmoil.silence,
        turmoil.heartbeats,
        turmoil.break_link,
        *[turmoil.mend_links] * 5,
        *[turmoil.stage_many] * 3,
        turmoil.reject_one,
        *[turmoil.take_a_step] * 3,
        turmoil.restart_balancer,
        turmoil.fail_writes,
    ]
    for _ in range(ACTIONS):
        turmoil.random.choice(actions)()
        turmoil.drop_forgotten()
        turmoil.check_books()
