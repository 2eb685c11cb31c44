"""Ranks die, hang, wake, return and join in any order; in the end all live ranks serve."""

import random
from dataclasses import replace

import pytest

from equipoise.wire.messages import GroupLost
from tests.support.deaths import trouble


class Turmoil:
    """Workers that behave as real ones do, with faults in between, all drawn from one seed."""

    def __init__(self, harness, worker_of, *, seed):
        self.harness, self.worker_of = harness, worker_of
        self.draw = random.Random(seed)
        self.hung = set()
        self.noticed = {}
        self.boots = 1

    def alive(self):
        return [w for name, w in self.harness.workers.items() if name not in self.hung]

    def is_broken(self, worker):
        """Whether the group of a worker's epoch lacks a member."""
        names = {peer.worker for peer in worker.join_epoch.peers}
        here = {
            one.hello.worker
            for one in self.alive()
            if one.join_epoch is not None and one.epoch == worker.epoch
        }
        return names != here

    def live(self):
        """Everybody who can says what is true of it, in any order."""
        workers = self.alive()
        self.draw.shuffle(workers)
        for worker in workers:
            harness = self.harness
            harness.say(worker, worker.heartbeat())
            if worker.join_epoch is None:
                continue
            if self.noticed.get(worker.hello.worker) == worker.epoch:
                continue
            if not self.is_broken(worker):
                harness.say(worker, worker.serving())
            elif self.draw.random() < 0.5:
                self.noticed[worker.hello.worker] = worker.epoch
                held = worker.own(worker.layout.expert_of_slot)
                harness.say(
                    worker, GroupLost(epoch=worker.epoch, reason="broke", expert_of_slot=held)
                )

    def fault(self):
        """One thing that goes wrong, or right again."""
        name = self.draw.choice(sorted(self.harness.workers))
        worker = self.harness.workers[name]
        what = self.draw.choice(["kill", "hang", "wake", "restart", "come"])
        if what in {"kill", "restart"} and len(self.alive()) > 1:
            self.hung.discard(name)
            self.harness.disconnected.add(name)
            del self.harness.workers[name]
            self.harness.lose(worker)
        elif what == "hang" and len(self.alive()) > 1:
            self.hung.add(name)
        elif what == "wake" and self.hung:
            self.hung.discard(self.draw.choice(sorted(self.hung)))
        if what in {"restart", "come"}:
            self.come(worker.hello if what == "restart" else None)

    def come(self, hello):
        self.boots += 1
        name = hello.worker if hello is not None else f"worker-{10 + self.boots}"
        if name in self.harness.workers:
            return
        model = next(iter(self.harness.workers.values())).hello if hello is None else hello
        fresh = replace(
            model, worker=name, boot_id=f"boot-{self.boots}", address=f"{name}:1",
            rendezvous_address=f"{name}:2", running=None,
        )  # fmt: skip
        self.noticed.pop(name, None)
        self.harness.workers[name] = self.worker_of(fresh)
        self.harness.disconnected.discard(name)
        self.harness.hello(fresh)


@pytest.mark.parametrize("seed", range(30))
def test_live_workers_always_end_up_in_one_group(make_harness, worker_of, seed):
    harness = make_harness(num_ranks=4)
    for worker in harness.workers.values():
        worker.hello = replace(worker.hello, slots_per_rank=12)
    harness.serve()
    turmoil = Turmoil(harness, worker_of, seed=seed)
    seen = {}
    for _ in range(60):
        if turmoil.draw.random() < 0.3:
            turmoil.fault()
        turmoil.live()
        harness.tick(seconds=turmoil.draw.choice([0.1, 0.5, 1.0, 3.0]))
        for worker in harness.workers.values():
            if worker.join_epoch is not None:
                running = (worker.layout.generation, worker.layout.expert_of_slot.tobytes())
                assert seen.setdefault(worker.epoch, running) == running, (
                    "an epoch starts in one layout"
                )
    turmoil.hung.clear()
    while len(harness.workers) < 3:
        turmoil.come(None)
    for _ in range(200):
        turmoil.live()
        harness.tick(seconds=0.3)
    assert trouble(harness.pool) == ""
    ranks = harness.ranks
    assert {worker.epoch for worker in ranks} == {harness.pool.roster.epoch}
    assert [worker.rank for worker in ranks] == list(range(len(harness.workers)))
    assert {worker.layout.generation for worker in ranks} == {
        harness.pool.layouts.stored_generation
    }
    assert harness.pool.counters.rejections.all() == ()
