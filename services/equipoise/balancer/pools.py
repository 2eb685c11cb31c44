"""`Pools`: all pools that a balancer leads for one term, each run by its own task."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from opentelemetry.trace import Tracer

from equipoise.balancer.errors import UnknownPoolError
from equipoise.balancer.leadership.elector import Tenure
from equipoise.balancer.mailbox import Mailbox
from equipoise.balancer.persistence import restore
from equipoise.balancer.planner.planning import Planner
from equipoise.balancer.runner import Clock, PoolRunner
from equipoise.balancer.store.store import Store
from equipoise.balancer.wave_turns import WaveTurns
from equipoise.policy.book import PolicyBook
from equipoise.pool.controller import PoolController
from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.pool.journal import Journal
from equipoise.pool.pool import Pool
from equipoise.pool.records import PoolMemory
from equipoise.telemetry.logs import about
from equipoise.wire.messages import Hello

MAX_POOLS = 1024
"""Pools of one balancer; the bound keeps a peer from creating them without end."""

END_TIMEOUT_S = 3.0
"""Seconds that the pools of a term may take to end; then the next term begins without them."""

_View = TypeVar("_View")


class PoolView(Protocol):
    """A pool to read from, whether this balancer leads it or only remembers it."""

    @property
    def pool(self) -> Pool:
        """The pool, to be read only."""

    @property
    def closed(self) -> bool:
        """Whether watchers are to look for the pool again."""

    async def until_changed(self, revision: int) -> None:
        """Wait until the pool's revision differs from `revision`, or it is closed."""


class PoolViews(Protocol):
    """Pools to read from, by name."""

    def names(self) -> tuple[str, ...]:
        """All pools, sorted by name."""

    def find(self, name: str) -> PoolView:
        """A pool by its name, which may be empty if there is exactly one.

        Raises:
            UnknownPoolError: there is no such pool, or the name is empty and there are several.
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
    ) -> None:
        """`known` are the records that this process knows, by pool; a store may have lost them."""
        self._known = known
        self._store = store
        self._policies = policies
        self._clock = clock
        self._tenure = tenure
        self._tracer = tracer
        self._planner = planner
        self._wave_turns = WaveTurns()
        self._runners: dict[str, PoolRunner] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        for name in sorted({*await self._store.pools(), *self._known}):
            known = self._known.get(name)
            memory = await restore(self._store, name, known=known, term=self._tenure.term)
            self._register(name, self._runner(name, memory))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ending = tuple(self._tasks)
        for task in ending:
            task.cancel()
        if not ending:
            return
        # Bounded: a pool that hangs must not hold up the next term. It can do no harm: it has no
        # tenure, and the store fences its writes.
        _, late = await asyncio.wait(ending, timeout=END_TIMEOUT_S)
        for task in late:
            _log.error(
                "%s did not end within %g s of its term (it waits in %s): continuing without it",
                task.get_name(),
                END_TIMEOUT_S,
                " > ".join(_awaited(task.get_coro())),
            )

    async def admit(
        self, hello: Hello, mailbox: Mailbox, *, is_certified: bool = False
    ) -> PoolRunner:
        """Let a worker into its pool; the first worker creates the pool.

        `is_certified` says that its own credentials name it, and not only its pool.

        Raises:
            RejectedWorkerError: it cannot be in that pool.
        """
        runner = self._runners.get(hello.pool)
        if runner is None:
            if len(self._runners) >= MAX_POOLS:
                raise RejectedWorkerError(
                    "hello_too_many_pools",
                    f"worker {hello.worker}: this balancer has {MAX_POOLS} pools already: join "
                    f"one of them, or start another balancer",
                )
            fresh = self._runner(hello.pool, PoolMemory())
            fresh.admit(hello, mailbox)
            self._register(hello.pool, fresh)
            return fresh
        runner.admit(hello, mailbox, is_certified=is_certified)
        return runner

    def reject_worker(self, pool: str, worker: str, *, kind: str, reason: str) -> None:
        """Count a rejected worker, in its pool if that exists."""
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
        """All pools, sorted by name."""
        return tuple(sorted(self._runners))

    def find(self, name: str) -> PoolRunner:
        """A pool by its name, which may be empty if there is exactly one.

        Raises:
            UnknownPoolError: there is no such pool, or the name is empty and there are several.
        """
        return pick(self._runners, name)

    @property
    def term(self) -> int:
        """Term of the leader of these pools."""
        return self._tenure.term

    async def until_confirmed(self) -> bool:
        """Wait until the lease was renewed after this call; False if the term ended instead."""
        return await self._tenure.until_confirmed()

    def _runner(self, name: str, memory: PoolMemory) -> PoolRunner:
        return PoolRunner(
            PoolController(name, policies=self._policies, memory=memory),
            store=self._store,
            tenure=self._tenure,
            planner=self._planner,
            wave_turns=self._wave_turns,
            clock=self._clock,
            tracer=self._tracer,
        )

    def _register(self, name: str, runner: PoolRunner) -> None:
        self._runners[name] = runner
        task = asyncio.create_task(runner.run(), name=f"pool {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("%s failed", task.get_name(), exc_info=task.exception())


def pick(pools: Mapping[str, _View], name: str) -> _View:
    """Return a pool by its name, which may be empty if there is exactly one.

    Raises:
        UnknownPoolError: there is no such pool, or the name is empty and there are several.
    """
    if not name and len(pools) == 1:
        return next(iter(pools.values()))
    found = pools.get(name)
    if found is not None:
        return found
    if not pools:
        raise UnknownPoolError("there is no pool yet: start workers with this balancer's address")
    known = ", ".join(sorted(pools))
    if not name:
        raise UnknownPoolError(f"there are several pools, name one of them: {known}")
    raise UnknownPoolError(f"there is no pool {name!r}; there are: {known}")


def _awaited(coroutine: Any) -> Iterator[str]:
    """Names of a coroutine and of those that it awaits, outermost first."""
    while hasattr(coroutine, "cr_await"):
        yield coroutine.__name__
        coroutine = coroutine.cr_await
