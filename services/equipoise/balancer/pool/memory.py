"""`PoolMemory`: what the store knew of a pool when the balancer started."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from equipoise.balancer.store.hold import Hold
from equipoise.balancer.store.store import (
    AuditRecord,
    AverageRecord,
    DecisionRecord,
    Membership,
    Store,
)
from equipoise.planning.layout import Layout

FAST = "fast"
SLOW = "slow"

SLOW_SQUARES = "slow squares"
"""Squares of the slow average's rates, from which their variance follows; kept where a policy plans
for risk. A record of its own, so that a store that has none is like a load that never varied."""

MAX_AUDIT = 16
"""Orders of operators kept for people to read; the store has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """Nothing of it is believed before the workers were heard, except that numbers were used."""

    committed: Layout | None = None
    proposed: Layout | None = None
    next_generation: int = 1
    membership: Membership | None = None
    averages: Mapping[str, AverageRecord] = field(default_factory=dict)
    last_decision: DecisionRecord | None = None
    hold: Hold = field(default_factory=Hold)
    audit: tuple[AuditRecord, ...] = ()


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
