"""`Archive`: all pools as stored, for a balancer that does not lead.

It answers reads; it has no ranks and no loads, and decides nothing.
"""

from collections.abc import Mapping

from equipoise.balancer.changed import Changed
from equipoise.balancer.persistence import recall, warn_of_dropped
from equipoise.balancer.pools import MAX_POOLS, pick
from equipoise.balancer.store.store import Store, StoreError, StoreFault
from equipoise.balancer.unreadable import UnreadablePools
from equipoise.planning.redundancy import Redundancy
from equipoise.policy.book import PolicyBook
from equipoise.pool.journal import Journal
from equipoise.pool.pool import Pool
from equipoise.pool.records import PoolMemory


class RememberedPool:
    """One pool as it was read last; `closed` once this balancer leads or stops."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.redundancy: Redundancy | None = None
        """Unknown: only the leader plans."""
        self.closed = False
        self._changed = Changed()

    def replace(self, pool: Pool) -> None:
        """Show a newer revision of the pool."""
        self.pool = pool
        self._changed.notify()

    def close(self) -> None:
        """Release watchers."""
        self.closed = True
        self._changed.notify()

    async def until_changed(self, revision: int) -> None:
        """Wait until the pool's revision differs from `revision`, or it is closed."""
        while self.pool.revision == revision and not self.closed:
            await self._changed.wait()


class Archive:
    """Pools by name. `refresh` reads them all again."""

    def __init__(self, *, store: Store, policies: PolicyBook, unreadable: UnreadablePools) -> None:
        self._store = store
        self._unreadable = unreadable
        self._policies = policies
        self._policy_revision = policies.revision
        self._pools: dict[str, RememberedPool] = {}
        self._stored: frozenset[str] = frozenset()

    async def refresh(self, *, elsewhere: str) -> None:
        """Read the store; `elsewhere` says why the ranks are not here, and where to ask.

        What is known of a pool that was lost or has become unreadable stays, to be written back. A
        pool that the store had and has no more was forgotten by the leader, or lost by a failover
        to before the pool began. These look alike, so it stays if operators requested something of
        it, unless the store has as many pools as a balancer can lead.

        Raises:
            StoreError: the store cannot be read; what was read before stays.
        """
        try:
            await self._read(elsewhere)
        except StoreError as error:
            if error.fault is StoreFault.LOST:
                self.reopen()
            raise

    def reopen(self) -> None:
        """Continue with what the store has: what it lacks was lost, not forgotten by a leader."""
        self._stored = frozenset()
        self._store.reopen()

    async def _read(self, elsewhere: str) -> None:
        has_new_policy = self._policy_revision != self._policies.revision
        stored = frozenset(await self._store.pools())
        for name in (self._stored - stored) & self._pools.keys():
            if not self._pools[name].pool.journal.audit or len(self._pools) > MAX_POOLS:
                self._pools.pop(name).close()
        self._stored = stored
        self._unreadable.retain(stored)
        for name in sorted(stored):
            known = self._pools.get(name)
            journal = None if known is None else known.pool.journal
            with self._unreadable.noting(name):
                memory = await recall(self._store, name, known=journal)
                self._take(name, memory, elsewhere, has_new_policy)
            if name in self._unreadable.reasons and name in self._pools:
                self._pools[name].close()
        self._policy_revision = self._policies.revision

    def _take(self, name: str, memory: PoolMemory, elsewhere: str, has_new_policy: bool) -> None:
        known = self._pools.get(name)
        lost = None
        if known is not None:
            warn_of_dropped(name, known.pool.journal, memory)
            lost = known.pool.journal.forgotten_by(memory)
        if lost is not None:  # Kept, because this balancer writes it back if it leads.
            memory = lost.added_to(memory)
        pool = Pool(
            name,
            policies=self._policies,
            memory=memory,
            elsewhere=elsewhere,
            revision=1 if known is None else known.pool.revision + 1,
        )
        if known is None or known.closed:
            self._pools[name] = RememberedPool(pool)
        elif has_new_policy or _contents(pool) != _contents(known.pool):
            known.replace(pool)

    def give_way(self) -> None:
        """This balancer leads: end the streams, and keep only what it cannot read itself."""
        self.close_streams()
        unreadable = self._unreadable.reasons
        self._pools = {name: one for name, one in self._pools.items() if name in unreadable}
        self._stored = frozenset()

    def keep(self, pool: Pool) -> None:
        """Show a pool that this balancer led until now, until the store has more."""
        self._pools[pool.name] = RememberedPool(pool)

    def journals(self) -> Mapping[str, Journal]:
        """The records of all pools."""
        return {name: one.pool.journal for name, one in self._pools.items()}

    def names(self) -> tuple[str, ...]:
        """All pools that can be read, sorted by name."""
        return tuple(sorted(self._pools.keys() - self._unreadable.reasons.keys()))

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Why each of the other pools cannot be read."""
        return self._unreadable.reasons

    def find(self, name: str) -> RememberedPool:
        """A pool by its name, which may be empty if there is exactly one.

        Raises:
            UnknownPoolError: there is no such pool, or the name is empty and there are several.
            UnreadablePoolError: its records cannot be read.
        """
        return pick(self._pools, name, unreadable=self.unreadable)

    def close_streams(self) -> None:
        """End the streams of all watchers."""
        for pool in self._pools.values():
            pool.close()


def _contents(pool: Pool) -> tuple[object, ...]:
    journal = pool.journal
    return (
        pool.layouts.stored_generation,
        pool.layouts.next_generation,
        journal.members,
        0 if journal.last_decision is None else journal.last_decision.sequence,
        tuple(journal.audit),
        journal.hold.reason,
        pool.elsewhere,
    )
