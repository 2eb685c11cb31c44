"""A fetch whose caller reads slowly keeps no block from requests, and ends in time."""

import asyncio
from types import SimpleNamespace

from equipoise.wire.block_keys import keys_of
from equipoise.worker.blocks import BlockPool, BlockTable
from equipoise.worker.latents.holds import HoldEnd
from equipoise.worker.latents.service import MAX_STREAMS, LatentTransferService
from equipoise.worker.latents.store import LatentStore
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.sequence import Request
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_model.sampling_params import SampledToken

B = 4
PROMPT = tuple(range(1, 4 * B + 2))


class SlowCaller:
    """Takes a message when it is let to."""

    def __init__(self, host="192.0.2.1"):
        self._host = host
        self.taken, self.may_take = [], asyncio.Semaphore(0)
        self.asked = asyncio.Event()

    def peer(self):
        """Another connection each time."""
        return f"ipv4:{self._host}:{id(object())}"

    async def write(self, part):
        self.asked.set()
        await self.may_take.acquire()
        self.taken.append(part.index)


def a_rank(**limits):
    """A rank whose whole cache, four blocks, has the latents of one prompt."""
    blocks = BlockPool(num_blocks=4, block_tokens=B)
    scheduler = Scheduler(blocks=blocks, max_requests=2, max_queued=2, max_step_tokens=32)
    table = BlockTable(blocks, PROMPT)
    assert table.grow(4 * B)
    table.publish(PROMPT, num_run=4 * B)
    cache = SimpleNamespace(block_tokens=B, max_len=4 * B, read_block=lambda block: bytes([block]))
    store = LatentStore(cache=cache, form="f", boot_id="b")
    service = LatentTransferService(store, visit=lambda act: act(scheduler), **limits)
    return scheduler, service, table


def fetch_of(service, caller, *, hold=0):
    keys = list(keys_of(PROMPT, block_tokens=B))
    assert len(keys) == 4
    request = pb.LatentTransferFetchRequest(form="f", boot_id="b", hold=hold, keys=keys)
    return asyncio.create_task(service.Fetch(request, caller))


def request_of(num_tokens):
    return Request(key=7, prompt=tuple(range(50, 50 + num_tokens)), max_tokens=1)


async def test_blocks_of_a_slow_fetch_can_be_reused_and_the_stream_ends_there():
    scheduler, service, table = a_rank()
    table.release(num_sound=0)
    caller = SlowCaller()
    fetch = fetch_of(service, caller)
    await caller.asked.wait()
    assert scheduler.blocks.num_available == 4
    scheduler.submit(request_of(3 * B))
    assert scheduler.plan().chunks
    caller.may_take.release()
    await asyncio.wait_for(fetch, 60)
    assert caller.taken == [0]


async def test_the_hold_of_a_slow_fetch_ends_early_for_the_last_running_request():
    scheduler, service, table = a_rank()
    given = table.give_published()
    scheduler.blocks.release(given.pop())
    hold = scheduler.holds.take(given, now=0.0)
    caller = SlowCaller()
    fetch = fetch_of(service, caller, hold=hold)
    await caller.asked.wait()
    scheduler.submit(Request(key=7, prompt=tuple(range(50, 50 + B)), max_tokens=B))
    for now in range(B):
        plan = scheduler.plan(now=float(now))
        assert plan.chunks, "the only request runs"
        scheduler.commit(plan, [SampledToken(token=1, logprob=-1.0)], now=float(now))
    assert scheduler.holds.ended == {HoldEnd.EXPIRED: 1}
    fetch.cancel()


async def test_a_fetch_that_takes_too_long_as_a_whole_ends():
    scheduler, service, table = a_rank(timeout_s=0.2)
    hold = scheduler.holds.take(table.give_published(), now=0.0)
    caller = SlowCaller()
    fetch = fetch_of(service, caller, hold=hold)
    caller.may_take.release()
    await asyncio.wait_for(fetch, 60)
    assert (caller.taken, dict(service.rejected)) == ([0], {"latents_slow": 1})
    assert (scheduler.holds.num_open, scheduler.blocks.num_used) == (1, 4)


async def test_a_fetch_that_is_taken_ends_its_hold():
    scheduler, service, table = a_rank()
    hold = scheduler.holds.take(table.give_published(), now=0.0)
    caller = SlowCaller()
    caller.may_take = asyncio.Semaphore(4)
    await asyncio.wait_for(fetch_of(service, caller, hold=hold), 60)
    assert caller.taken == [0, 1, 2, 3]
    assert scheduler.holds.ended == {HoldEnd.FETCHED: 1}
    assert scheduler.blocks.num_used == 0


async def test_no_caller_takes_more_than_half_of_the_streams():
    _, service, table = a_rank(timeout_s=600.0)
    slow = [SlowCaller() for _ in range(MAX_STREAMS)]
    fetches = [fetch_of(service, caller) for caller in slow]
    for caller in slow[: MAX_STREAMS // 2]:
        await asyncio.wait_for(caller.asked.wait(), 60)
    other = SlowCaller(host="192.0.2.2")
    other.may_take = asyncio.Semaphore(4)
    await asyncio.wait_for(fetch_of(service, other), 60)
    assert other.taken == [0, 1, 2, 3]
    assert sum(caller.asked.is_set() for caller in slow) == MAX_STREAMS // 2
    for fetch in fetches:
        fetch.cancel()
    table.release(num_sound=0)
