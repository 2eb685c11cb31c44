"""`StoreServer`: the shared store and lease in memory; `SimStore`: its client.

It obeys the contract of `Store` (tests/balancer/test_store.py runs against it) and behaves as the
Redis store does: contents have an incarnation that every step checks, and every write a term. It
can be down, hang, be full, forget everything, or go back by a few writes, as a failover does.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from equipoise.balancer.store.store import (
    MAX_AUDIT_ENTRIES,
    MAX_DECISIONS,
    MAX_LAYOUTS,
    StoreAheadError,
    StoreConflictError,
    StoreError,
    StoreFault,
    TermOverError,
)
from equipoise.planning.layout import Layout
from equipoise.pool.records import (
    MAX_AUDIT,
    AuditRecord,
    AverageRecord,
    DecisionRecord,
    EpochMembers,
    ForgottenRecords,
    Hold,
    PoolMemory,
)

TIMEOUT_S = 2.0
NUM_POLLS = 8
NAME = "store"

Data = dict[Any, Any]


class StoreServer:
    """The contents, and what is wrong with the server."""

    def __init__(self) -> None:
        self.data: Data = {}
        self.is_down = self.hangs = self.is_full = False
        self.answers_late = False
        """Whether writes are applied, but their answers arrive after their timeout."""
        self.num_losses = 0
        """How often contents were lost, wholly or in part."""
        self.num_failovers = 0
        self._before: deque[Data] = deque(maxlen=8)
        self.before_term: Data = {}
        """The contents before the latest fence."""
        self._num_incarnations = 0
        self.on_effect: Callable[[str], None] = lambda _kind: None
        self.on_write: Callable[[Data, Data], None] = lambda _before, _after: None

    def forget(self) -> bool:
        """Lose everything (FLUSHALL, an emptied disk); whether there was anything."""
        lost, self.data = self.data, {}
        self._before.clear()
        self.num_losses += 1
        return bool(lost)

    def go_back(self, num_writes: int) -> bool:
        """Lose the latest writes (a replica that lagged was promoted); whether there were any."""
        lost = [self._before.pop() for _ in range(min(num_writes, len(self._before)))]
        return self.fail_over(lost[-1] if lost else self.data)

    def fail_over(self, data: Data) -> bool:
        """Continue with what the contents were at some time; whether that loses any."""
        lost, self.data = self.data, data
        self.num_losses += 1
        self.num_failovers += 1
        return lost is not data

    def open(self) -> int:
        """The incarnation of the contents, which begin with it."""
        if "incarnation" not in self.data:
            self._num_incarnations += 1
            self.data = {**self.data, "incarnation": self._num_incarnations, "term": 0, "server": 0}
        return int(self.data["incarnation"])

    def write(self, change: Callable[[Data], Any]) -> Any:
        """Apply a change wholly or, if it raises, not at all."""
        if self.is_full:
            self.on_effect("store_full")
            raise StoreError("the store is full: free memory", fault=StoreFault.FULL)
        after = dict(self.data)
        result = change(after)
        before, self.data = self.data, after
        self._before.append(before)
        if before.get("term") != after.get("term"):
            self.before_term = before
        self.on_write(before, after)
        return result


class Link:
    """The network between a client and the server; ideal unless a subclass says otherwise."""

    def carry(self, request: Callable[[], None]) -> None:
        """Let the server carry out a request, now or later: even if its client has given up."""
        request()

    def answer(self, deliver: Callable[[], None]) -> None:
        """Bring an answer back, now or later."""
        deliver()


class Client:
    """One end of the network to the server, with a timeout on every request."""

    def __init__(self, server: StoreServer, link: Link) -> None:
        self._server, self._link = server, link

    async def request(self, step: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        is_late = False

        def deliver(result: Any, error: Exception | None) -> None:
            if not answer.done():
                answer.set_result((result, error))

        def expire() -> None:
            nonlocal is_late
            is_late = True  # Even if a process that was paused finds the answer, too.
            deliver(None, None)

        def carry_out() -> None:
            result, fault = None, None
            try:
                if self._server.is_down:
                    self._server.on_effect("store_down")
                    raise StoreError("the store refuses connections: start it")  # noqa: TRY301
                result = step()
            except StoreError as error:
                fault = error
            self._link.answer(lambda: deliver(result, fault))

        timer = loop.call_later(TIMEOUT_S, expire)
        try:
            self._link.carry(carry_out)
            result, error = await answer
        finally:
            timer.cancel()
        if is_late:
            raise _timed_out()
        if error is not None:
            raise error
        return result


def _timed_out() -> StoreError:
    return StoreError(f"the store did not answer within {TIMEOUT_S:g} s", fault=StoreFault.SLOW)


class SimStore(Client):
    """A `Store`."""

    def __init__(self, server: StoreServer, link: Link | None = None) -> None:
        super().__init__(server, link or Link())
        self._incarnation: int | None = None

    def reopen(self) -> None:
        self._incarnation = None

    async def _checked(self, step: Callable[[], Any]) -> Any:
        """Carry out a step on the contents that are known as it is sent, and on no others."""
        known = self._incarnation

        def checked() -> Any:
            opened = self._server.open() if known is None else known
            if self._server.data.get("incarnation") != opened:
                raise StoreError("the store lost its contents", fault=StoreFault.LOST)
            self._incarnation = opened
            return step()

        return await self.request(checked)

    async def _read(self, read: Callable[[Data], Any]) -> Any:
        return await self._checked(lambda: read(self._server.data))

    async def _write(self, change: Callable[[Data], Any], *, term: int) -> Any:
        result = await self._checked(
            lambda: self._server.write(lambda data: self._fenced(data, change, term))
        )
        await self._answered()
        return result

    async def _answered(self) -> None:
        """Wait for a late answer; raises StoreError if it takes too long."""
        for _ in range(NUM_POLLS):
            if not self._server.answers_late:
                return
            self._server.on_effect("store_answers_late")
            await asyncio.sleep(TIMEOUT_S / NUM_POLLS)
        raise _timed_out()

    def _fenced(self, data: Data, change: Callable[[Data], Any], term: int) -> Any:
        if (term, self._server.num_failovers) != (data["term"], data["server"]):
            raise TermOverError(store=NAME, term=term, highest_term=data["term"])
        return change(data)

    async def highest_term(self) -> int:
        return await self._read(lambda data: data["term"])

    async def fence(self, *, term: int) -> None:
        def change(data: Data) -> None:
            if term <= data["term"]:
                raise TermOverError(store=NAME, term=term, highest_term=data["term"])
            data["term"], data["server"] = term, self._server.num_failovers

        await self._checked(lambda: self._server.write(change))
        await self._answered()

    async def pools(self) -> tuple[str, ...]:
        return await self._read(lambda data: tuple(sorted(_pools(data))))

    async def forget(self, pool: str, *, term: int) -> None:
        def change(data: Data) -> None:
            for key in [key for key in data if isinstance(key, tuple) and key[1] == pool]:
                del data[key]

        await self._write(change, term=term)

    async def put_proposed(self, pool: str, layout: Layout, *, term: int) -> None:
        def change(data: Data) -> None:
            known = data.get(("layout", pool, layout.generation))
            if known is not None and known.same_placement(layout):
                return
            highest = data.get(("highest", pool), 0)
            if layout.generation <= highest:
                raise StoreConflictError(
                    f"pool {pool}: generation {layout.generation} was used before, the next is "
                    f"{highest + 1}"
                )
            _keep(data, pool, layout)

        await self._write(change, term=term)

    async def commit(self, pool: str, generation: int, *, previous: int | None, term: int) -> None:
        def change(data: Data) -> None:
            committed = data.get(("committed", pool))
            if committed == generation:
                return
            if committed != previous:
                raise StoreConflictError(
                    f"pool {pool}: generation {generation} must follow {previous}, but "
                    f"{committed} is committed"
                )
            if ("layout", pool, generation) not in data:
                raise StoreConflictError(f"pool {pool}: generation {generation} was never proposed")
            _commit(data, pool, generation)

        await self._write(change, term=term)

    async def adopt(self, pool: str, layout: Layout, *, term: int) -> None:
        def change(data: Data) -> None:
            data["committed", pool] = layout.generation
            _keep(data, pool, layout)
            _commit(data, pool, layout.generation)

        await self._write(change, term=term)

    async def recall(self, pool: str) -> PoolMemory:
        def read(data: Data) -> PoolMemory:
            committed = data.get(("committed", pool))
            newest = max(_generations(data, pool), default=0)
            is_newer = newest > (committed or 0)
            return PoolMemory(
                committed=data.get(("layout", pool, committed)),
                proposed=data["layout", pool, newest] if is_newer else None,
                next_generation=data.get(("highest", pool), 0) + 1,
                members=data.get(("members", pool)),
                averages={
                    key[2]: value
                    for key, value in data.items()
                    if key[0] == "average" and key[1] == pool
                },
                last_decision=next(iter(_newest(data, "decisions", pool, 1)), None),
                hold=data.get(("hold", pool), Hold()),
                audit=_newest(data, "audit", pool, MAX_AUDIT),
                last_audit=data.get(("num", pool, "audit"), 0),
            )

        return await self._read(read)

    async def layout(self, pool: str, generation: int) -> Layout | None:
        return await self._read(lambda data: data.get(("layout", pool, generation)))

    async def put_membership(self, pool: str, members: EpochMembers, *, term: int) -> None:
        def change(data: Data) -> None:
            latest = data.get(("members", pool))
            if latest is not None and latest.epoch > members.epoch:
                raise StoreConflictError(
                    f"pool {pool}: epoch {members.epoch} is over, the latest is {latest.epoch}"
                )
            data["members", pool] = members
            _know(data, pool)

        await self._write(change, term=term)

    async def put_average(self, pool: str, name: str, record: AverageRecord, *, term: int) -> None:
        def change(data: Data) -> None:
            data["average", pool, name] = record
            _know(data, pool)

        await self._write(change, term=term)

    async def add_decision(
        self, pool: str, decision: DecisionRecord, *, term: int
    ) -> DecisionRecord:
        def change(data: Data) -> DecisionRecord:
            return _append(data, "decisions", pool, decision, limit=MAX_DECISIONS)

        return await self._write(change, term=term)

    async def decisions(self, pool: str, *, limit: int) -> tuple[DecisionRecord, ...]:
        return await self._read(lambda data: _newest(data, "decisions", pool, limit))

    async def commits(self, pool: str) -> tuple[int, ...]:
        def read(data: Data) -> tuple[int, ...]:
            kept = set(_generations(data, pool))
            return tuple(sorted(kept & set(data.get(("commits", pool), ()))))

        return await self._read(read)

    async def add_audit(
        self, pool: str, record: AuditRecord, *, hold: Hold | None, after: int, term: int
    ) -> AuditRecord:
        def change(data: Data) -> AuditRecord:
            _check_audit(data, pool, after)
            if hold is not None:
                data["hold", pool] = hold
            return _append(data, "audit", pool, record, limit=MAX_AUDIT_ENTRIES)

        return await self._write(change, term=term)

    async def audit(self, pool: str, *, limit: int) -> tuple[AuditRecord, ...]:
        return await self._read(lambda data: _newest(data, "audit", pool, limit))

    async def restore(self, pool: str, lost: ForgottenRecords, *, term: int) -> None:
        def change(data: Data) -> None:
            _know(data, pool)
            _check_audit(data, pool, lost.after)
            for record in lost.audit:
                _put_back(data, "audit", pool, record, limit=MAX_AUDIT_ENTRIES)
            if lost.decision is not None:
                _put_back(data, "decisions", pool, lost.decision, limit=MAX_DECISIONS)
            if lost.hold is not None:
                data["hold", pool] = lost.hold
            if lost.members is not None:
                data["members", pool] = max(
                    lost.members, data.get(("members", pool), lost.members), key=lambda m: m.epoch
                )
            highest = data.get(("highest", pool), 0)
            data["highest", pool] = max(lost.next_generation - 1, highest)

        await self._write(change, term=term)

    async def close(self) -> None:
        pass


def _check_audit(data: Data, pool: str, after: int) -> None:
    if data.get(("num", pool, "audit"), 0) != after:
        raise StoreAheadError(f"pool {pool}: the store has audit records that are not known")


def _know(data: Data, pool: str) -> None:
    data["pool", pool] = True


def _pools(data: Data) -> list[str]:
    return [key[1] for key in data if key[0] == "pool"]


def _generations(data: Data, pool: str) -> list[int]:
    return [key[2] for key in data if key[0] == "layout" and key[1] == pool]


def _keep(data: Data, pool: str, layout: Layout) -> None:
    _know(data, pool)
    data["layout", pool, layout.generation] = layout
    data["highest", pool] = max(layout.generation, data.get(("highest", pool), 0))
    committed = data.get(("committed", pool))
    for generation in sorted(_generations(data, pool))[:-MAX_LAYOUTS]:
        if generation != committed:
            del data["layout", pool, generation]


def _commit(data: Data, pool: str, generation: int) -> None:
    data["committed", pool] = generation
    kept = set(_generations(data, pool)) | {generation}
    known = (*data.get(("commits", pool), ()), generation)
    data["commits", pool] = tuple(sorted(set(known) & kept))


def _append(data: Data, kind: str, pool: str, record: Any, *, limit: int) -> Any:
    _know(data, pool)
    numbered = replace(record, sequence=data.get(("num", pool, kind), 0) + 1)
    _put_back(data, kind, pool, numbered, limit=limit)
    return numbered


def _put_back(data: Data, kind: str, pool: str, record: Any, *, limit: int) -> None:
    """Append a record that has its number, unless the store has a later one."""
    if record.sequence > data.get(("num", pool, kind), 0):
        data["num", pool, kind] = record.sequence
        data[kind, pool] = (*data.get((kind, pool), ()), record)[-limit:]


def _newest(data: Data, kind: str, pool: str, limit: int) -> tuple[Any, ...]:
    return tuple(reversed(data.get((kind, pool), ())))[: max(0, limit)]
