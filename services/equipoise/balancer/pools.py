"""`Pools`: all pools that a balancer leads for one term, each run by its own task."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from opentelemetry.trace import Tracer

from equipoise.balancer.clock import Clock
from equipoise.balancer.errors import UnknownPoolError
from equipoise.balancer.leadership.elector import Tenure
from equipoise.balancer.loop_share import LoopShares
from equipoise.balancer.mailbox import Mailbox
from equipoise.balancer.persistence import restore
from equipoise.balancer.planner.planning import Planner
from equipoise.balancer.pool_writes import question_tenure
from equipoise.balancer.runner import PoolRunner
from equipoise.balancer.store.store import Store, StoreError, UnreadablePoolError
from equipoise.balancer.unreadable import POOL_UNREADABLE, UnreadablePools
from equipoise.balancer.wave_turns import WaveTurns
from equipoise.planning.redundancy import Redundancy
from equipoise.policy.book import PolicyBook
from equipoise.pool.controller import PoolController
from equipoise.pool.counters import WRITE_TIMEOUT_S
from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.pool.journal import Journal
from equipoise.pool.pool import Pool
from equipoise.pool.records import PoolMemory
from equipoise.telemetry.logs import about
from equipoise.wire import checks
from equipoise.wire.messages import Hello

MAX_POOLS = 1024
"""Pools of one balancer; the bound keeps a peer from creating them without end. At the bound, a new
pool takes the place of the one that has had no workers for longest, and no hold of an operator."""

KEEP_POOL_S = 3600.0
"""Seconds that a pool is kept after its last worker left, or this term began. Workers of a fleet
that restarts come back within minutes."""

REREAD_S = 5.0
"""Interval at which pools that could not be read are read again."""

END_TIMEOUT_S = 3.0
"""Seconds that the pools of a term may take to end; then the next term begins without them."""

_View = TypeVar("_View")


class PoolView(Protocol):
    """A pool to read from, whether this balancer leads it or only remembers it."""

    @property
    def pool(self) -> Pool:
        """The pool, to be read only."""

    @property
    def redundancy(self) -> Redundancy | None:
        """A number of redundant slots that would suit it better, as far as plans have shown."""

    @property
    def closed(self) -> bool:
        """Whether watchers are to look for the pool again."""

    async def until_changed(self, revision: int) -> None:
        """Wait until the pool's revision differs from `revision`, or it is closed."""


class PoolViews(Protocol):
    """Pools to read from, by name."""

    def names(self) -> tuple[str, ...]:
        """All pools that can be read, sorted by name."""

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Why each of the other pools cannot be read."""

    def find(self, name: str) -> PoolView:
        """A pool by its name, which may be empty if there is exactly one.

        Raises:
            UnknownPoolError: there is no such pool, or the name is empty and there are several.
            UnreadablePoolError: its records cannot be read.
        """


_log = logging.getLogger(__name__)


class Pools:
    """Pools by name, those of the store from the start. Used as an asynchronous context."""

    def __init__(
        self,
        *,
        store: Store,
        policies: PolicyBook,
        clock: Clock,
        tenure: Tenure,
        planner: Planner,
        tracer: Tracer,
        known: Mapping[str, Journal],
        unreadable: UnreadablePools,
        loop_shares: LoopShares,
    ) -> None:
        """`known` are the records that this process knows, by pool; a store may have lost them."""
        self._known = known
        self._unreadable = unreadable
        self._loop_shares = loop_shares
        self._store = store
        self._policies = policies
        self._clock = clock
        self._tenure = tenure
        self._tracer = tracer
        self._planner = planner
        self._wave_turns = WaveTurns()
        self._runners: dict[str, PoolRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._creating = asyncio.Lock()

    async def __aenter__(self) -> Self:
        names = frozenset({*await self._store.pools(), *self._known})
        self._unreadable.retain(names)
        runners = {name: await self._restored(name) for name in sorted(names)}
        for name, runner in runners.items():  # None runs unless the store can be read.
            if runner is not None:
                self._register(name, runner)
        self._rereading = asyncio.create_task(self._reread(), name="reading pools again")
        self._rereading.add_done_callback(_report_failure)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await _ended((*self._tasks.values(), self._rereading))

    async def admit(
        self, hello: Hello, mailbox: Mailbox, *, is_certified: bool = False
    ) -> PoolRunner | None:
        """Let a worker into its pool; the first worker creates the pool.

        `is_certified` says that its own credentials name it, and not only its pool.

        Returns None if the term ended before there was room for the pool.

        Raises:
            RejectedWorkerError: it cannot be in that pool, or the pool cannot be read.
        """
        if reason := self.unreadable.get(hello.pool):
            raise RejectedWorkerError(POOL_UNREADABLE, reason)
        if hello.pool not in self._runners:
            async with self._creating:
                if hello.pool not in self._runners:
                    return await self._create(hello, mailbox)
        runner = self._runners[hello.pool]
        runner.admit(hello, mailbox, is_certified=is_certified)
        return runner

    def reject_worker(self, pool: str, worker: str, *, kind: str, reason: str) -> None:
        """Count a rejected worker, in its pool if that exists."""
        if kind == POOL_UNREADABLE:
            return  # The log has the reason already.
        runner = self._runners.get(pool)
        if runner is None:
            _log.warning("rejected (%s): %s", kind, reason, extra=about(pool=pool, worker=worker))
        else:
            runner.reject_stream(worker, kind=kind, reason=reason)

    def close_streams(self) -> None:
        """End the streams of all workers and watchers, which would outlive any grace period."""
        for runner in self._runners.values():
            runner.close_streams()

    def names(self) -> tuple[str, ...]:
        """All pools that can be read, sorted by name."""
        return tuple(sorted(self._runners))

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Why each of the other pools cannot be read."""
        return self._unreadable.reasons

    def find(self, name: str) -> PoolRunner:
        """A pool by its name, which may be empty if there is exactly one.

        Raises:
            UnknownPoolError: there is no such pool, or the name is empty and there are several.
            UnreadablePoolError: its records cannot be read.
        """
        return pick(self._runners, name, unreadable=self.unreadable)

    @property
    def term(self) -> int:
        """Term of the leader of these pools."""
        return self._tenure.term

    async def until_confirmed(self) -> bool:
        """Wait until the lease was renewed after this call; False if the term ended instead."""
        return await self._tenure.until_confirmed()

    async def _create(self, hello: Hello, mailbox: Mailbox) -> PoolRunner | None:
        runner = self._runner(hello.pool, PoolMemory())
        runner.admit(hello, mailbox)
        while len(self._runners) + len(self.unreadable) >= MAX_POOLS:
            await self._forget(self._oldest_empty(for_worker=hello.worker))
        if not self._tenure.holds():
            return None
        self._register(hello.pool, runner)
        return runner

    def _oldest_empty(self, *, for_worker: str) -> str:
        """The pool that gives way to a new one.

        Raises:
            RejectedWorkerError: all are kept.
        """
        latest_s = self._clock() - KEEP_POOL_S
        empty = [
            (runner.empty_since_s, name)
            for name, runner in sorted(self._runners.items())
            if runner.empty_since_s is not None
            and runner.empty_since_s <= latest_s
            and not runner.pool.journal.hold.reason
        ]
        if not empty:
            raise RejectedWorkerError(
                "hello_too_many_pools",
                f"worker {for_worker}: this balancer has {len(self._runners)} pools, its "
                "maximum, and each has had workers within the last hour or is held by an operator: "
                "join one of them, or start another balancer",
            )
        return min(empty)[1]

    async def _forget(self, name: str) -> None:
        """Drop a pool without workers here and in the store."""
        runner, task = self._runners.pop(name), self._tasks.pop(name)
        empty_s = self._clock() - (runner.empty_since_s or 0.0)
        _log.warning(
            "dropped pool %s: it had no workers for %.0f s, and a new pool needs its place",
            *(name, empty_s),
            extra=about(pool=name),
        )
        runner.close_streams()
        # Before the store forgets it, so that it writes nothing afterwards.
        await _ended((task,))
        self._wave_turns.forget(name)
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._store.forget(name, term=self._tenure.term)
        except (StoreError, TimeoutError) as error:
            _log.warning("pool %s is still in the store until the next term: %s", name, error)

    async def _restored(self, name: str) -> PoolRunner | None:
        """A pool as the store has it; None if that cannot be read.

        Raises:
            StoreError: the store cannot be used.
        """
        with self._unreadable.noting(name):
            known, term = self._known.get(name), self._tenure.term
            return self._runner(name, await restore(self._store, name, known=known, term=term))
        return None

    async def _reread(self) -> None:
        """Read unreadable pools again at intervals, so that a repair needs no restart."""
        while True:
            await asyncio.sleep(REREAD_S)
            for name in tuple(self.unreadable):
                try:
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        runner = await self._restored(name)
                except TimeoutError:
                    break
                except StoreError as error:
                    question_tenure(self._tenure, error)
                    break
                if runner is not None and self._tenure.holds():
                    self._register(name, runner)

    def _runner(self, name: str, memory: PoolMemory) -> PoolRunner:
        return PoolRunner(
            PoolController(name, policies=self._policies, memory=memory, term=self.term),
            store=self._store,
            tenure=self._tenure,
            planner=self._planner,
            wave_turns=self._wave_turns,
            loop_shares=self._loop_shares,
            clock=self._clock,
            tracer=self._tracer,
        )

    def _register(self, name: str, runner: PoolRunner) -> None:
        self._runners[name] = runner
        self._tasks[name] = asyncio.create_task(runner.run(), name=f"pool {name}")
        self._tasks[name].add_done_callback(_report_failure)


async def _ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel the tasks of pools and wait until they have ended.

    Bounded: a pool that hangs must not hold up the next term. It can do no harm: it has no tenure,
    and the store fences its writes.
    """
    ending = [task for task in tasks if not task.done()]
    for task in ending:
        task.cancel()
    if not ending:
        return
    _, late = await asyncio.wait(ending, timeout=END_TIMEOUT_S)
    for task in late:
        _log.error(
            "%s did not end within %g s of its term (it is waiting in %s): continuing without it",
            task.get_name(),
            END_TIMEOUT_S,
            " > ".join(_awaited(task.get_coro())),
        )


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("%s failed", task.get_name(), exc_info=task.exception())


def pick(pools: Mapping[str, _View], name: str, *, unreadable: Mapping[str, str]) -> _View:
    """Return a pool by its name, which may be empty if there is exactly one.

    Raises:
        UnknownPoolError: there is no such pool, or the name is empty and there are several.
        UnreadablePoolError: it is one of those that are `unreadable`, for the reason there.
    """
    names = sorted({*pools, *unreadable})
    if not name and len(names) == 1:
        name = names[0]
    if name in unreadable:
        raise UnreadablePoolError(unreadable[name])
    found = pools.get(name)
    if found is not None:
        return found
    if not names:
        raise UnknownPoolError(
            "there is no pool yet: start workers, or an engine with the plugin, with this "
            "balancer's address"
        )
    known = ", ".join(names)
    if not name:
        raise UnknownPoolError(f"there are several pools, name one of them: {known}")
    raise UnknownPoolError(f"there is no pool {checks.shorten(name)}; known pools: {known}")


def _awaited(coroutine: Any) -> Iterator[str]:
    """Names of a coroutine and of those that it awaits, outermost first."""
    while hasattr(coroutine, "cr_await"):
        yield coroutine.__name__
        coroutine = coroutine.cr_await
