"""`PageState`: what the page shows, as JSON. Made once for all who look. Reads, never changes."""

import json
import time
from typing import Any

import numpy as np

from equipoise.balancer.pools import PoolView
from equipoise.balancer.runner import Clock
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


class _PoolPage:
    """What is shown of one pool, made again at most every so often."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shown: tuple[PoolView | None, int] = (None, -1)
        self._not_before_s = 0.0
        self._window = -1
        self._last_decision = -1
        self._decisions: list[Any] = []
        self._events: Events = {}

    async def events(self, source: PoolView, *, now: float) -> Events:
        """`pool` and `heat` of `source`; `now` is the clock of its pool."""
        pool = source.pool
        if self._shown == (source, pool.revision) or time.monotonic() < self._not_before_s:
            return self._events
        began_s = time.monotonic()
        self._shown = (source, pool.revision)
        await self._fetch_decisions(pool)
        shown = as_json(pool_status(pool, now=now))
        shown["num_ranks"] = len(shown["ranks"])
        shown["ranks"] = _most_telling(shown["ranks"])
        shown["decisions"] = self._decisions
        self._events["pool"] = _dumped(shown)
        window = pool.windows.latest
        if window is None:
            self._events.pop("heat", None)
        elif window.number != self._window or "heat" not in self._events:
            self._window = window.number
            self._events["heat"] = _dumped(heat_of(window))
        now_s = time.monotonic()
        self._not_before_s = now_s + (now_s - began_s) / _PART_OF_LOOP
        return self._events

    async def _fetch_decisions(self, pool: Pool) -> None:
        last = pool.journal.last_decision
        latest = last.sequence if last is not None else 0
        if latest == self._last_decision:
            return
        try:
            records = await self._store.decisions(pool.name, limit=NUM_DECISIONS)
        except StoreError:
            return  # Keep the last decisions; the pool's state names the store's fault.
        self._last_decision = latest
        self._decisions = [as_json(decision_to_proto(record)) for record in records]


class PageState:
    """The fleet and its pools, as this balancer knows them, whether it leads or follows."""

    def __init__(self, seat: Seat, *, store: Store, clock: Clock) -> None:
        self._seat = seat
        self._store = store
        self._clock = clock
        self._pages: dict[str, _PoolPage] = {}

    async def events(self, name: str) -> Events:
        """`fleet`, and `pool` and `heat` of the pool called `name`, or the first if none is."""
        pools = self._seat.pools
        names = pools.names()
        self._pages = {known: page for known, page in self._pages.items() if known in names}
        events = {"fleet": self._fleet()}
        if names:
            chosen = name if name in names else names[0]
            page = self._pages.setdefault(chosen, _PoolPage(self._store))
            events |= await page.events(pools.find(chosen), now=self._clock())
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
