"""`Seat`: what this balancer answers with, whether it leads or follows.

Owns the change from the one to the other: the store is fenced before anything is read for a new
term, and every stream is let go when one ends, so that workers and watchers find the next leader.
"""

import asyncio
import logging
from contextlib import suppress

from opentelemetry.trace import Tracer

from equipoise.balancer.archive import Archive
from equipoise.balancer.leadership.elector import Elector, Tenure
from equipoise.balancer.planner.planning import Planner
from equipoise.balancer.pools import Pools, PoolViews
from equipoise.balancer.readiness import Readiness
from equipoise.balancer.runner import Clock
from equipoise.balancer.store.store import Store, StoreError, TermOverError
from equipoise.policy.book import PolicyBook
from equipoise.pool.counters import Bound

REFRESH_S = 2.0
"""Seconds between two looks of a follower into the store."""

_log = logging.getLogger(__name__)


class Seat:
    """Follows, leads, follows again; used from the event loop only."""

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
        self._archive = Archive(store=store, policies=policies)
        self._led: Pools | None = None
        self._settled = asyncio.Event()

    @property
    def pools(self) -> PoolViews:
        """What to read from: the pools this balancer leads, else those the store remembers."""
        return self._led or self._archive

    @property
    def led(self) -> Pools | None:
        """The pools this balancer leads at this very moment, for workers to join."""
        return self._led if self._elector.leads() else None

    @property
    def highest_term(self) -> int:
        """Highest term of a leader that was heard of."""
        return self._elector.standing.highest_term

    @property
    def leader_address(self) -> str | None:
        """Where the other balancer that leads is, as far as is known."""
        return self._elector.standing.leader_address or None

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """The waits of the election, which are no pool's."""
        return self._elector.bounds

    @property
    def elsewhere(self) -> str:
        """Where to go with what only a leader can do, in words."""
        if self.not_ready:
            return f"this balancer takes no workers yet: {self.not_ready}"
        if self.leader_address:
            return f"this balancer follows, the one at {self.leader_address} leads: ask there"
        return f"no balancer leads now ({self._elector.standing.reason}): ask again in a moment"

    async def open(self) -> None:
        """Read the store once, so that a balancer that cannot is not started.

        Raises:
            StoreError: the store cannot be read, or makes no sense.
        """
        await self._archive.refresh(elsewhere=self.elsewhere)

    @property
    def not_ready(self) -> str:
        """Why this balancer can take no workers yet, in words; empty when it can."""
        return self._readiness.missing

    async def look_on(self) -> None:
        """Show what the store remembers, without a wish to lead, until ready."""
        ready = asyncio.create_task(self._readiness.until_ready())
        try:
            while not ready.done():
                await self._refresh()
                await asyncio.wait({ready}, timeout=REFRESH_S)
        finally:
            ready.cancel()

    async def until_settled(self) -> None:
        """Wait until it is clear for the first time whether this balancer leads."""
        await self._settled.wait()

    def close_streams(self) -> None:
        """The balancer stops: workers and watchers are let go."""
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
                _log.error("term %d ends: %s", tenure.term, error)
                tenure.give_up(str(error))
            except Exception:  # noqa: BLE001
                # A fault of ours must not keep the lease from a balancer that can lead.
                _log.exception("term %d broke down", tenure.term)
                tenure.give_up("this balancer broke down in it")
            finally:
                self._settled.set()

    async def _follow(self) -> Tenure:
        """Keep the archive fresh until elected."""
        await self._elector.until_looked()
        while not self._elector.leads():
            self._settled.set()
            await self._refresh()
            # Asked anew each time: a term may begin and end while the store is read.
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._elector.tenure()
        return await self._elector.tenure()

    async def _refresh(self) -> None:
        try:
            await self._archive.refresh(elsewhere=self.elsewhere)
        except StoreError as error:
            _log.warning("what is shown may be old: %s", error)
        except Exception:  # noqa: BLE001 - a fault of ours must not end elections
            _log.exception("what is shown may be old")

    async def _lead(self, tenure: Tenure) -> None:
        """Run the pools for one term.

        Raises:
            StoreError: the store cannot be fenced or read.
        """
        await self._store.fence(term=tenure.term)
        pools = Pools(
            store=self._store,
            policies=self._policies,
            clock=self._clock,
            tenure=tenure,
            planner=self._planner,
            tracer=self._tracer,
        )
        async with pools:
            self._archive.close_streams()
            self._archive = Archive(store=self._store, policies=self._policies)
            self._led = pools
            self._settled.set()
            try:
                await self._elector.until_over(tenure)
            finally:
                self._led = None
                pools.close_streams()
                for name in pools.names():
                    self._archive.keep(pools.find(name).retire(elsewhere=self.elsewhere))
