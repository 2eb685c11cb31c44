import asyncio
import re
from contextlib import asynccontextmanager

import grpc
import pytest

from equipoise.cli.demo.traffic import Prompt, Traffic, prompts_of
from equipoise_api.v1 import worker_pb2, worker_pb2_grpc

BOUND_S = 120.0
PROMPTS = {
    domain: prompts_of(domain, texts, max_tokens=(3, 5), seed=0)
    for domain, texts in {"code": (b"if", b"for"), "english": (b"the", b"a", b"one")}.items()
}


class Worker(worker_pb2_grpc.InferenceServicer):
    """Answers with the prompt's first token; `requests` are awaited by tests."""

    def __init__(self):
        self.requests = asyncio.Queue()
        self.fail = self.shorten = False

    async def Generate(self, request, context):  # noqa: N802 - the contract's name
        self.requests.put_nowait(request)
        if self.fail:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the peers are gone")
        for step in range(request.max_tokens - self.shorten):
            yield worker_pb2.GenerateResponse(tokens=request.prompt[:1], generation=4, step=step)
            await asyncio.sleep(0)
        yield worker_pb2.GenerateResponse(finish_reason=worker_pb2.FINISH_REASON_LENGTH)


@asynccontextmanager
async def serving(worker):
    server = grpc.aio.server()
    worker_pb2_grpc.add_InferenceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def traffic_to(*addresses: str, clients_per_rank: int = 1) -> Traffic:
    ticks = iter(range(1_000_000))
    return Traffic(
        PROMPTS,
        addresses=addresses,
        clients_per_rank=clients_per_rank,
        clock=lambda: float(next(ticks)),
    )


async def taken(worker: Worker, count: int) -> list[bytes]:
    async with asyncio.timeout(BOUND_S):
        return [bytes((await worker.requests.get()).prompt) for _ in range(count)]


async def test_clients_take_the_prompts_of_a_domain_in_turn_until_it_shifts():
    worker = Worker()
    async with serving(worker) as address, asyncio.timeout(BOUND_S):
        traffic = traffic_to(address)
        running = asyncio.create_task(traffic.run())
        assert await taken(worker, 3) == [b"if", b"for", b"if"]
        traffic.shift_to("english")
        later = await taken(worker, 1)
        while later[0] in {b"if", b"for"}:  # these were on their way already
            later = await taken(worker, 1)
        later += await taken(worker, 3)
        traffic.end()
        await running
    assert later == [b"the", b"a", b"one", b"the"]


async def test_a_completion_holds_every_token_with_its_step_and_generation():
    worker = Worker()
    async with serving(worker) as address, asyncio.timeout(BOUND_S):
        traffic = traffic_to(address)
        running = asyncio.create_task(traffic.run())
        await taken(worker, 1)
        traffic.end()
        await running
    completion = traffic.completions[0]
    assert completion.failure is None
    assert completion.tokens == (ord("i"),) * completion.prompt.max_tokens
    assert [arrival.step for arrival in completion.arrivals] == list(range(len(completion.tokens)))
    assert {arrival.generation for arrival in completion.arrivals} == {4}


async def test_gaps_lie_between_the_tokens_of_one_request():
    worker = Worker()
    async with serving(worker) as address, asyncio.timeout(BOUND_S):
        traffic = traffic_to(address, clients_per_rank=3)
        running = asyncio.create_task(traffic.run())
        await taken(worker, 12)
        traffic.end()
        await running
    assert traffic.num_tokens == sum(len(c.tokens) for c in traffic.completions)
    assert len(traffic.gaps) == traffic.num_tokens - len(traffic.completions)
    assert all(gap.to_s > gap.from_s for gap in traffic.gaps)


async def test_every_rank_gets_requests():
    workers = [Worker(), Worker()]
    async with serving(workers[0]) as first, serving(workers[1]) as second:
        traffic = traffic_to(first, second)
        running = asyncio.create_task(traffic.run())
        for worker in workers:
            await taken(worker, 1)
        traffic.end()
        await running
    assert {completion.rank for completion in traffic.completions} == {0, 1}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("fail", "rank 0: UNAVAILABLE: the peers are gone"),
        ("shorten", r"rank 0: received \d tokens, not \d"),
    ],
)
async def test_a_request_that_fails_is_recorded_and_not_raised(fault, words):
    worker = Worker()
    setattr(worker, fault, True)
    async with serving(worker) as address, asyncio.timeout(BOUND_S):
        traffic = traffic_to(address)
        running = asyncio.create_task(traffic.run())
        await taken(worker, 1)
        traffic.end()
        await running
    assert re.fullmatch(words, traffic.completions[0].failure)


def test_prompts_are_the_bytes_of_texts_and_differ_in_length_to_generate():
    texts = [bytes([i, i + 1]) for i in range(20)]
    prompts = prompts_of("code", texts, max_tokens=(24, 56), seed=3)
    assert [bytes(prompt.tokens) for prompt in prompts] == texts
    assert all(24 <= prompt.max_tokens <= 56 for prompt in prompts)
    assert len({prompt.max_tokens for prompt in prompts}) > 5
    assert prompts == prompts_of("code", texts, max_tokens=(24, 56), seed=3)


def test_a_prompt_has_tokens_and_asks_for_some():
    with pytest.raises(AssertionError):
        Prompt(domain="code", tokens=(), max_tokens=1)
    with pytest.raises(AssertionError):
        Prompt(domain="code", tokens=(1,), max_tokens=0)
