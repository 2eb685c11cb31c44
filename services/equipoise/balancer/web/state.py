"""`PageState`: what the page shows, as JSON. Made once for all who look. Reads, never changes."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from equipoise.balancer.archive import RememberedPool
from equipoise.balancer.runner import Clock, PoolRunner
from equipoise.balancer.seat import Seat
from equipoise.balancer.service.status import decision_to_proto, pool_status, pool_summary
from equipoise.balancer.store.store import Store, StoreError
from equipoise.pool.loads import ClosedWindow
from equipoise.pool.pool import Pool
from equipoise.wire.plain import as_json

MAX_COLUMNS = 512
"""Columns of a heat map; with more ranks, a column is several and shows the busiest of them."""

MAX_RANKS = 256
"""Ranks listed; with more, those that are in trouble, and then the busiest."""

NUM_DECISIONS = 30
"""Latest decisions told."""

_PART_OF_LOOP = 0.02  # most of the event loop's time that making one pool's JSON may take

Events = dict[str, str]
"""JSON by the name of its event."""


@dataclass(slots=True, kw_only=True)
class _Made:
    """What was made of one pool, and when it may be made again."""

    revision: int = -1
    source: PoolRunner | RememberedPool | None = None
    not_before_s: float = 0.0
    window: int = -1
    last_decision: int = -1
    decisions: list[Any] = field(default_factory=list)
    events: Events = field(default_factory=dict)


class PageState:
    """The fleet and its pools, as this balancer knows them, whether it leads or follows."""

    def __init__(self, seat: Seat, *, store: Store, clock: Clock) -> None:
        self._seat = seat
        self._store = store
        self._clock = clock
        self._made: dict[str, _Made] = {}

    async def events(self, name: str) -> Events:
        """`fleet`, and `pool` and `heat` of the pool called `name`, or the first if none is."""
        pools = self._seat.pools
        names = pools.names()
        self._made = {known: made for known, made in self._made.items() if known in names}
        events = {"fleet": self._fleet()}
        if names:
            chosen = name if name in names else names[0]
            events |= await self._pool_events(chosen, pools.find(chosen))
        return events

    def _fleet(self) -> str:
        pools, leads = self._seat.pools, self._seat.led is not None
        fleet = {
            "leads": leads,
            "words": "" if leads else self._seat.elsewhere,
            "leader": "" if leads else self._seat.leader_address or "",
            "pools": [as_json(pool_summary(pools.find(name).pool)) for name in pools.names()],
        }
        return _dumped(fleet)

    async def _pool_events(self, name: str, source: PoolRunner | RememberedPool) -> Events:
        made, pool = self._made.setdefault(name, _Made()), source.pool
        is_old = (made.source, made.revision) != (source, pool.revision)
        if not is_old or time.monotonic() < made.not_before_s:
            return made.events
        began_s = time.monotonic()
        made.source, made.revision = source, pool.revision
        await self._fetch_decisions(made, pool)
        shown = as_json(pool_status(pool, now=self._clock()))
        shown["num_ranks"] = len(shown["ranks"])
        shown["ranks"] = _most_telling(shown["ranks"])
        shown["decisions"] = made.decisions
        made.events["pool"] = _dumped(shown)
        window = pool.windows[-1] if pool.windows else None
        if window is None:
            made.events.pop("heat", None)
        elif window.number != made.window or "heat" not in made.events:
            made.window = window.number
            made.events["heat"] = _dumped(heat_of(window))
        now_s = time.monotonic()
        made.not_before_s = now_s + (now_s - began_s) / _PART_OF_LOOP
        return made.events

    async def _fetch_decisions(self, made: _Made, pool: Pool) -> None:
        latest = pool.last_decision.sequence if pool.last_decision is not None else 0
        if latest == made.last_decision:
            return
        try:
            records = await self._store.decisions(pool.name, limit=NUM_DECISIONS)
        except StoreError:
            return  # what was told before stays, and the pool's state names the store's trouble
        made.last_decision = latest
        made.decisions = [as_json(decision_to_proto(record)) for record in records]


def heat_of(window: ClosedWindow) -> dict[str, Any]:
    """How the load fell: percent of the layer's mean, `[layers][columns]`."""
    load = window.rank_load
    mean = load.mean(axis=1, keepdims=True)
    percent = np.divide(100.0 * load, mean, out=np.zeros_like(load), where=mean > 0)
    num_ranks = load.shape[1]
    ranks_per_column = -(-num_ranks // MAX_COLUMNS)
    first = np.arange(0, num_ranks, ranks_per_column)
    return {
        "window": window.number,
        "generation": window.generation,
        "num_ranks": num_ranks,
        "ranks_per_column": ranks_per_column,
        "percent": np.maximum.reduceat(percent, first, axis=1).round().astype(int).tolist(),
    }


def _most_telling(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(ranks) <= MAX_RANKS:
        return ranks

    def weight(rank: dict[str, Any]) -> tuple[bool, bool, float]:
        return rank["state"] != "connected", bool(rank["trouble"]), rank["load_share"]

    chosen = sorted(ranks, key=weight, reverse=True)[:MAX_RANKS]
    return sorted(chosen, key=lambda rank: int(rank["rank"]))


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
