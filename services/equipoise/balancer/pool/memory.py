"""`recall`: reads what the store knows of a pool."""

from equipoise.balancer.store.store import Store
from equipoise.pool.records import FAST, MAX_AUDIT, SLOW, SLOW_SQUARES, PoolMemory


async def recall(store: Store, pool: str) -> PoolMemory:
    """Read a pool; one that the store does not know gives an empty memory.

    Raises:
        StoreError: the store cannot be used.
    """
    averages = {name: await store.average(pool, name) for name in (FAST, SLOW, SLOW_SQUARES)}
    decisions = await store.decisions(pool, limit=1)
    return PoolMemory(
        committed=await store.committed(pool),
        proposed=await store.proposed(pool),
        next_generation=await store.next_generation(pool),
        membership=await store.membership(pool),
        averages={name: record for name, record in averages.items() if record is not None},
        last_decision=decisions[0] if decisions else None,
        hold=await store.hold(pool),
        audit=await store.audit(pool, limit=MAX_AUDIT),
    )
