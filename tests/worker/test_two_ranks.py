"""Two worker processes over gloo, their balancer by script: one step, one switch, one end."""

import asyncio
import itertools
import multiprocessing
import os
import signal
import sys
from contextlib import asynccontextmanager

import grpc
import pytest

from equipoise.wire.messages import Leaving, Serving, Staged, Switched
from equipoise.worker.errors import WorkerError
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc

PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (2, 7, 1, 8, 2, 8))
FAILED = 3


def worker_process(settings):
    from equipoise.worker.__main__ import run

    try:
        sys.exit(run(settings))
    except WorkerError as error:
        print(error, file=sys.stderr)
        sys.exit(FAILED)


class Pool:
    """Both workers, in rank order, with their processes and streams."""

    def __init__(self, processes, links):
        self.processes, self.links = processes, links

    def addresses(self):
        return [link.hello.address for link in self.links]

    async def exit_code(self, rank):
        await asyncio.to_thread(self.processes[rank].join, 60)
        return self.processes[rank].exitcode


@asynccontextmanager
async def two_ranks(balancer, settings, assignment, layout):
    context = multiprocessing.get_context("spawn")
    processes = {}
    for name in ("w-0", "w-1"):
        chosen = settings(
            balancer=balancer.address,
            worker=name,
            num_ranks=2,
            slots_per_rank=6,
            step_timeout_s=20.0,
        )
        processes[name] = context.Process(target=worker_process, args=(chosen,), daemon=True)
        processes[name].start()
    try:
        links = sorted(
            [await balancer.link(), await balancer.link()], key=lambda link: link.hello.worker
        )
        hellos = [link.hello for link in links]
        for rank, link in enumerate(links):
            link.say(assignment(hellos, layout, rank=rank))
        for link in links:
            await link.until(Serving)
        yield Pool([processes[hello.worker] for hello in hellos], links)
    finally:
        for process in processes.values():
            process.kill()
            await asyncio.to_thread(process.join, 60)


async def generate(address, prompt, max_tokens):
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(prompt=prompt, max_tokens=max_tokens), timeout=100
        )
        responses = [response async for response in call]
    tokens = [token for response in responses for token in response.tokens]
    return tokens, {response.step: response.generation for response in responses}


async def test_ranks_switch_at_one_step_and_no_token_changes(
    balancer, settings, assignment, random_layout, stage_to, solo
):
    layouts = [random_layout(n, num_ranks=2, slots_per_rank=6) for n in range(1, 6)]
    async with two_ranks(balancer, settings, assignment, layouts[0]) as pool:
        generating = [
            asyncio.create_task(generate(address, prompt, 80))
            for address, prompt in zip(pool.addresses(), PROMPTS, strict=True)
        ]
        peer_bytes = 0
        for running, layout in itertools.pairwise(layouts):
            for rank, link in enumerate(pool.links):
                link.say(stage_to(running, layout, rank=rank, from_peers=True))
            for link in pool.links:
                staged = await link.until(Staged, _of(layout))
                assert staged.checkpoint_bytes == 0
                peer_bytes += staged.peer_bytes
            steps = {(await link.until(Switched, _of(layout))).step for link in pool.links}
            assert len(steps) == 1
        assert peer_bytes > 0
        generations = {}
        for task, prompt in zip(generating, PROMPTS, strict=True):
            tokens, seen = await task
            assert tokens == solo(prompt, 80)
            for step, generation in seen.items():
                assert generations.setdefault(step, generation) == generation
        # An idle rank takes part in the other's steps.
        tokens, _ = await generate(pool.addresses()[1], PROMPTS[0], 10)
        assert tokens == solo(PROMPTS[0], 10)

        for process in pool.processes:
            os.kill(process.pid, signal.SIGTERM)
        for rank, link in enumerate(pool.links):
            # The second to hear of its stop may hear first that the other has left.
            assert await pool.exit_code(rank) in {0, FAILED}
            await link.until(Leaving)


def _of(layout):
    return lambda said: said.generation == layout.generation


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_rank_that_is_stopped_leaves_in_order_and_the_other_says_who_left(
    balancer, settings, assignment, random_layout, number
):
    layout = random_layout(1, num_ranks=2, slots_per_rank=6)
    async with two_ranks(balancer, settings, assignment, layout) as pool:
        os.kill(pool.processes[1].pid, number)
        assert await pool.exit_code(1) == 0
        assert await pool.exit_code(0) == FAILED
        await pool.links[0].until(Leaving, lambda said: "w-1 left the pool" in said.reason)
        await pool.links[1].until(Leaving, lambda said: "w-1 was asked to stop" in said.reason)


async def test_when_a_rank_is_killed_the_other_ends_and_its_clients_hear_why(
    balancer, settings, assignment, random_layout
):
    layout = random_layout(1, num_ranks=2, slots_per_rank=6)
    async with two_ranks(balancer, settings, assignment, layout) as pool:
        async with grpc.aio.insecure_channel(pool.addresses()[0]) as channel:
            call = worker_pb2_grpc.InferenceStub(channel).Generate(
                pb.GenerateRequest(prompt=PROMPTS[0], max_tokens=80), timeout=100
            )
            assert (await call.read()).tokens
            pool.processes[1].kill()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _to_the_end(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "a peer rank failed or hangs" in caught.value.details()
        assert await pool.exit_code(0) == FAILED


async def _to_the_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass
