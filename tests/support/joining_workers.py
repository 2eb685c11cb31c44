"""Workers that take up epochs by the product's own rules, between real controllers of one pool."""

from dataclasses import replace

from equipoise.planning.errors import InvalidReportError
from equipoise.pool.effects import WriteAdopted, WriteAverage, WriteMembership
from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.pool.records import PoolMemory
from equipoise.wire.balancer_messages import JoinEpoch
from equipoise.wire.errors import InvalidMessageError
from equipoise.worker.epoch_state import EpochState
from tests.support.scripted_worker import ScriptedWorker


class JoiningWorker(ScriptedWorker):
    """A worker process: it ignores what it must, and answers on the stream that is open."""

    def __init__(self, hello) -> None:
        super().__init__(hello)
        self.state = EpochState()
        self.serves = False
        self.answers = []
        self.alive = True

    def take(self, message) -> None:
        if not isinstance(message, JoinEpoch):
            super().take(message)
        elif self.state.take_up(message):
            self.serves = False
            super().take(message)
        elif self.serves and message.epoch == self.epoch and message.rank == self.rank:
            self.answers.append(self.serving())
        elif rejection := self.state.rejection(message):
            self.answers.append(rejection)

    @property
    def is_lost(self):
        """Whether it has given up its newest epoch."""
        return self.state.lost is not None and self.state.lost.epoch == self.epoch

    def form(self):
        """All ranks of its epoch have met."""
        self.serves, self.state.lost = True, None
        self.answers.append(self.serving())

    def fail(self, reason, *, unreached=()):
        """Its group ended, or never formed because it could not reach some peers."""
        self.serves = False
        held = self.own(self.layout.expert_of_slot)
        lost = self.state.lose(
            self.join_epoch, reason, expert_of_slot=held, unreached=tuple(unreached)
        )
        self.answers.append(lost)

    def restart(self):
        """The process ends, and another one begins under its name."""
        self.state, self.join_epoch, self.layout, self.staged = EpochState(), None, None, None
        self.serves, self.answers = False, []
        boot = int(self.hello.boot_id.removeprefix("boot-")) + 1
        self.hello = replace(self.hello, boot_id=f"boot-{boot}")

    def greeting(self):
        """The Hello of a new stream; what was not sent yet is dropped with the old one."""
        self.answers = []
        hello = self.reconnecting() if self.serves else self.hello
        return replace(
            hello,
            group_lost=None if self.serves else self.state.lost,
            highest_epoch=self.state.highest_epoch,
            highest_generation=self.state.highest_generation,
        )


class Fleet:
    """The workers of a pool, and the one balancer after another that they connect to.

    `harness` is the balancer that leads now. Each rank serves once all ranks of its epoch are in
    it, and a group that lacks a rank for `PATIENCE_S` is given up.
    """

    PATIENCE_S = 10.0

    def __init__(
        self, make_harness, *, memory=None, slots_per_rank=12, kind=JoiningWorker, **changes
    ) -> None:
        self._make_harness = make_harness
        self._changes = changes
        self.workers = {}
        self.waiting_since = {}
        self.rejected = set()
        self.silent = set()
        """Names of workers whose messages wait, although their streams are open."""
        self.term = 1
        self.rejections = []
        """(worker, kind) of every Hello that was rejected."""
        self.harness = self._balancer(memory)
        for name, one in self.harness.workers.items():
            hello = replace(one.hello, slots_per_rank=slots_per_rank)
            self.workers[name] = kind(hello)
        self.harness.workers = self.workers
        self.harness.disconnected |= set(self.workers)
        self.connect()

    def _balancer(self, memory, *, term=1):
        harness = self._make_harness(memory=memory, term=term, **self._changes)
        harness.workers = self.workers or harness.workers
        return harness

    def succeed(self, memory=None, *, term=None):
        """Another balancer leads, which knows `memory` only; no worker has found it yet."""
        self.term = self.term + 1 if term is None else term
        before, self.harness = self.harness, self._balancer(memory, term=self.term)
        self.harness.now = before.now + 1.0
        self.harness.disconnected |= set(self.workers)
        self.rejected.clear()

    def connect(self, *names):
        for name in names or tuple(self.workers):
            worker = self.workers[name]
            if worker.alive:
                self._greet(worker)

    def _greet(self, worker):
        """Open a stream; a worker that is rejected tries again."""
        name = worker.hello.worker
        self.harness.disconnected.discard(name)
        self.rejected.discard(name)
        try:
            self.harness.hello(worker.greeting())
        except RejectedWorkerError as error:
            self.rejections.append((name, error.kind))
            self.harness.disconnected.add(name)
            self.rejected.add(name)

    def cut(self, name):
        """A stream breaks; messages on it are lost."""
        self.workers[name].answers = []
        self.rejected.discard(name)
        if name not in self.harness.disconnected:
            self.harness.disconnected.add(name)
            self.harness.lose(self.workers[name])

    def kill(self, name):
        self.workers[name].alive = False
        self.cut(name)

    def restart(self, name):
        self.kill(name)
        self.workers[name].restart()
        self.workers[name].alive = True
        self.connect(name)

    def live(self, *, seconds, forms=True):
        """Time passes: ranks form, notice what is broken, and say so."""
        for _ in range(round(seconds / 0.5)):
            for worker in self.workers.values():
                if worker.alive:
                    self._live(worker, forms=forms)
            self.harness.tick(seconds=0.5)

    def _live(self, worker, *, forms):
        name = worker.hello.worker
        if worker.join_epoch is not None:
            key = (name, worker.epoch)
            if not self._is_broken(worker):
                self.waiting_since.pop(key, None)
                if forms and not worker.serves:
                    worker.form()
            elif not worker.is_lost:
                since = self.waiting_since.setdefault(key, self.harness.now)
                if worker.serves or self.harness.now - since >= self.PATIENCE_S:
                    worker.fail("a peer is gone", unreached=self.unreached_by(worker))
        if name in self.rejected:
            self._greet(worker)
        if name in self.harness.disconnected | self.silent:
            return
        self.harness.say(worker, worker.heartbeat())
        answers, worker.answers = worker.answers, []
        for answer in answers:
            try:
                self.harness.say(worker, answer)
            except (InvalidMessageError, InvalidReportError) as error:
                rejected = self.harness.controller.reject(name, kind=error.kind, reason=str(error))
                self.harness.perform(rejected)

    def _is_broken(self, worker):
        """Whether a rank of its epoch is not in it."""
        for peer in worker.join_epoch.peers:
            other = self.workers[peer.worker]
            if not other.alive or other.join_epoch is None:
                return True
            if _content(other.join_epoch) != _content(worker.join_epoch):
                return True  # They compare it at the rendezvous.
            if other.is_lost:
                return True
        return False

    def unreached_by(self, worker):
        """Names of the peers that a rank whose group did not form could not connect to."""
        return ()

    @property
    def alive(self):
        return [worker for worker in self.workers.values() if worker.alive]

    def opened(self):
        """Epochs that the current balancer has recorded."""
        writes = self.harness.writes
        return [write.members.epoch for write in writes if isinstance(write, WriteMembership)]


def _content(join_epoch):
    return (
        join_epoch.epoch,
        [peer.worker for peer in join_epoch.peers],
        join_epoch.layout.generation,
        join_epoch.layout.expert_of_slot.tobytes(),
    )


def memory_of(writes, *, forgotten=0):
    """What a store recalls of these writes, without the last `forgotten` ones."""
    kept = [one for one in writes[: len(writes) - forgotten] if not isinstance(one, WriteAverage)]
    members = [one.members for one in kept if isinstance(one, WriteMembership)]
    layouts = [one.layout for one in kept if isinstance(one, WriteAdopted)]
    return PoolMemory(
        members=members[-1] if members else None,
        committed=layouts[-1] if layouts else None,
        next_generation=max((one.generation for one in layouts), default=0) + 1,
    )
