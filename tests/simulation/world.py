"""`World`: a fleet of two balancers, three to five workers and a store, and what happens to it."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from equipoise.balancer.store.store import StoreError
from equipoise.planning.policy import SlotUse
from equipoise.pool.health import Health
from equipoise.pool.records import Hold
from equipoise.rank.errors import WorkerError
from equipoise.trust.identity import Identity, Role
from equipoise.wire.balancer_messages import BalancerMessage
from equipoise.worker.settings import WorkerSettings
from tests.simulation import liars, operators
from tests.simulation.balancer import SimBalancer
from tests.simulation.broken_groups import BrokenGroups
from tests.simulation.experts import SimCheckpoint
from tests.simulation.faults import Faults
from tests.simulation.fleet import (
    POLICY,
    POOL,
    SHAPE,
    keeps_lease_apart,
    phase_of,
    places_of,
    settings_of,
    traffic,
)
from tests.simulation.gaps import ReportGaps
from tests.simulation.group import Rendezvous
from tests.simulation.leader_watch import LeaderWatch
from tests.simulation.loop import EPOCH_S, Process, SimLoop, outside
from tests.simulation.network import Network
from tests.simulation.observer import Observer, ViolationError
from tests.simulation.reports import FalseReports
from tests.simulation.rot import BitRot
from tests.simulation.schedule import BALANCERS, WORKERS, Action, Schedule
from tests.simulation.store import StoreServer
from tests.simulation.worker import SimWorker

CONVERGE_S = 75.0
"""Seconds within which the fleet must serve as one once the faults have ended."""

CHECK_S = 0.5
BEGIN_S = 6.0
"""Seconds within which a fleet begins to serve. Faults begin then."""


class World(Faults):
    """One schedule's world. `run` plays it; `observer.violation` tells how it ended."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.loop = SimLoop()
        self.rng = random.Random(f"world {schedule.seed}")
        self.shape = SHAPE
        self.pooled = places_of(schedule.seed, WORKERS[0]) > 0
        slots = SlotUse.POOLED if self.pooled else SlotUse.PER_LAYER
        self.policy, self.policy_text = replace(POLICY, slots=slots), ""
        self.network = Network(self.loop, self.rng)
        self.rendezvous = Rendezvous(self.network)
        self.store = StoreServer()
        self.leases = StoreServer() if keeps_lease_apart(schedule.seed) else self.store
        self.observer = Observer(self)
        self.store.on_write = self.observer.written
        self.effects: set[str] = set()
        """Kinds of faults that have taken effect: what happened was not only scheduled."""
        for part in (self.network, self.store, self.rendezvous):
            part.on_effect = self.effects.add
        self.rendezvous.on_exchange = self.observer.exchanged
        self.balancer_addresses = tuple(f"{name}:7070" for name in BALANCERS)
        self.workers: dict[str, SimWorker] = {}
        self.balancers: dict[str, SimBalancer] = {}
        self.disks: dict[str, SimCheckpoint] = {}
        self.slowness: dict[str, float] = {}
        self.has_traffic, self.planner_hangs, self.corrupts_transfers = True, False, False
        self.pattern = 0
        self.has_served = False
        self.phase = phase_of(schedule.seed)
        self.tokens_of_epoch: Counter[int] = Counter()
        """Tokens that ranks have run, by the epoch they ran them in."""
        self.tampered: set[str] = set()
        self.wanted: set[str] = set()
        self.retired: set[str] = set()
        """Workers that have left for good."""
        self.crashing = ""
        """The worker that crashes again and again, if there is one."""
        self.clock_offset_s: dict[str, float] = {}
        """How far the wall clock of a balancer is ahead of the others', by name."""
        self._boots: dict[str, int] = {}
        self._ports = 1000
        self._processes: list[Process] = []
        self._stops: dict[str, asyncio.Event] = {}
        self._ends_s = 0.0
        self.lost_s = -1e9
        self.operators, self.watch = operators.Operators(self), LeaderWatch(self)
        self.rot, self.gaps = BitRot(self), ReportGaps(self)
        self.broken_groups = BrokenGroups(self)
        self.reports = FalseReports(self)
        self.liar: Process | None = None
        self.odd = ""
        """The worker that the pool may leave out for as long as it likes, if there is one."""
        self.kinds: set[str] = set()

    # What processes use -------------------------------------------------------------------------

    @property
    def elapsed_s(self) -> float:
        return self.loop.time() - EPOCH_S

    def port(self) -> int:
        self._ports += 1
        return self._ports

    def identity(self, settings: WorkerSettings) -> tuple[Identity, ...]:
        return (Identity(role=Role.WORKER, pool=settings.pool, worker=settings.worker),)

    def traffic(self) -> np.ndarray:
        """Assignments of one step, [layers, experts]."""
        return traffic(self.pattern)

    def living_balancers(self) -> list[SimBalancer]:
        return [one for one in self.balancers.values() if one.process.alive]

    def leader(self) -> SimBalancer | None:
        leading = [one for one in self.living_balancers() if one.elector.leads()]
        return leading[0] if len(leading) == 1 else None

    # Life ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start every process and let them form a pool."""
        for name in BALANCERS:
            self.start_balancer(name)
        for name in WORKERS[: self.schedule.num_workers]:
            self.wanted.add(name)
            self.start_worker(name)
        self.watch.begin()
        while self.unsettled() and self.elapsed_s < BEGIN_S:
            self.loop.run_until(self.loop.time() + CHECK_S)
        self.has_served = True

    def run(self) -> ViolationError | None:
        """Play the schedule, then wait until the fleet serves as one again."""
        self.begin()
        begins_s = self.loop.time()
        for action in self.schedule.actions:
            self.loop.run_until(begins_s + action.at_s)
            if self.observer.violation is not None or self.loop.faults:
                break
            self._do(action)
        self.loop.run_until(max(self.loop.time(), self._ends_s))
        self.end_faults()
        return self._converge()

    def _do(self, action: Action) -> None:
        self.observer.note(f"* {action}")
        self.kinds.add(action.kind)
        if getattr(self, f"do_{action.kind}")(*action.args):
            self.effects.add(action.kind)

    def _converge(self) -> ViolationError | None:
        began_s = self.loop.time()
        calm = 0
        while self.observer.violation is None:
            if self.loop.faults:
                self.observer.violate("uncaught", self.loop.faults[0])
                break
            fault = self.unsettled()
            calm = calm + 1 if not fault else 0
            if calm >= 3:
                break
            bound_s = CONVERGE_S + self.broken_groups.settle_s
            if self.loop.time() > began_s + bound_s:
                self.observer.violate("no-convergence", f"{bound_s:g} s after the faults {fault}")
                break
            self.loop.run_until(self.loop.time() + CHECK_S)
        if self.observer.violation is None:
            self.operators.check()
            self.gaps.check()
            self.reports.watch()
        if self.observer.violation is None and self.loop.faults:
            self.observer.violate("uncaught", self.loop.faults[0])
        return self.observer.violation

    def unsettled(self) -> str:
        """Why the fleet does not serve as one; empty if it does."""
        leading = [one for one in self.living_balancers() if one.elector.leads()]
        if len(leading) != 1:
            return f"{len(leading)} balancers lead"
        pools = leading[0].seat.led
        if pools is None or POOL not in pools.names():
            return "the leader does not know the pool"
        pool = pools.find(POOL).pool
        diagnosis = pool.diagnosis()
        if diagnosis.health is not Health.SERVING and not self._is_explained(diagnosis.reason):
            return f"the pool is {diagnosis.health}: {diagnosis.reason}"
        if pool.rollouts.current is not None:
            return f"a wave is {pool.rollouts.current.state}"
        return self._apart(pool) or self.rot.unsettled() or self.operators.unsettled(pool)

    def _is_explained(self, reason: str) -> bool:
        """Whether a pool is degraded by a worker that lies, left or is damaged, or lacks ranks."""
        has_liar = self.liar is not None and self.liar.alive
        damaged = [name for name, disk in self.disks.items() if disk.damaged]
        names = {self.odd, *self.retired, *damaged, *([liars.NAME] if has_liar else ())} - {""}
        if any(reason.startswith(f"{name} ") or f"({name})" in reason for name in names):
            return True
        if any(reason.startswith(f"{name} is quarantined") for name in self.rot.idle):
            return True
        is_short = bool(self.retired or damaged)
        return is_short and re.match(r"\d+ of \d+ ranks", reason) is not None

    def _apart(self, pool: Any) -> str:
        """What ranks, leader and store do not agree about."""
        running = set()
        for name in sorted(self.wanted):
            if self.disks[name].damaged or name == self.odd or name in self.rot.idle:
                continue  # It is quarantined or left out, or gets its experts elsewhere.
            worker = self.workers.get(name)
            rank = worker.rank if worker is not None and worker.process.alive else None
            if rank is None:
                return f"{name} does not serve"
            running.add((rank.join_epoch.epoch, rank.held.contents.layout.generation))
        known = (pool.roster.epoch, pool.layouts.stored_generation)
        if running != {known}:
            return f"(epoch, generation) is {known} for the leader, {sorted(running)} for ranks"
        stored = self.store.data.get(("committed", POOL))
        if stored != known[1]:
            return f"the store has generation {stored}, the ranks run {known[1]}"
        hold, ours = self.store.data.get(("hold", POOL), Hold()).reason, pool.journal.hold.reason
        if hold != ours:
            return f"the hold is {hold or 'none'} in the store, {ours or 'none'} for the leader"
        return ""

    def end_faults(self) -> None:
        """Everything works from now on, and everyone is there."""
        self.observer.note("* faults end")
        self.network.flaky = self.network.lossy = 0.0
        self.network.delay_factor = 1.0
        for source, target in list(self.network._cuts):
            while self.network.is_cut(source, target):
                self.network.heal(source, target)
        self.store.is_down = self.store.hangs = self.store.is_full = False
        self.store.answers_late = False
        self.planner_hangs = self.corrupts_transfers = False
        self.slowness.clear()
        self.tampered.clear()
        for process in self._processes:
            if process.paused:
                process.resume()
        for disk in self.disks.values():
            disk.is_gone, disk.hangs_until_s = False, 0.0
        self.has_traffic = True

    # Starting -----------------------------------------------------------------------------------

    def _process(self, name: str) -> Process:
        self._boots[name] = self._boots.get(name, 0) + 1
        process = Process(self.loop, name)
        self._processes = [*(one for one in self._processes if one.alive), process]
        return process

    def start_worker(self, name: str) -> None:
        if name not in self.wanted or (name in self.workers and self.workers[name].process.alive):
            return
        process = self._process(name)
        stop = self._stops[name] = asyncio.Event()
        make = self._worker_of(process)

        async def main() -> None:
            worker = self.workers[name] = make()
            await self._live(worker, stop)
            self.loop.call_later(1.0, self.start_worker, name, context=outside())
            process.kill()

        process.spawn(main())

    def start_namesake(self, name: str) -> Process:
        """Start another process of a worker's name, which does not come back."""
        process = self._process(name)
        make = self._worker_of(process)

        async def main() -> None:
            await self._live(make(), asyncio.Event())
            process.kill()

        process.spawn(main())
        return process

    def _worker_of(self, process: Process) -> Callable[[], SimWorker]:
        """What makes a worker, within its process."""
        name = process.name
        disk = self.disks.setdefault(name, SimCheckpoint(SHAPE))
        disk.on_effect = self.effects.add
        boot_id = f"{name}-{self._boots[name]}"
        addresses, num_workers = self.balancer_addresses, self.schedule.num_workers
        places = places_of(self.schedule.seed, name)
        settings = settings_of(name, num_workers, addresses, self.phase, places)
        return partial(SimWorker, self, process, settings, boot_id=boot_id, checkpoint=disk)

    async def _live(self, worker: SimWorker, stop: asyncio.Event) -> None:
        self._watch_messages(worker)
        ended = "stopped"
        try:
            await worker._run(stop)
        except WorkerError as error:
            ended = str(error)
            self.rot.ended(worker, error)
        self.observer.note(f"{worker.process.name} ends: {ended}")

    def _watch_messages(self, worker: SimWorker) -> None:
        receive = worker.receive

        def watched(message: BalancerMessage) -> None:
            if worker.process.name in self.tampered:
                receive(self._tamper(worker, message))
            else:
                receive(message)
            self.observer.received(worker, message)

        worker.receive = watched  # type: ignore[method-assign]

    def start_balancer(self, name: str) -> None:
        known = self.balancers.get(name)
        if known is not None and known.process.alive:
            return
        process = self._process(name)

        async def main() -> None:
            address = f"{name}:7070"
            one = SimBalancer(self, process, address, boot=self._boots[name])
            self.balancers[name] = one
            try:
                await one.run()
            except StoreError as error:
                self.observer.note(f"{name} ends: {error}")
            self.loop.call_later(1.0, self.start_balancer, name, context=outside())
            process.kill()

        process.spawn(main())
