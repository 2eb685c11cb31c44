"""`PageState`: what the page shows, as JSON that all clients share. Read-only."""

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from equipoise.balancer.clock import Clock
from equipoise.balancer.failures import Failures
from equipoise.balancer.pools import PoolView
from equipoise.balancer.seat import Seat
from equipoise.balancer.service.status import decision_to_proto, pool_status, pool_summaries
from equipoise.balancer.store.store import Store, StoreError
from equipoise.pool.loads import ClosedWindow
from equipoise.pool.pool import Pool
from equipoise.wire.plain import as_json

MAX_COLUMNS = 512
"""Columns of a heat map; with more ranks, a column shows the busiest of several ranks."""

MAX_RANKS = 256
"""Ranks listed; of more, those in trouble come first, then the busiest."""

NUM_DECISIONS = 30
"""Latest decisions shown."""

_SHARE_OF_LOOP = 0.02  # largest share of the event loop's time spent on one cached text
_PATIENCE_S = 1.0  # how long a client waits for the store
_STORE_PAUSE_S = 5.0  # between reads of a store that fails

_log = logging.getLogger(__name__)

Events = dict[str, str]
"""JSON by event name."""


class _Pace:
    """How often a text may be made, so that this takes a small share of the event loop."""

    def __init__(self) -> None:
        self._not_before_s = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._not_before_s

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the processor time of the block."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            spent_s = time.thread_time() - began_s
            self._not_before_s = time.monotonic() + spent_s / _SHARE_OF_LOOP


class _PoolPage:
    """The events of one pool, cached for as long as making them again would be too expensive."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shown: tuple[PoolView | None, int, int] = (None, -1, -1)
        self._pace = _Pace()
        self._heat: tuple[int, list[tuple[int, str]]] = (-1, [])
        self._last_decision = -1
        self._decisions: list[Any] = []
        self._fetching: asyncio.Task[None] | None = None
        self._fetch_from_s = 0.0
        self._events: Events = {}

    async def events(self, source: PoolView, *, now: float) -> Events:
        """Return `pool` and `heat` of `source`; `now` is the time of its pool's clock."""
        pool = source.pool
        await self._follow_decisions(pool)
        state = (source, pool.revision, self._last_decision)
        if state != self._shown and self._pace.is_due:
            with self._pace.counted():
                self._show(source, now=now)
            self._shown = state
        return self._events

    def _show(self, source: PoolView, *, now: float) -> None:
        pool = source.pool
        shown = as_json(pool_status(pool, now=now, redundancy=source.redundancy))
        nodes = nodes_of(shown["ranks"])
        shown["num_ranks"] = len(shown["ranks"])
        shown["ranks"] = _most_telling(shown["ranks"])
        shown["decisions"] = self._decisions
        self._events["pool"] = _dumped(shown)
        window = pool.windows.latest
        if window is None:
            self._events.pop("heat", None)
        elif (window.number, nodes) != self._heat or "heat" not in self._events:
            self._heat = window.number, nodes
            self._events["heat"] = _dumped({**heat_of(window), "nodes": nodes})

    async def _follow_decisions(self, pool: Pool) -> None:
        """Wait for the latest decisions, but not for long: all clients share one read."""
        last = pool.journal.last_decision
        latest = last.sequence if last is not None else 0
        is_due = latest != self._last_decision and time.monotonic() >= self._fetch_from_s
        if self._fetching is None and is_due:
            self._fetching = asyncio.create_task(self._fetch(pool.name, latest))
        if (fetching := self._fetching) is not None:
            await asyncio.wait({fetching}, timeout=_PATIENCE_S)

    async def _fetch(self, name: str, latest: int) -> None:
        try:
            records = await self._store.decisions(name, limit=NUM_DECISIONS)
            self._decisions = [as_json(decision_to_proto(record)) for record in records]
            self._last_decision = latest
        except Exception as error:  # noqa: BLE001 - the rest of the page can be shown
            self._fetch_from_s = time.monotonic() + _STORE_PAUSE_S
            if not isinstance(error, StoreError):  # The pool's state shows the store's fault.
                _log.exception("pool %s: its decisions cannot be shown", name)
        finally:
            self._fetching = None


class PageState:
    """The fleet and its pools as this balancer knows them, as leader or follower."""

    def __init__(self, seat: Seat, *, store: Store, clock: Clock) -> None:
        self._seat = seat
        self._store = store
        self._clock = clock
        self._failures = Failures("the page")
        self._pages: dict[str, _PoolPage] = {}
        self._pace = _Pace()
        self._fleet = ""

    async def events(self, name: str) -> Events:
        """Return `fleet`, and `pool` and `heat` of the pool `name`; without one, of the first."""
        pools = self._seat.pools
        names = pools.names()
        self._pages = {known: page for known, page in self._pages.items() if known in names}
        if self._pace.is_due:
            with self._pace.counted():
                self._fleet = self._fleet_now()
        events = {"fleet": self._fleet}
        chosen = name or next(iter(names), "")
        if chosen in names:
            page = self._pages.setdefault(chosen, _PoolPage(self._store))
            with self._failures.confined(chosen):
                events |= await page.events(pools.find(chosen), now=self._clock())
        return events

    def _fleet_now(self) -> str:
        pools, leads = self._seat.pools, self._seat.led is not None
        fleet = {
            "leads": leads,
            "words": "" if leads else self._seat.elsewhere,
            "leader": "" if leads else self._seat.leader_address or "",
            "pools": [as_json(summary) for summary in pool_summaries(pools, self._failures)],
        }
        return _dumped(fleet)


def heat_of(window: ClosedWindow) -> dict[str, Any]:
    """Return the load in percent of the layer's mean, `[layers][columns]`; None without load."""
    load = window.rank_load
    mean = load.mean(axis=1, keepdims=True)
    percent = np.divide(100.0 * load, mean, out=np.zeros_like(load), where=mean > 0)
    num_ranks = load.shape[1]
    ranks_per_column = -(-num_ranks // MAX_COLUMNS)
    first = np.arange(0, num_ranks, ranks_per_column)
    columns = np.maximum.reduceat(percent, first, axis=1).round().astype(int).tolist()
    return {
        "window": window.number,
        "generation": window.generation,
        "num_ranks": num_ranks,
        "ranks_per_column": ranks_per_column,
        "percent": [row if any(row) else None for row in columns],
    }


def nodes_of(ranks: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return the first rank and the node of each run of consecutive ranks on one node."""
    found: list[tuple[int, str]] = []
    for rank in sorted(ranks, key=lambda one: int(one["rank"])):
        if not found or found[-1][1] != rank["node"]:
            found.append((int(rank["rank"]), rank["node"]))
    return found


def _most_telling(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(ranks) <= MAX_RANKS:
        return ranks

    def weight(rank: dict[str, Any]) -> tuple[bool, bool, float]:
        return rank["state"] != "connected", bool(rank["trouble"]), rank["load_share"] or 0.0

    chosen = sorted(ranks, key=weight, reverse=True)[:MAX_RANKS]
    return sorted(chosen, key=lambda rank: int(rank["rank"]))


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
