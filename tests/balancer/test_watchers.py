"""Many watchers of a pool: one picture for all, small batches, and a bound."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import grpc
import pytest

from equipoise.balancer.service import status_service, watchers
from equipoise.balancer.service.watchers import BATCH, Watchers
from equipoise_api.v1 import status_pb2
from tests.support.balancer_links import WAIT_S, is_serving, served, until

MANY = 20 * BATCH


class View:
    def __init__(self):
        self.pool = SimpleNamespace(revision=1, name="decode")
        self.closed = False


class Crowd:
    """Watchers of one view; counts pictures made, and who saw which revision when."""

    def __init__(self, view, *, count):
        self.view, self.num_made, self.seen = view, 0, Counter()
        self.rounds = Counter()
        self.round = 0
        self._watchers = Watchers(self._picture)
        self._tasks = [asyncio.create_task(self._watch()) for _ in range(count)]
        self._clock = asyncio.create_task(self._count_rounds())

    def _picture(self, view):
        self.num_made += 1
        return status_pb2.PoolStatus(pool=view.pool.name, revision=view.pool.revision)

    async def _watch(self):
        with self._watchers.joined(self.view) as audience:
            revision = -1
            while True:
                await audience.newer(revision)
                if self.view.closed:
                    return
                revision = audience.revision
                self.seen[revision] += 1
                self.rounds[self.round] += 1

    async def _count_rounds(self):
        while True:
            self.round += 1
            await asyncio.sleep(0)

    async def until(self, revision, count):
        async with asyncio.timeout(WAIT_S):
            while self.seen[revision] < count:  # noqa: ASYNC110 - the watchers' own events count
                await asyncio.sleep(0.01)

    async def gone(self):
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*self._tasks)
        self._clock.cancel()


async def test_a_picture_is_made_once_for_all_and_watchers_take_turns():
    view = View()
    crowd = Crowd(view, count=MANY)
    await crowd.until(1, MANY)
    await asyncio.sleep(3 * watchers.LOOK_S)
    assert crowd.seen == {1: MANY}, "without a change nobody is woken"
    view.pool.revision = 2
    await crowd.until(2, MANY)
    assert crowd.num_made == 2
    assert max(crowd.rounds.values()) <= BATCH, "the loop does other work between batches"
    view.closed = True
    await crowd.gone()


async def test_a_watcher_that_left_takes_no_turn():
    view = View()
    watching = Watchers(lambda view: status_pb2.PoolStatus(revision=view.pool.revision))
    with watching.joined(view) as audience:
        left = asyncio.create_task(audience.newer(-1))
        await asyncio.sleep(0)
        left.cancel()
        async with asyncio.timeout(WAIT_S):
            await audience.newer(-1)
    assert audience.message


async def test_a_failure_of_one_pools_status_leaves_the_others(caplog):
    broken, whole = View(), View()

    def status(view):
        if view is broken:
            raise ZeroDivisionError
        return status_pb2.PoolStatus(revision=1)

    watching = Watchers(status)
    with watching.joined(broken), watching.joined(whole) as audience:
        async with asyncio.timeout(WAIT_S):
            await audience.newer(-1)
    assert "the watched status of pool decode failed (1 so far)" in caplog.text


async def test_a_status_that_fails_is_tried_seldom_and_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(watchers, "LOOK_S", 0.001)
    view, tries = View(), 0

    def status(view):
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("Value out of range")
        return status_pb2.PoolStatus(revision=1)

    looks, sleep = 0, asyncio.sleep
    watching = Watchers(status)
    with watching.joined(view) as audience:
        while looks < 100:
            looks += 1
            await sleep(0.001)
        assert tries == 1
        audience._not_before_s = 0.0  # As if the time had passed.
        async with asyncio.timeout(WAIT_S):
            await audience.newer(-1)
    assert tries == 2
    assert caplog.text.count("Traceback") == 1


async def test_watchers_beyond_the_bound_are_rejected(channel, status, harness, monkeypatch):
    request = status_pb2.WatchStatusRequest()
    async with served(channel, harness):
        await until(status, is_serving)
        async with asyncio.timeout(WAIT_S):
            watches = [status.WatchStatus(request) for _ in range(2)]
            for watch in watches:
                assert (await watch.read()).status.pool == "tiny"
            monkeypatch.setattr(watchers, "MAX_WATCHERS", 2)
            monkeypatch.setattr(status_service, "MAX_WATCHERS", 2)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await status.WatchStatus(request).read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "has 2 watchers, its maximum" in caught.value.details()
            for watch in watches:
                watch.cancel()
            # A watch counts until the balancer notices that it was cancelled.
            while await is_rejected(status.WatchStatus(request)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def is_rejected(watch):
    try:
        await watch.read()
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    watch.cancel()
    return False
