"""Ranks die, hang, wake, return and come in any order; in the end whoever is alive serves."""

import random
from dataclasses import replace

import pytest

from equipoise.pool.health import Health
from equipoise.wire.messages import GroupLost


class Turmoil:
    """Workers that behave as real ones do, with faults in between, all drawn from one seed."""

    def __init__(self, bench, worker_of, *, seed):
        self.bench, self.worker_of = bench, worker_of
        self.draw = random.Random(seed)
        self.hung = set()
        self.noticed = {}
        self.boots = 1

    def alive(self):
        return [w for name, w in self.bench.workers.items() if name not in self.hung]

    def is_broken(self, worker):
        """Whether the group of a worker's epoch lacks somebody."""
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
            bench = self.bench
            bench.say(worker, worker.heartbeat())
            if worker.join_epoch is None:
                continue
            if self.noticed.get(worker.hello.worker) == worker.epoch:
                continue
            if not self.is_broken(worker):
                bench.say(worker, worker.serving())
            elif self.draw.random() < 0.5:
                self.noticed[worker.hello.worker] = worker.epoch
                held = worker.own(worker.layout.expert_of_slot)
                bench.say(
                    worker, GroupLost(epoch=worker.epoch, reason="broke", expert_of_slot=held)
                )

    def fault(self):
        """One thing that goes wrong, or right again."""
        name = self.draw.choice(sorted(self.bench.workers))
        worker = self.bench.workers[name]
        what = self.draw.choice(["kill", "hang", "wake", "restart", "come"])
        if what in {"kill", "restart"} and len(self.alive()) > 1:
            self.hung.discard(name)
            self.bench.disconnected.add(name)
            del self.bench.workers[name]
            self.bench.lose(worker)
        elif what == "hang" and len(self.alive()) > 1:
            self.hung.add(name)
        elif what == "wake" and self.hung:
            self.hung.discard(self.draw.choice(sorted(self.hung)))
        if what in {"restart", "come"}:
            self.come(worker.hello if what == "restart" else None)

    def come(self, hello):
        self.boots += 1
        name = hello.worker if hello is not None else f"worker-{10 + self.boots}"
        if name in self.bench.workers:
            return
        model = next(iter(self.bench.workers.values())).hello if hello is None else hello
        fresh = replace(
            model, worker=name, boot_id=f"boot-{self.boots}", address=f"{name}:1",
            rendezvous_address=f"{name}:2", running=None,
        )  # fmt: skip
        self.noticed.pop(name, None)
        self.bench.workers[name] = self.worker_of(fresh)
        self.bench.disconnected.discard(name)
        self.bench.hello(fresh)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happened_those_who_are_alive_end_up_as_one_group(make_bench, worker_of, seed):
    bench = make_bench(num_ranks=4)
    for worker in bench.workers.values():
        worker.hello = replace(worker.hello, slots_per_rank=12)
    bench.serve()
    turmoil = Turmoil(bench, worker_of, seed=seed)
    seen = {}
    for _ in range(60):
        if turmoil.draw.random() < 0.3:
            turmoil.fault()
        turmoil.live()
        bench.tick(seconds=turmoil.draw.choice([0.1, 0.5, 1.0, 3.0]))
        for worker in bench.workers.values():
            if worker.join_epoch is not None:
                told = (worker.layout.generation, worker.layout.expert_of_slot.tobytes())
                assert seen.setdefault(worker.epoch, told) == told, "an epoch starts in one layout"
    turmoil.hung.clear()
    while len(bench.workers) < 3:
        turmoil.come(None)
    for _ in range(200):
        turmoil.live()
        bench.tick(seconds=0.3)
    assert bench.pool.diagnosis().health is Health.SERVING, bench.pool.diagnosis().reason
    ranks = bench.ranks
    assert {worker.epoch for worker in ranks} == {bench.pool.roster.epoch}
    assert [worker.rank for worker in ranks] == list(range(len(bench.workers)))
    assert {worker.layout.generation for worker in ranks} == {bench.pool.layouts.stored_generation}
    assert bench.pool.counters.refusals.all() == ()
