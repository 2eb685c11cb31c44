"""A term that cannot begin, because the store of one pool is damaged, leaves nothing behind."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from equipoise.balancer import pools as pools_module
from equipoise.balancer.pools import Pools
from equipoise.balancer.store.store import StoreError, StoreFault
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.pool.records import PoolMemory


async def test_no_pool_runs_in_a_term_that_cannot_begin(monkeypatch):
    damaged = StoreError("pool b is damaged", fault=StoreFault.DAMAGED)
    monkeypatch.setattr(pools_module, "restore", AsyncMock(side_effect=[PoolMemory(), damaged]))
    pools = Pools(
        store=SimpleNamespace(pools=AsyncMock(return_value=["a", "b"])),
        policies=PolicyBook(Policy()),
        clock=lambda: 0.0,
        tenure=SimpleNamespace(term=1),
        planner=None,
        tracer=None,
        known={},
    )
    with pytest.raises(StoreError, match="pool b is damaged"):
        await pools.__aenter__()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("pool ")]
