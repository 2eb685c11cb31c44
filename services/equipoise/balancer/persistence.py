"""Reads a pool from the store, and writes what the pool wants recorded."""

import logging
from dataclasses import replace

from equipoise.balancer.store.store import Store
from equipoise.pool.effects import (
    Write,
    WriteAdopted,
    WriteAudit,
    WriteAverage,
    WriteCommitted,
    WriteDecision,
    WriteMembership,
    WriteProposed,
)
from equipoise.pool.records import FAST, MAX_AUDIT, SLOW, SLOW_SQUARES, PoolMemory
from equipoise.telemetry.logs import about

_log = logging.getLogger(__name__)


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
        members=await store.membership(pool),
        averages={name: record for name, record in averages.items() if record is not None},
        last_decision=decisions[0] if decisions else None,
        hold=await store.hold(pool),
        audit=await store.audit(pool, limit=MAX_AUDIT),
    )


async def write_to(store: Store, write: Write, *, pool: str, term: int) -> Write:
    """Write; records come back with the number that the store gave them.

    Raises:
        StoreError: the store did not take it.
    """
    match write:
        case WriteProposed():
            await store.put_proposed(pool, write.layout, term=term)
        case WriteCommitted():
            await store.commit(pool, write.generation, previous=write.previous, term=term)
            _log.info(
                "%s: generation %d is committed",
                pool,
                write.generation,
                extra=about(pool=pool, generation=write.generation, term=term),
            )
        case WriteAdopted():
            await store.adopt(pool, write.layout, term=term)
        case WriteMembership():
            await store.put_membership(pool, write.members, term=term)
            _log.info(
                "%s: epoch %d: %s",
                pool,
                write.members.epoch,
                ", ".join(write.members.workers),
                extra=about(pool=pool, epoch=write.members.epoch, term=term),
            )
        case WriteAverage():
            await store.put_average(pool, write.name, write.record, term=term)
        case WriteDecision():
            record = await store.add_decision(pool, write.record, term=term)
            verdict = "yes" if record.accepted else "no"
            _log.info("%s: decision %d: %s: %s", pool, record.sequence, verdict, record.reason)
            return replace(write, record=record)
        case WriteAudit():
            entry = await store.add_audit(pool, write.record, hold=write.hold, term=term)
            _log.info(
                "%s: order %d of %s: %s: %s: %s",
                *(pool, entry.sequence, entry.who, entry.what),
                *("done" if entry.accepted else "refused", entry.outcome),
            )
            return replace(write, record=entry)
    return write
