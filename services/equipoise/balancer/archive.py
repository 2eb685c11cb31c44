"""`Archive`: all pools as the store knows them, for a balancer that does not lead.

It answers reads; it has no ranks, no loads and no say.
"""

import asyncio

from equipoise.balancer.persistence import recall
from equipoise.balancer.pools import pick
from equipoise.balancer.store.store import Store
from equipoise.policy.book import PolicyBook
from equipoise.pool.pool import Pool


class RememberedPool:
    """One pool as it was read last; `closed` when this balancer began to lead or stops."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.closed = False
        self._changed = asyncio.Event()

    def replace(self, pool: Pool) -> None:
        """Take what was read now, if it says anything new."""
        if _contents(pool) != _contents(self.pool):
            pool.revision = self.pool.revision + 1
            self.pool = pool
            self._notify()

    def close(self) -> None:
        """Let watchers go."""
        self.closed = True
        self._notify()

    async def until_changed(self, revision: int) -> None:
        """Wait until the pool's revision is another one than `revision`, or it is closed."""
        while self.pool.revision == revision and not self.closed:
            await self._changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Archive:
    """Pools by name. `refresh` reads them all again."""

    def __init__(self, *, store: Store, policies: PolicyBook) -> None:
        self._store = store
        self._policies = policies
        self._pools: dict[str, RememberedPool] = {}

    async def refresh(self, *, elsewhere: str) -> None:
        """Read the store; `elsewhere` says why the ranks are not here, and where to ask.

        Raises:
            StoreError: the store cannot be read; what was read before stays.
        """
        for name in await self._store.pools():
            memory = await recall(self._store, name)
            pool = Pool.remembered(name, policies=self._policies, memory=memory)
            pool.elsewhere = elsewhere
            pool.policy_revision = self._policies.revision
            known = self._pools.setdefault(name, RememberedPool(pool))
            known.replace(pool)

    def keep(self, pool: Pool, *, elsewhere: str) -> None:
        """Show a pool that this balancer led until now as it was, until the store says more."""
        pool.elsewhere = elsewhere
        pool.revision += 1
        self._pools[pool.name] = RememberedPool(pool)

    def names(self) -> tuple[str, ...]:
        """All pools, sorted by name."""
        return tuple(sorted(self._pools))

    def find(self, name: str) -> RememberedPool:
        """A pool by its name, which may be empty when there is exactly one.

        Raises:
            UnknownPoolError: there is no such pool, or the name was left out and there are several.
        """
        return pick(self._pools, name)

    def close_streams(self) -> None:
        """End the streams of all watchers."""
        for pool in self._pools.values():
            pool.close()


def _contents(pool: Pool) -> tuple[int | None, int, int, int, str, int]:
    decision = pool.last_decision.sequence if pool.last_decision is not None else 0
    return (
        pool.layouts.stored_generation,
        pool.layouts.next_generation,
        decision,
        pool.audit[0].sequence if pool.audit else 0,
        pool.elsewhere,
        pool.policy_revision,
    )
