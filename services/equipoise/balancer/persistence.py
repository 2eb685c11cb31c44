"""Reads a pool from the store, and writes what the pool wants recorded."""

import logging
from dataclasses import replace

from equipoise.balancer.pool_log import PoolLog
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
from equipoise.pool.journal import Journal
from equipoise.pool.records import FAST, MAX_AUDIT, SLOW, SLOW_SQUARES, PoolMemory
from equipoise.telemetry.logs import about

_log = logging.getLogger(__name__)


async def recall(store: Store, pool: str) -> PoolMemory:
    """Read a pool; one that the store does not know gives an empty memory.

    The leader may write meanwhile. The hold is read after the audit records: an older hold with a
    newer record would look as if the store had lost the hold.

    Raises:
        StoreError: the store cannot be used.
    """
    audit = await store.audit(pool, limit=MAX_AUDIT)
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
        audit=audit,
    )


async def restore(store: Store, pool: str, *, known: Journal | None, term: int) -> PoolMemory:
    """Read a pool, and write back what the store lost of the records that are `known`.

    Raises:
        StoreError: the store cannot be used.
    """
    memory = await recall(store, pool)
    if known is None:
        return memory
    warn_of_dropped(pool, known, memory)
    lost = known.forgotten_by(memory)
    if lost is None:
        return memory
    await store.restore(pool, lost, term=term)
    _log.warning(
        "the store had lost records of pool %s (%s): wrote them back",
        *(pool, ", ".join(lost.kinds)),
        extra=about(pool=pool, term=term),
    )
    return lost.added_to(memory)


def warn_of_dropped(pool: str, known: Journal, stored: PoolMemory) -> None:
    """Log the hold that this balancer knows and that gives way to what the store has."""
    if hold := known.dropped_by(stored):
        _log.warning(
            "pool %s is no longer %s: the store lost that, and another balancer has recorded "
            "requests since: repeat it if it still applies",
            *(pool, hold),
            extra=about(pool=pool),
        )


async def write_to(store: Store, write: Write, *, pool: str, term: int, log: PoolLog) -> Write:
    """Write; a record comes back with the number that the store gave it.

    Raises:
        StoreError: the store did not accept it.
    """
    match write:
        case WriteProposed():
            await store.put_proposed(pool, write.layout, term=term)
        case WriteCommitted(generation=generation):
            await store.commit(pool, generation, previous=write.previous, term=term)
            log.info("generation %d is committed", generation, extra=about(generation=generation))
        case WriteAdopted():
            await store.adopt(pool, write.layout, term=term)
        case WriteMembership(members=members):
            await store.put_membership(pool, members, term=term)
            fields = about(epoch=members.epoch)
            log.info("epoch %d: %s", members.epoch, ", ".join(members.workers), extra=fields)
        case WriteAverage():
            await store.put_average(pool, write.name, write.record, term=term)
        case WriteDecision():
            record = await store.add_decision(pool, write.record, term=term)
            fields = about(generation=record.base_generation)
            verdict = "yes" if record.accepted else "no"
            log.info("decision %d: %s: %s", record.sequence, verdict, record.reason, extra=fields)
            return replace(write, record=record)
        case WriteAudit():
            entry = await store.add_audit(pool, write.record, hold=write.hold, term=term)
            log.info(
                "audit record %d: %s: %s: %s: %s",
                *(entry.sequence, entry.who, entry.what),
                *("accepted" if entry.accepted else "rejected", entry.outcome),
            )
            return replace(write, record=entry)
    return write
