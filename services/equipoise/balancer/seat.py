"""`Seat`: the pools that this balancer answers with, whether it leads or follows.

It owns the change between the two: the store is fenced before a new term reads it, and all streams
end with a term, so that workers and watchers find the next leader.
"""

import asyncio
import logging

from opentelemetry.trace import Tracer

from equipoise.balancer.archive import Archive
from equipoise.balancer.changed import Changed
from equipoise.balancer.clock import Clock
from equipoise.balancer.leadership.elector import Elector, Tenure
from equipoise.balancer.loop_share import LoopShares
from equipoise.balancer.planner.planning import Planner
from equipoise.balancer.pool_writes import question_tenure
from equipoise.balancer.pools import Pools, PoolViews
from equipoise.balancer.readiness import Readiness
from equipoise.balancer.store.store import Store, StoreError, StoreFault, TermOverError
from equipoise.balancer.unreadable import UnreadablePools
from equipoise.policy.book import PolicyBook
from equipoise.pool.counters import Timeout
from equipoise.telemetry.logs import is_worth_logging

REFRESH_S = 2.0
"""Seconds between two reads of the store by a follower."""

_log = logging.getLogger(__name__)


class Seat:
    """Follows, leads, follows again. For one event loop."""

    def __init__(
        self,
        *,
        store: Store,
        policies: PolicyBook,
        clock: Clock,
        elector: Elector,
        readiness: Readiness,
        planner: Planner,
        tracer: Tracer,
    ) -> None:
        self._store = store
        self._policies = policies
        self._clock = clock
        self._elector = elector
        self._readiness = readiness
        self._planner = planner
        self._tracer = tracer
        self._unreadable = UnreadablePools()
        self.loop_shares = LoopShares()
        """How much of the event loop's time each pool takes, over all terms."""
        self._archive = Archive(store=store, policies=policies, unreadable=self._unreadable)
        self._led: Pools | None = None
        self._changed = Changed()
        self._settled = asyncio.Event()
        self.store_fault = ""
        """Why the latest read of the store failed; empty if it did not."""
        self._num_unread = 0
        """Reads of the store that have failed since one succeeded."""

    @property
    def pools(self) -> PoolViews:
        """What to read from: the pools this balancer leads, else those the store remembers."""
        return self._led or self._archive

    @property
    def policies(self) -> PolicyBook:
        """The policies in force, and the latest rejected one."""
        return self._policies

    @property
    def led(self) -> Pools | None:
        """The pools that this balancer leads right now, for workers to join."""
        return self._led if self._elector.leads() else None

    async def until_led_differs(self, known: Pools | None) -> None:
        """Wait until `led` is not `known`: a lease alone accepts no workers."""
        while self.led is known:
            state = self._elector.state
            changes = (self._until_pools_differ(self._led), self._elector.until_changed(state))
            tasks = {asyncio.ensure_future(change) for change in changes}
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()

    @property
    def highest_term(self) -> int:
        """Highest term of a leader that this balancer has seen."""
        return self._elector.state.highest_term

    @property
    def leader_address(self) -> str | None:
        """host:port of the balancer that leads, if another does and it is known."""
        return self._elector.state.leader_address or None

    @property
    def timeouts(self) -> tuple[Timeout, ...]:
        """The waits of the election, which belong to no pool."""
        return self._elector.timeouts

    @property
    def elsewhere(self) -> str:
        """Why this balancer does not lead, and where the leader is."""
        if self.not_ready:
            return f"this balancer accepts no workers yet: {self.not_ready}"
        if self.leader_address:
            return f"this balancer follows the leader at {self.leader_address}: connect there"
        return f"no balancer leads now ({self._elector.state.reason}): try again in a moment"

    async def _until_pools_differ(self, known: Pools | None) -> None:
        while self._led is known:
            await self._changed.wait()

    async def open(self) -> None:
        """Read the store once, so that a balancer that cannot use it does not start.

        Raises:
            StoreError: the store cannot be reached, rejects the balancer, or has contents that are
                not valid. One that is only slow is read again later.
        """
        try:
            await self._archive.refresh(elsewhere=self.elsewhere)
        except StoreError as error:
            if error.fault is not StoreFault.SLOW:
                raise
            self.store_fault = str(error)
            _log.warning("the status may be outdated: %s", error)

    @property
    def not_ready(self) -> str:
        """Why this balancer can accept no workers yet; empty when it can."""
        return self._readiness.missing

    async def look_on(self) -> None:
        """Show what the store has, without a candidacy, until ready."""
        ready = asyncio.create_task(self._readiness.until_ready())
        try:
            while not ready.done():
                await self._refresh()
                await asyncio.wait({ready}, timeout=REFRESH_S)
        finally:
            ready.cancel()

    async def until_settled(self) -> None:
        """Wait until the first election has shown whether this balancer leads."""
        await self._settled.wait()

    def close_streams(self) -> None:
        """The balancer stops: end the streams of workers and watchers."""
        self._archive.close_streams()
        if self._led is not None:
            self._led.close_streams()

    async def run(self) -> None:
        """Follow and lead, until cancelled."""
        while True:
            tenure = await self._follow()
            try:
                await self._lead(tenure)
            except TermOverError as error:
                tenure.outranked(error.highest_term)
            except StoreError as error:
                self.store_fault = str(error)
                _log.error("term %d ends: %s", tenure.term, error)
                question_tenure(tenure, error)
                tenure.give_up(str(error))  # Unless that has ended it.
            except Exception:  # noqa: BLE001
                # A bug must not keep the lease from a balancer that can lead.
                _log.exception("term %d failed", tenure.term)
                tenure.give_up("an internal error; see the log of this balancer")
            finally:
                self._settled.set()

    async def _follow(self) -> Tenure:
        """Keep the archive fresh until elected, which is not to wait for a slow store."""
        await self._elector.until_looked()
        refreshing = asyncio.create_task(self._keep_fresh())
        try:
            return await self._elector.tenure()
        finally:
            refreshing.cancel()
            await asyncio.wait({refreshing})

    async def _keep_fresh(self) -> None:
        self._settled.set()
        while True:
            await self._refresh()
            await asyncio.sleep(REFRESH_S)

    async def _refresh(self) -> None:
        try:
            await self._archive.refresh(elsewhere=self.elsewhere)
            self.store_fault, self._num_unread = "", 0
        except StoreError as error:
            self.store_fault = str(error)
            self._num_unread += 1
            if is_worth_logging(self._num_unread):
                _log.warning(
                    "the status may be outdated: %s (%d times so far)", error, self._num_unread
                )
        except Exception:  # noqa: BLE001 - a bug must not end elections
            _log.exception("the status may be outdated")

    async def _lead(self, tenure: Tenure) -> None:
        """Run the pools for one term.

        Raises:
            StoreError: the store cannot be fenced or read.
        """
        self._archive.reopen()
        await self._store.fence(term=tenure.term)
        pools = Pools(
            store=self._store,
            policies=self._policies,
            clock=self._clock,
            tenure=tenure,
            planner=self._planner,
            tracer=self._tracer,
            known=self._archive.journals(),
            unreadable=self._unreadable,
            loop_shares=self.loop_shares,
        )
        async with pools:
            self._archive.give_way()
            self._led = pools
            self._changed.notify()
            self.store_fault = ""
            self._settled.set()
            try:
                await self._elector.until_over(tenure)
            finally:
                self._led = None
                self._changed.notify()
                pools.close_streams()
                for name in pools.names():
                    self._archive.keep(pools.find(name).retire(elsewhere=self.elsewhere))
