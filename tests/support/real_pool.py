"""A pool of real processes: a balancer and workers of the tiny checkpoint; and their clients."""

import asyncio
import itertools
import os
import time
from contextlib import asynccontextmanager

import grpc
import numpy as np

from equipoise.cli.demo.fleet import free_address
from equipoise.cli.live.status_feed import StatusFeed
from equipoise.formats.packaged import packaged_checkpoint
from equipoise_api.v1 import status_pb2, status_pb2_grpc, worker_pb2, worker_pb2_grpc
from equipoise_model.checkpoint import Checkpoint
from equipoise_model.generate import greedy
from tests.support.forked_commands import ForkedFleet

BOUND_S = 200.0
SERVING = {status_pb2.POOL_HEALTH_SERVING, status_pb2.POOL_HEALTH_DEGRADED}
"""A pool with fewer ranks than intended serves, but is degraded."""
NUM_TOKENS = 32
NICENESS = 5
"""Added to ours for ranks that serve: they compute at all times, and leave cores to what starts."""

PROMPTS = [bytes(text, "ascii") for text in ("def ", "1 + 2 = ", "for x in ", "The ", "[0, 1, ")]


class Traffic:
    """Clients that never let go of a request: what is broken is sent again with what it had."""

    def __init__(self, addresses):
        self._addresses = list(addresses)
        self._generations = {}
        self.times = []
        self.resent = 0
        self.finished = []
        self._changed = asyncio.Condition()

    def remove(self, address):
        self._addresses.remove(address)

    async def complete(self, number, prompt):
        """One request to its end, wherever it takes place."""
        tokens = []
        for attempt in itertools.count(number):
            address = self._addresses[attempt % len(self._addresses)]
            try:
                await self._attempt(address, prompt, tokens)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                # A stream may break behind its last token: then there is nothing to ask for.
                if len(tokens) < NUM_TOKENS:
                    self.resent += 1
                    await asyncio.sleep(0.05)
                    continue
            async with self._changed:
                self.finished.append((prompt, tuple(tokens)))
                self._changed.notify_all()
            return

    async def _attempt(self, address, prompt, tokens):
        async with grpc.aio.insecure_channel(address) as channel:
            call = worker_pb2_grpc.InferenceStub(channel).Generate(
                worker_pb2.GenerateRequest(
                    prompt=(*prompt, *tokens), max_tokens=NUM_TOKENS - len(tokens)
                )
            )
            async for response in call:
                if response.is_waiting:
                    continue  # It reports the latest step, not one of this request.
                tokens += response.tokens
                step = (response.epoch, response.step)
                assert self._generations.setdefault(step, response.generation) == (
                    response.generation
                ), "no step runs in two generations"
                self.times.append(time.monotonic())

    async def run(self, number):
        for prompt in itertools.islice(itertools.cycle(PROMPTS), number, None):
            await self.complete(number, prompt)

    async def until_finished(self, count):
        """Wait until `count` more requests are done."""
        wanted = len(self.finished) + count
        async with asyncio.timeout(BOUND_S), self._changed:
            await self._changed.wait_for(lambda: len(self.finished) >= wanted)

    def longest_pause_s(self, *, since_s, until_s):
        """The longest time without any token that began or ended in a span of monotonic time."""
        marks = [since_s, *(one for one in self.times if since_s < one < until_s), until_s]
        return max(later - earlier for earlier, later in itertools.pairwise(marks))


class Pool:
    """A balancer and workers of the tiny checkpoint, each a process."""

    def __init__(self, folder, *, num_ranks=4, slots_per_rank=12):
        self.fleet, self.address = ForkedFleet(folder), free_address("127.0.0.1:0")
        self._folder, self._num_ranks, self._slots_per_rank = folder, num_ranks, slots_per_rank
        self.feed = StatusFeed(self.address, pool="default")

    async def start_balancer(self, *arguments, program=None):
        state = self._folder / "state.sqlite"
        await self.fleet.start(
            "balancer",
            [
                "balancer",
                f"--listen={self.address}",
                f"--store={state}",
                "--interval-s=2",
                "--min-assignments=100",
                *arguments,
            ],
            program=program,
        )

    async def start_worker(self, name, *arguments):
        await self.fleet.start(
            name,
            [
                "worker", f"--balancer={self.address}", f"--worker={name}",
                f"--num-ranks={self._num_ranks}", f"--slots-per-rank={self._slots_per_rank}",
                f"--node=node-{int(name[-1]) // 2}", *arguments,
            ],
        )  # fmt: skip

    async def serving(self, *names, after_epoch=0):
        """The status as soon as exactly these workers serve a committed layout."""
        status = await self.until(
            lambda status: (
                status.health in SERVING
                and status.epoch > after_epoch
                and {rank.worker for rank in status.ranks} == set(names)
                and {rank.generation for rank in status.ranks} == {status.generation}
            )
        )
        for name in names:
            os.setpriority(os.PRIO_PGRP, self.fleet.pid(name), os.nice(0) + NICENESS)
        return status

    async def layout(self):
        """Return the committed layout, as the balancer reports it."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub = status_pb2_grpc.StatusStub(channel)
            asked = stub.GetLayout(
                status_pb2.GetLayoutRequest(), timeout=BOUND_S, wait_for_ready=True
            )
            return (await asked).layout

    async def until(self, condition):
        """The status as soon as a condition holds; a process that fails fails the test."""
        seen = asyncio.create_task(self.feed.until(condition, timeout_s=BOUND_S))
        failed = asyncio.create_task(self.fleet.watch())
        await asyncio.wait({seen, failed}, return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        if failed.done() and not failed.cancelled():
            seen.cancel()
            failed.result()
        return await seen


@asynccontextmanager
async def pool_of(
    *names, folder, slots_per_rank=12, balancer=None, arguments=(), balancer_arguments=(), own=None
):
    """The pool and its first status, as soon as all these workers serve.

    `balancer` is the program of its balancer, if not ours, with `balancer_arguments`; `arguments`
    are the workers', and `own` has those of some, by name.
    """
    pool = Pool(folder, num_ranks=len(names), slots_per_rank=slots_per_rank)
    async with pool.fleet:
        await pool.start_balancer(*balancer_arguments, program=balancer)
        for name in names:
            await pool.start_worker(name, *arguments, *(own or {}).get(name, ()))
        following = asyncio.create_task(pool.feed.run())
        try:
            yield pool, await pool.serving(*names)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


@asynccontextmanager
async def under_load(status):
    """Clients at every rank while the block runs; all they finished must be as if undisturbed."""
    traffic = Traffic(rank.address for rank in status.ranks)
    clients = [asyncio.create_task(traffic.run(number)) for number in range(6)]
    try:
        yield traffic
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    for client in clients:
        assert client.cancelled(), client.exception()


def mirrored(layout):
    """The reversed placement: every slot of every rank changes."""
    other = type(layout)()
    other.CopyFrom(layout)
    for name, kind in (("expert_of_slot", "<i4"), ("share_of_slot", "<u2")):
        if held := getattr(layout, name):
            table = np.frombuffer(held, kind).reshape(layout.num_layers, -1)
            setattr(other, name, np.ascontiguousarray(table[:, ::-1]).tobytes())
    return other


def undisturbed_tokens():
    """The tokens that each prompt gets alone, in one process."""
    model = Checkpoint.open(packaged_checkpoint()).load_model(row_block=16)
    return {
        prompt: tuple(greedy(model, [list(prompt)], max_tokens=NUM_TOKENS)[0]) for prompt in PROMPTS
    }


def check_tokens(traffic, undisturbed):
    assert traffic.finished
    for prompt, tokens in traffic.finished:
        assert tokens == undisturbed[prompt]
