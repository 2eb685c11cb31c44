"""`Faults`: what may happen to a world. One method for each kind of fault in `schedule.MAKERS`."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

from equipoise.wire.balancer_messages import BalancerMessage
from tests.simulation import byzantine, liars
from tests.simulation.gaps import AFTER_S
from tests.simulation.loop import Process, outside
from tests.simulation.register import LEASES
from tests.simulation.schedule import BALANCERS, WORKERS
from tests.simulation.store import NAME
from tests.simulation.takeover import StoreLosses

_FILE = "apiVersion: equipoise.dev/v1alpha1\nkind: BalancePolicy\ndefaults:\n  "
EDITS = (
    _FILE + "interval: 2s\n",
    _FILE + "storeDown: memory\n",
    _FILE + "slowWorker:\n    action: exclude\n    probation: 5s\n    windows: 1\n",
    _FILE + "nonsense: 1\n",
)


RESTART_S = 0.5

LEAST_GOOD_DISKS = 2
"""Workers with an undamaged checkpoint; they have slots for every expert."""


class Faults(StoreLosses):
    """The faults of a `World`, whose base this is.

    A method returns whether its fault took effect at once. Of others, what they hit adds their kind
    to `effects`.
    """

    def _until(self, for_s: float, function: Any, *args: Any) -> None:
        """Undo something after a while."""
        when_s = self.loop.time() + for_s
        self._ends_s = max(self._ends_s, when_s)
        self.loop.call_at(when_s, function, *args, context=outside())

    def _kill(
        self, name: str, start: Any, back_after_s: float, *, with_machine: bool = False
    ) -> bool:
        known = self.workers.get(name) or self.balancers.get(name)
        is_alive = known is not None and known.process.alive
        if known is not None:
            known.process.kill(with_machine=with_machine)
        self._until(back_after_s, start, name)
        return is_alive

    def do_kill_worker(self, name: str, back_after_s: float) -> bool:
        return self._kill(name, self.start_worker, back_after_s)

    def do_kill_balancer(self, name: str, back_after_s: float) -> bool:
        return self._kill(name, self.start_balancer, back_after_s)

    def do_lose_machine(self, name: str, back_after_s: float) -> bool:
        start = self.start_balancer if name in BALANCERS else self.start_worker
        return self._kill(name, start, back_after_s, with_machine=True)

    def do_kill_leader(self, back_after_s: float) -> bool:
        leader = self.leader()
        if leader is None:
            return False
        return self._kill(leader.process.name, self.start_balancer, back_after_s)

    def do_restart_everything(self, back_after_s: float) -> bool:
        killed = [self._kill(one, self.start_worker, back_after_s) for one in sorted(self.wanted)]
        return self.kill_balancers(back_after_s) and all(killed)

    def kill_balancers(self, back_after_s: float) -> bool:
        """Kill all balancers; returns whether all were alive."""
        killed = [self._kill(one, self.start_balancer, back_after_s) for one in BALANCERS]
        return all(killed)

    def do_wrong_clock(self, name: str, offset_s: float, back_after_s: float) -> bool:
        """A balancer restarts with a wall clock that is wrong from then on."""
        self.clock_offset_s[name] = offset_s
        return self._kill(name, self.start_balancer, back_after_s)

    def do_crash_loop(self, name: str, every_s: float) -> None:
        """A worker dies a moment after it has taken up an epoch, again and again."""
        if self._may_be_odd(name):
            self.crashing = name
            self._crash(name, every_s)

    def _crash(self, name: str, every_s: float) -> None:
        worker = self.workers.get(name)
        is_alive = worker is not None and worker.process.alive
        if is_alive and worker.epochs.state.has_begun and self._kill(name, self.start_worker, 0.5):
            self.effects.add("crash_loop")
        self.loop.call_later(every_s, self._crash, name, every_s, context=outside())

    def do_namesake(self, name: str, for_s: float) -> bool:
        """Another process of a living worker's name serves beside it for a while."""
        worker = self.workers.get(name)
        if worker is None or not worker.process.alive:
            return False
        for balancer in BALANCERS:
            self.do_reset(name, balancer)
        self._until(for_s, self.start_namesake(name).kill)
        return True

    def do_retire_worker(self, name: str) -> bool:
        """A worker leaves for good: the pool shrinks."""
        if name not in self.wanted or self._num_good(besides=name) < LEAST_GOOD_DISKS:
            return False
        self.wanted.remove(name)
        self.retired.add(name)
        return self._kill(name, lambda _name: None, 0.0)

    def do_stop_worker(self, name: str, back_after_s: float) -> bool:
        is_alive = name in self.workers and self.workers[name].process.alive
        if is_alive:
            self.workers[name].process.call(self._stops[name].set)
        self._until(back_after_s + 2.0, self.start_worker, name)
        return is_alive

    def _pause(self, process: Process, for_s: float) -> bool:
        process.pause()
        self._until(for_s, self._resume, process)
        return process.alive

    def _resume(self, process: Process) -> None:
        balancer = self.balancers.get(process.name)
        is_suspended = balancer is not None and balancer.suspended_at_s is not None
        if process.paused and not is_suspended:
            process.resume()

    def do_pause_worker(self, name: str, for_s: float) -> bool:
        return name in self.workers and self._pause(self.workers[name].process, for_s)

    def do_pause_balancer(self, name: str, for_s: float) -> bool:
        return name in self.balancers and self._pause(self.balancers[name].process, for_s)

    def do_pause_leader(self, for_s: float) -> bool:
        leader = self.leader()
        return leader is not None and self._pause(leader.process, for_s)

    def do_suspend_leader(self, for_s: float, cut_s: float) -> None:
        """Its machine is suspended, monotonic clock included, and resumes without the store."""
        leader = self.leader()
        if leader is None or leader.process.paused:
            return
        leader.process.pause()
        leader.suspended_at_s = self.loop.time()
        for source, target in permutations((leader.process.name, NAME)):
            self._cut("", source, target, for_s + cut_s)
        self._until(for_s, self._wake_suspended, leader, self.loop.time())

    def _wake_suspended(self, balancer: Any, since_s: float) -> None:
        if self.wake(balancer, since_s=since_s):
            self.effects.add("suspend_leader")

    def wake(self, balancer: Any, *, since_s: float) -> bool:
        """Resume a balancer whose clock stood still; whether it leads by that clock."""
        process = balancer.process
        if not process.paused or not process.alive or balancer.suspended_at_s != since_s:
            return False  # Something else has resumed it.
        # Before anything of the process runs.
        balancer.suspended_s += self.loop.time() - since_s
        balancer.suspended_at_s = None
        balancer.woke_s = balancer.monotonic_s()
        process.resume(stood_still_s=self.loop.time() - since_s)
        return bool(balancer.elector.leads())

    def _cut(self, kind: str, source: str, target: str, for_s: float) -> None:
        self.network.cut(source, target)
        num_stopped = self.network.num_stopped[source, target]
        self._until(for_s, self._heal, kind, source, target, num_stopped)

    def _heal(self, kind: str, source: str, target: str, num_stopped: int) -> None:
        if self.network.num_stopped[source, target] > num_stopped:
            self.effects.add(kind)
        if self.network.is_cut(source, target):
            self.network.heal(source, target)

    def do_cut(self, source: str, target: str, for_s: float) -> None:
        self._cut("cut", source, target, for_s)

    def do_cut_both(self, one: str, other: str, for_s: float) -> None:
        for source, target in permutations((one, other)):
            self._cut("cut_both", source, target, for_s)

    def do_isolate(self, name: str, for_s: float) -> None:
        for other in (*WORKERS, *BALANCERS, NAME, LEASES):
            if other != name:
                for source, target in permutations((name, other)):
                    self._cut("isolate", source, target, for_s)

    def do_reset(self, one: str, other: str) -> bool:
        return self.network.reset(one, other) > 0

    def _set(self, target: Any, name: str, value: Any, for_s: float, back: Any) -> None:
        setattr(target, name, value)
        self._until(for_s, setattr, target, name, back)

    def do_slow_network(self, factor: float, for_s: float) -> None:
        self._set(self.network, "delay_factor", factor, for_s, 1.0)

    def do_flaky_network(self, share: float, for_s: float) -> None:
        self._set(self.network, "flaky", share, for_s, 0.0)

    def do_lossy_network(self, share: float, for_s: float) -> None:
        self._set(self.network, "lossy", share, for_s, 0.0)

    def do_store_down(self, for_s: float) -> None:
        self._set(self.store, "is_down", True, for_s, False)

    def do_store_hangs(self, for_s: float) -> None:
        self._set(self.store, "hangs", True, for_s, False)

    def do_store_answers_late(self, for_s: float) -> None:
        """It applies writes, but answers after their timeout: their outcome is unknown."""
        self._set(self.store, "answers_late", True, for_s, False)

    def do_store_full(self, for_s: float) -> None:
        self._set(self.store, "is_full", True, for_s, False)

    def do_store_forgets(self) -> bool:
        return self.lose_records(self.store.forget)

    def do_store_goes_back(self, num_writes: int) -> bool:
        return self.lose_records(lambda: self.store.go_back(num_writes))

    def lose_records(self, lose: Callable[[], bool]) -> bool:
        """The store loses contents now; whether it does."""
        before = self.store.data
        is_lost = lose()
        self.lost_s = self.loop.time()
        self.operators.note_loss(before, self.store.data)
        return is_lost

    def do_disk_hangs(self, name: str, for_s: float, restarts: bool) -> None:
        if name in self.disks:
            self.disks[name].hangs_until_s = self.loop.time() + for_s
            self._until(for_s, lambda: None)
            self._restart_workers(restarts)

    def do_disk_gone(self, name: str, for_s: float, restarts: bool) -> None:
        if name in self.disks:
            self._set(self.disks[name], "is_gone", True, for_s, False)
            self._restart_workers(restarts)

    def _restart_workers(self, restarts: bool) -> None:
        """Restart all workers, so that no expert comes from a peer, or none."""
        for name in sorted(self.wanted) if restarts else ():
            self._kill(name, self.start_worker, RESTART_S)

    def do_disk_damaged(self, name: str, layer: int, expert: int) -> None:
        if name in self.disks and self._num_good(besides=name) >= LEAST_GOOD_DISKS:
            self.disks[name].damaged.add((layer, expert))
            self._restart_workers(True)

    def _num_good(self, *, besides: str) -> int:
        """Workers that a pool can count on, without one of them."""
        odd = {besides, self.odd, *self.retired}
        return sum(not disk.damaged for name, disk in self.disks.items() if name not in odd)

    def _may_be_odd(self, name: str) -> bool:
        """Whether the pool can do without a worker: one at most is odd."""
        is_enough = self._num_good(besides=name) >= LEAST_GOOD_DISKS
        if name not in self.wanted or self.odd not in {"", name} or not is_enough:
            return False
        self.odd = name
        return True

    def do_unreachable_host(self, name: str, back_after_s: float) -> None:
        """It restarts on a machine where no peer reaches the rendezvous that it hosts."""
        if self._may_be_odd(name):
            self.rendezvous.unreachable[name] = "host"
            self._kill(name, self.start_worker, back_after_s)

    def do_unreachable_rank(self, name: str, back_after_s: float) -> None:
        """It restarts on a machine that no peer reaches."""
        if self._may_be_odd(name):
            self.rendezvous.unreachable[name] = "rank"
            self._kill(name, self.start_worker, back_after_s)

    def do_false_loss(self, name: str, for_s: float, stays: bool) -> None:
        """It reports its group as lost with every heartbeat, and steps as before."""
        if self._may_be_odd(name):
            self.reports.begin("loss", name)
            if not stays:
                self._until(for_s, self.reports.end, "loss")

    def do_false_generation(self, name: str, for_s: float, stays: bool, claim: str) -> None:
        """Its heartbeats have a generation that its pool does not run."""
        if self._may_be_odd(name):
            self.reports.begin("generation", name, claim=claim)
            for balancer in BALANCERS:
                self.do_reset(name, balancer)
            if not stays:
                self._until(for_s, self.reports.end, "generation")

    def do_other_step(self, name: str, for_s: float, stays: bool) -> None:
        """It reports another step for its switches than the one at which all ranks switched."""
        if self._may_be_odd(name):
            self.reports.begin("step", name)
            if not stays:
                self._until(for_s, self.reports.end, "step")

    def do_bit_rot(self, name: str, layer: int, slot: int) -> bool:
        return self.rot.begin(name, layer, slot)

    def do_report_gap(self, name: str, for_s: float) -> None:
        self.gaps.begin(name, for_s)
        self._until(for_s + (AFTER_S if self.gaps.is_alone else 0.0), lambda: None)

    def do_broken_groups(self, for_s: float) -> None:
        """Groups form, and no rank can exchange anything with its peers."""
        self.broken_groups.begin(for_s)
        self._until(for_s, self.broken_groups.end)

    def do_slow_worker(self, name: str, for_s: float) -> None:
        self.slowness[name] = 4.0
        self._until(for_s, self.slowness.pop, name, None)

    def do_shift(self, pattern: int) -> bool:
        before, self.pattern = self.pattern, pattern
        return self.has_traffic and before != pattern

    def do_idle(self, for_s: float) -> None:
        self._set(self, "has_traffic", False, for_s, True)

    def do_planner_hangs(self, for_s: float) -> None:
        self._set(self, "planner_hangs", True, for_s, False)

    def do_corrupt_transfers(self, for_s: float) -> None:
        self._set(self, "corrupts_transfers", True, for_s, False)

    def do_operator(self, operation: str, then: str, after_s: float) -> None:
        self.operators.ask(operation)
        if then:
            self._until(after_s, self.operators.ask, then)

    def do_edit_policy(self, number: int) -> bool:
        self.policy_text = EDITS[number]
        for one in self.living_balancers():
            one.process.call(one.offer_policy, self.policy_text)
        return bool(self.living_balancers())

    def do_byzantine_term(self, how: str) -> None:
        byzantine.claim_terms(self, how)

    def do_byzantine_noise(self, seed: int) -> None:
        byzantine.make_noise(self, seed)

    def do_lie(self, how: str, for_s: float, stays: bool) -> None:
        """A worker of the pool itself lies, for a while or for ever."""
        if self.liar is not None:
            self.liar.kill()
        self.liar = liars.start(self, how)
        if not stays:
            self._until(for_s, self.liar.kill)

    def do_join_worker(self, for_s: float) -> None:
        self.wanted.add("w4")
        self.start_worker("w4")
        self._until(for_s, lambda: None)

    def do_old_leader(self, name: str) -> None:
        """A leader whose term is over, and does not know it, pushes once more to one worker."""
        if name in self.workers and self.observer.obeyed(self.workers[name]) < 2:
            self.do_kill_leader(RESTART_S)  # No term is over yet.
        self.loop.create_task(byzantine.push_of_the_term_before(self, name), context=outside())

    def do_wrong_layout(self, name: str) -> None:
        """A leader with a bug tells one rank another layout than the others."""
        self.tampered.add(name)

    def _tamper(self, worker: Any, message: BalancerMessage) -> BalancerMessage:
        layout = getattr(message, "layout", None)
        if layout is None or getattr(message, "moves", ()):
            return message
        rank = getattr(message, "rank", worker.rank.held.rank if worker.rank else None)
        wrong = byzantine.other_layout(layout, rank=rank)
        if wrong is None:
            return message
        self.tampered.discard(worker.process.name)
        self.effects.add("wrong_layout")
        self.observer.note(f"{worker.process.name} is sent another layout than the others")
        return replace(message, layout=wrong)
