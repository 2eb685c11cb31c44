"""`Quarantine`: workers that get no rank because they do not fit the pool.

Two kinds: a worker whose slots hold other bytes than the checkpoint, until it restarts; and a
worker whose shape, kernels or checkpoint are not the pool's, as long as that is so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from equipoise.pool.counters import Rejections
from equipoise.pool.effects import Chain, Effect, Log, Send
from equipoise.pool.member import Member
from equipoise.pool.members import Roster
from equipoise.pool.odd_workers import odd_workers
from equipoise.wire.balancer_messages import Rejection
from equipoise.wire.messages import Hello

MAX_GONE = 64
"""Quarantined workers that are remembered although they are not connected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedWorker:
    """A worker that gets no rank."""

    worker: str
    """Its name."""

    boot_id: str
    """The process that is quarantined; another one of the same name is not."""

    reason: str
    """Why."""

    since_s: float
    """Since when, in unix seconds."""

    until_restart: bool
    """Whether only a restart ends it: it reported wrong bytes."""


class Quarantine:
    """The quarantined workers of one pool."""

    def __init__(self, *, roster: Roster, rejections: Rejections) -> None:
        self._roster = roster
        self._rejections = rejections
        self._workers: dict[str, QuarantinedWorker] = {}
        self._is_stale = True

    @property
    def workers(self) -> Sequence[QuarantinedWorker]:
        """All quarantined workers."""
        return tuple(self._workers.values())

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why each is quarantined, by name."""
        return {name: one.reason for name, one in self._workers.items()}

    def look_again(self) -> None:
        """Members changed: most workers may be others."""
        self._is_stale = True

    def note_bytes(self, member: Member, reason: str, *, now: float) -> Chain:
        """A worker holds, or reports, wrong bytes."""
        known = self._workers.get(member.name)
        if known is not None and known.until_restart:
            return ()
        self._rejections.count("wrong_bytes", f"{member.name}: {reason}")
        return self._put(member, reason, until_restart=True, now=now)

    def note_hello(self, hello: Hello) -> Chain:
        """A worker connected; if its process is another one, its quarantine ends."""
        self.look_again()
        known = self._workers.get(hello.worker)
        if known is None or known.boot_id == hello.boot_id:
            return ()
        del self._workers[hello.worker]
        text = f"worker {hello.worker} restarted and is no longer quarantined"
        return (Log(text=text, worker=hello.worker),)

    def follow_majority(self, *, now: float) -> Chain:
        """Quarantine workers that differ from most of the pool, and release those that match.

        One that is released waits for others like a new one: those that it differed from may only
        be restarting.

        It runs at every tick, so it looks only if members have changed.
        """
        if not self._is_stale:
            return ()
        self._is_stale = False
        gone = [name for name in self._workers if name not in self._roster.members]
        for name in gone[:-MAX_GONE]:
            del self._workers[name]
        odd = odd_workers(self._roster)
        effects: list[Effect] = []
        for name, known in list(self._workers.items()):
            if not known.until_restart and name not in odd:
                del self._workers[name]
                if name in self._roster.members:
                    self._roster.members[name].wait_from(now=now)
                text = f"worker {name} is no longer quarantined: it fits the pool"
                effects.append(Log(text=text, worker=name))
        for name, one in odd.items():
            if name in self._workers:
                self._update(name, one.reason)
            else:
                self._rejections.count(one.kind, f"{name}: {one.reason}")
                member = self._roster.members[name]
                effects += self._put(member, one.reason, until_restart=False, now=now)
        return tuple(effects)

    def _update(self, name: str, reason: str) -> None:
        """The worker differs from most workers of now, who may be others than those before."""
        known = self._workers[name]
        if not known.until_restart:
            self._workers[name] = replace(known, reason=reason)

    def _put(self, member: Member, reason: str, *, until_restart: bool, now: float) -> Chain:
        boot_id = member.hello.boot_id
        self._workers[member.name] = QuarantinedWorker(
            worker=member.name,
            boot_id=boot_id,
            reason=reason,
            since_s=now,
            until_restart=until_restart,
        )
        text = f"worker {member.name} (boot {boot_id}) is quarantined: {reason}"
        return (
            Log(text=text, is_warning=True, worker=member.name, epoch=self._roster.epoch),
            Send(worker=member.name, message=Rejection(reason=text, fatal=False)),
        )
