"""Clients get the model's tokens over real gRPC, and errors have a code and a reason."""

import asyncio
import threading
from contextlib import asynccontextmanager

import grpc
import pytest
import pytest_asyncio

from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.inference import request_from_proto, request_to_proto
from equipoise.wire.inference_messages import (
    ACCEPTED_KEY,
    BLAME_KEY,
    Blame,
    GenerateRequest,
    Grammar,
    GrammarKind,
)
from equipoise.worker.engine import Engine
from equipoise.worker.errors import StepError
from equipoise.worker.grammars import GrammarError, GrammarLimitError
from equipoise.worker.group import RankGroup
from equipoise.worker.scheduler import Scheduler
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc
from tests.support.lone_engine import lone_engine
from tests.support.worker_parts import inference_of

PROMPT = (3, 1, 4, 1, 5)


class Gate(RankGroup):
    """A rank alone whose steps a test can hold up."""

    def __init__(self):
        super().__init__(epoch=1, rank=0, names=("worker-0",))
        self.open = threading.Event()
        self.open.set()

    def exchange(self, header):
        assert self.open.wait(60)
        return super().exchange(header)


class WatchedEngine(Engine):
    """Tells a test, on the event loop, what the service asks of the engine."""

    def __init__(self, **parts):
        super().__init__(**parts)
        self.submitted, self.cancelled = asyncio.Queue(), asyncio.Queue()

    def submit(self, request):
        super().submit(request)
        self.submitted.put_nowait(request.key)

    def cancel(self, key):
        super().cancel(key)
        self.cancelled.put_nowait(key)


class Bench:
    def __init__(self, service, engine, gate, stub):
        self.service, self.engine, self.gate, self.stub = service, engine, gate, stub


@asynccontextmanager
async def stub_of(service):
    server = grpc.aio.server()
    worker_pb2_grpc.add_InferenceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield worker_pb2_grpc.InferenceStub(channel)
    finally:
        await server.stop(None)


@pytest_asyncio.fixture
async def bench(rank_of_one):
    core, held = rank_of_one()
    service = inference_of()
    loop, gate = asyncio.get_running_loop(), Gate()
    engine = lone_engine(
        core,
        held,
        lambda result: loop.call_soon_threadsafe(service.deliver, result),
        kind=WatchedEngine,
        group=gate,
        scheduler=Scheduler(
            blocks=core.block_pool(), max_requests=2, max_queued=1, max_step_tokens=8
        ),
    )
    service.open(engine)
    stepping = asyncio.create_task(asyncio.to_thread(engine.run))
    async with stub_of(service) as stub:
        yield Bench(service, engine, gate, stub)
        gate.open.set()
        engine.leave()
        await asyncio.wait_for(stepping, 60)


def request(prompt=PROMPT, max_tokens=8, **fields):
    return pb.GenerateRequest(prompt=prompt, max_tokens=max_tokens, **fields)


async def generated(call):
    responses = [response async for response in call]
    return [token for response in responses for token in response.tokens], responses


async def to_the_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def several(queue, count):
    async with asyncio.timeout(60):
        return [await queue.get() for _ in range(count)]


async def test_a_client_gets_the_solo_tokens_step_by_step(bench, solo):
    tokens, responses = await generated(bench.stub.Generate(request(max_tokens=30), timeout=60))
    assert tokens == solo(PROMPT, 30)
    assert [response.finish_reason for response in responses[:-1]] == [0] * (len(responses) - 1)
    assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert {response.generation for response in responses} == {1}
    steps = [response.step for response in responses]
    assert steps == sorted(set(steps))
    assert bench.service._streams == {}


async def test_a_stop_token_is_the_last_token_and_the_finish_reason(bench, solo):
    expected = solo(PROMPT, 30)
    tokens, responses = await generated(
        bench.stub.Generate(request(max_tokens=30, stop_tokens=[expected[3]]), timeout=60)
    )
    assert tokens == expected[: expected.index(expected[3]) + 1]
    assert responses[-1].finish_reason == pb.FINISH_REASON_STOP


async def test_many_clients_at_once_get_their_own_tokens(bench, solo):
    prompts = [(n, 2 * n, 3 * n) for n in range(1, 4)]
    calls = [bench.stub.Generate(request(prompt), timeout=60) for prompt in prompts]
    results = await asyncio.gather(*(generated(call) for call in calls))
    for prompt, (tokens, _) in zip(prompts, results, strict=True):
        assert tokens == solo(prompt, 8)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request(prompt=()), "prompt is empty"),
        (request(max_tokens=0), "max_tokens is 0"),
        (request(max_tokens=92), "add up to 97 tokens, more than this worker's context of 96"),
        (request(prompt=(1, 64)), "token 64 is not in the vocabulary: tokens are 0 to 63"),
        (request(stop_tokens=(99,)), "token 99 is not in the vocabulary"),
        (request(num_replayed=5), "num_replayed is 5"),
        (request(prompt_logprobs=21), "prompt_logprobs is 21: it must be at most 20"),
        (request(min_tokens=9), "min_tokens is 9: it must be at most max_tokens, 8"),
        (request(stop_tokens=[1] * 1025), "stop_tokens has more than 1024 tokens"),
        (request(logit_bias={64: 1.0}), "token 64 is not in the vocabulary"),
        (request(logit_bias={1: float("nan")}), "sampling.logit_bias = ((1, nan),) is out of"),
        (request(logit_bias={1: -100.5}), "it must be from -100 to 100 for every token"),
        (request(sampling=pb.Sampling(temperature=-1)), "sampling.temperature = -1.0 is out of"),
        (request(sampling=pb.Sampling(top_p=0)), "sampling.top_p = 0.0 is out of range"),
        (request(sampling=pb.Sampling(min_p=float("nan"))), "sampling.min_p = nan"),
        (request(sampling=pb.Sampling(repetition_penalty=0)), "sampling.repetition_penalty"),
        (request(sampling=pb.Sampling(temperature=1e-300)), "0 (greedy) or from 0.01 to 100"),
        (request(sampling=pb.Sampling(repetition_penalty=1e-38)), "must be from 0.01 to 100"),
        (request(sampling=pb.Sampling(logprobs=21)), "sampling.logprobs = 21 is out of range"),
    ],
)
async def test_an_invalid_request_names_the_limit(bench, bad, words):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generated(bench.stub.Generate(bad, timeout=60))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in caught.value.details()


VARIED = [
    pb.Sampling(temperature=1.0, seed=1),
    pb.Sampling(temperature=0.8, top_p=0.9, seed=2, presence_penalty=0.7),
    pb.Sampling(temperature=1.3, top_k=9, min_p=0.01, seed=3, frequency_penalty=0.5),
    pb.Sampling(repetition_penalty=1.5),
]


async def test_sampled_tokens_are_the_same_alone_batched_and_continued_elsewhere(bench):
    alone = [await generated(bench.stub.Generate(request(sampling=one))) for one in VARIED]
    tokens = [made for made, _ in alone]
    assert len({tuple(made) for made in tokens}) == len(VARIED)
    # Two rows run at a time, a third is queued.
    calls = [bench.stub.Generate(request(sampling=one)) for one in VARIED[:3]]
    assert [made for made, _ in await asyncio.gather(*map(generated, calls))] == tokens[:3]
    for sampling, made in zip(VARIED, tokens, strict=True):
        rest = request((*PROMPT, *made[:3]), max_tokens=5, sampling=sampling, num_replayed=3)
        assert (await generated(bench.stub.Generate(rest)))[0] == made[3:]


async def test_logprobs_come_with_their_tokens_on_request(bench, solo):
    _, silent = await generated(bench.stub.Generate(request()))
    assert not any(response.logprobs for response in silent)
    tokens, responses = await generated(
        bench.stub.Generate(request(sampling=pb.Sampling(logprobs=3)), timeout=60)
    )
    logprobs = [one for response in responses for one in response.logprobs]
    assert tokens == solo(PROMPT, 8)
    # Greedy: the token is the likeliest of those returned.
    assert [one.top_tokens[0] for one in logprobs] == tokens
    for one in logprobs:
        assert one.logprob == one.top_logprobs[0] < 0
        assert list(one.top_logprobs) == sorted(one.top_logprobs, reverse=True)
        assert len(one.top_tokens) == len(one.top_logprobs) == 3


async def test_the_prompts_tokens_are_scored_as_in_one_forward_pass(bench, full_forward):
    prompts = [[(7 * seed + 3 * place) % 64 for place in range(50)] for seed in range(3)]
    await generated(bench.stub.Generate(request(prompts[0], max_tokens=1)))  # cached from here on
    # Steps run 8 tokens, two requests at a time.
    calls = [bench.stub.Generate(request(one, prompt_logprobs=3)) for one in prompts]
    results = await asyncio.gather(*map(generated, calls))
    again, _ = await generated(bench.stub.Generate(request(prompts[0])))
    assert again == results[0][0], "scoring changes no token"
    for prompt, (_, responses) in zip(prompts, results, strict=True):
        (report,) = [one.prompt for one in responses if one.HasField("prompt")]
        assert len(report.logprobs) == len(prompt) - 1
        assert report.cached_tokens == 0, "rows that score have to run"
        expected = full_forward(prompt)
        for place, one in enumerate(report.logprobs, start=1):
            values = expected[place - 1]
            assert one.logprob == pytest.approx(values[prompt[place]].item(), abs=1e-5)
            best = values.sort(descending=True, stable=True).indices[:3].tolist()
            assert list(one.top_tokens) == best
            assert one.top_logprobs[0] == pytest.approx(values.max().item(), abs=1e-5)
    alone = await generated(bench.stub.Generate(request(prompts[1], prompt_logprobs=3)))
    reports = [
        [one.prompt for one in found if one.HasField("prompt")]
        for found in (alone[1], results[1][1])
    ]
    assert reports[0] == reports[1], "bitwise, whatever else is in the batch"


async def test_a_replayed_request_reports_its_own_prompt_only(bench):
    fields = {"prompt_logprobs": 1, "max_tokens": 4}
    _, whole = await generated(bench.stub.Generate(request((1, 2, 3, 4), **fields)))
    _, parts = await generated(bench.stub.Generate(request((1, 2, 3, 4), num_replayed=2, **fields)))
    assert len(parts[0].prompt.logprobs) == 1
    assert parts[0].prompt.logprobs[0] == whole[0].prompt.logprobs[0]


async def test_cached_tokens_of_a_prompt_are_reported(bench):
    prompt = tuple(range(1, 40))
    for num_cached in (0, 32):
        _, (first, *rest) = await generated(bench.stub.Generate(request(prompt)))
        assert first.prompt.cached_tokens == num_cached
        assert not any(one.HasField("prompt") for one in rest)


async def test_stop_tokens_are_not_generated_before_min_tokens(bench, solo):
    unstopped = solo(PROMPT, 30)
    for min_tokens in (0, 1, 5, 8):
        fields = {"stop_tokens": [unstopped[0], unstopped[3]], "min_tokens": min_tokens}
        tokens, _ = await generated(bench.stub.Generate(request(max_tokens=30, **fields)))
        assert not set(tokens[:min_tokens]) & set(fields["stop_tokens"])
        rest = request(
            (*PROMPT, *tokens[:2]), max_tokens=28, num_replayed=len(tokens[:2]), **fields
        )
        if len(tokens) > 2:
            assert (await generated(bench.stub.Generate(rest)))[0] == tokens[2:]
    bias = {unstopped[0]: -100.0, 5: 100.0}
    tokens, _ = await generated(bench.stub.Generate(request(logit_bias=bias)))
    assert tokens == [5] * 8


def test_a_request_that_fills_the_context_to_the_last_token_is_served():
    request_from_proto(request(max_tokens=91), vocab_size=64, context_length=96)
    with pytest.raises(InvalidMessageError):
        request_from_proto(request(max_tokens=92), vocab_size=64, context_length=96)


def test_a_grammar_may_begin_after_a_short_text_only():
    grammar = Grammar(kind=GrammarKind.REGEX, text="a+", after="x" * 64)
    message = request_to_proto(
        GenerateRequest(request_id="a", prompt=(1,), max_tokens=1, grammar=grammar)
    )
    assert request_from_proto(message, vocab_size=64, context_length=96).grammar == grammar
    message.grammar.after += "x"
    with pytest.raises(InvalidMessageError, match=r"grammar\.after must have at most 64 bytes"):
        request_from_proto(message, vocab_size=64, context_length=96)


async def test_a_queued_request_hears_of_steps_for_others_until_its_turn(bench, solo):
    bench.gate.open.clear()
    first = [bench.stub.Generate(request(max_tokens=80), timeout=60) for _ in range(2)]
    others = [asyncio.create_task(generated(call)) for call in first]
    await several(bench.engine.submitted, 2)
    queued = bench.stub.Generate(request(), timeout=60)
    reports = [await queued.read() for _ in range(2)]
    assert all(report.is_waiting and not report.tokens for report in reports)
    # While the rank makes no steps, their number shows it.
    assert {(report.epoch, report.step) for report in reports} == {(1, 0)}
    bench.gate.open.set()
    responses = [*reports]
    while (response := await queued.read()) is not grpc.aio.EOF:
        responses.append(response)
    assert [token for response in responses for token in response.tokens] == solo(PROMPT, 8)
    for tokens, _ in await asyncio.gather(*others):
        assert tokens == solo(PROMPT, 80)


async def test_a_full_queue_rejects_at_once_and_affects_no_other_request(bench, solo):
    bench.gate.open.clear()
    calls = [bench.stub.Generate(request(), timeout=60) for _ in range(3)]
    tasks = [asyncio.create_task(generated(call)) for call in calls]
    await several(bench.engine.submitted, 3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generated(bench.stub.Generate(request(), timeout=60))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    bench.gate.open.set()
    for tokens, _ in await asyncio.gather(*tasks):
        assert tokens == solo(PROMPT, 8)


async def test_a_client_that_disconnects_frees_its_blocks(bench):
    calls = [bench.stub.Generate(request(max_tokens=90), timeout=60) for _ in range(2)]
    for call in calls:
        assert (await call.read()).tokens
        call.cancel()
    await several(bench.engine.cancelled, 2)
    async with asyncio.timeout(60):  # Once the step that may still write to them is over.
        while (stats := bench.engine.progress().stats).cache_tokens_used:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert stats.active_requests == stats.queued_requests == 0
    assert stats.tokens_generated < 180
    assert bench.service._streams == {}


class Stuck:
    """The context of a client whose writes do not end."""

    def __init__(self):
        self.writing = asyncio.Event()

    async def send_initial_metadata(self, _):
        pass

    async def write(self, _):
        self.writing.set()
        await asyncio.Event().wait()


async def test_a_client_that_goes_while_its_last_message_is_written_may_have_read_it(bench):
    message = request(tuple(range(40)), max_tokens=1, hold_latents=True)
    client = Stuck()
    call = asyncio.create_task(bench.service.Generate(message, client))
    await asyncio.wait_for(client.writing.wait(), 60)
    call.cancel()
    await asyncio.wait([call])
    holds = bench.engine._scheduler.holds
    assert (holds.num_open, holds.ended) == (1, {})


async def test_clients_get_the_reason_when_the_engine_ends(bench):
    call = bench.stub.Generate(request(max_tokens=90), timeout=60)
    assert (await call.read()).tokens
    bench.gate.open.clear()
    bench.service.close("a peer rank failed")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await to_the_end(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "a peer rank failed"
    with pytest.raises(grpc.aio.AioRpcError, match="a peer rank failed"):
        await generated(bench.stub.Generate(request(), timeout=60))


class SlowGrammars:
    """Compile once the test says so."""

    def __init__(self, *, fault=None):
        self.compiling, self.go, self.fault = asyncio.Event(), asyncio.Event(), fault

    async def constraint(self, *_, **__):
        self.compiling.set()
        async with asyncio.timeout(60):
            await self.go.wait()
        if self.fault:
            raise self.fault

    def close(self):
        pass


GRAMMAR = pb.Grammar(regex="a")


async def test_a_request_is_accepted_before_its_grammar_is_compiled(bench, solo):
    """The gateway does not take a rank that compiles for broken, nor try a grammar that kills it
    on rank after rank."""
    bench.service._grammars = slow = SlowGrammars()
    call = bench.stub.Generate(request(grammar=GRAMMAR), timeout=60)
    async with asyncio.timeout(60):
        assert dict(await call.initial_metadata())[ACCEPTED_KEY] == "1"
        await slow.compiling.wait()
        assert (await generated(bench.stub.Generate(request(), timeout=60)))[0] == solo(PROMPT, 8)
        slow.go.set()
        assert (await generated(call))[0] == solo(PROMPT, 8)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (GrammarError("as the test says"), grpc.StatusCode.INVALID_ARGUMENT),
        (GrammarLimitError("as the test says"), grpc.StatusCode.OUT_OF_RANGE),
    ],
)
async def test_a_grammar_that_cannot_be_compiled_is_rejected_by_name(bench, fault, code):
    bench.service._grammars = slow = SlowGrammars(fault=fault)
    slow.go.set()
    with pytest.raises(grpc.aio.AioRpcError, match="grammar: as the test says") as caught:
        await generated(bench.stub.Generate(request(grammar=GRAMMAR), timeout=60))
    assert caught.value.code() is code
    await several(bench.engine.cancelled, 1)
    assert bench.service._streams == {}


async def test_no_request_is_to_blame_if_the_engine_ends_while_its_grammar_is_compiled(bench):
    bench.service._grammars = slow = SlowGrammars()
    call = bench.stub.Generate(request(grammar=GRAMMAR), timeout=60)
    await slow.compiling.wait()
    bench.service.close("a peer rank failed")
    slow.go.set()
    with pytest.raises(grpc.aio.AioRpcError, match="a peer rank failed") as caught:
        await to_the_end(call)
    assert dict(caught.value.trailing_metadata())[BLAME_KEY] == Blame.NONE


async def test_a_request_of_an_earlier_engine_is_cancelled_under_the_lock_of_the_newest(
    bench, rank_of_one
):
    call = bench.stub.Generate(request(max_tokens=90), timeout=60)
    assert (await call.read()).tokens
    bench.gate.open.clear()
    core, held = rank_of_one()
    newest = lone_engine(
        core, held, lambda _: None, kind=WatchedEngine, scheduler=bench.engine._scheduler
    )
    bench.service.open(newest)  # Engines of later epochs have the requests of the earlier ones.
    bench.service.close("the worker is shutting down")
    with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
        await to_the_end(call)
    key = await asyncio.wait_for(newest.cancelled.get(), 60)
    assert key == await bench.engine.submitted.get()
    assert bench.engine.cancelled.empty()


def blame_of(error):
    return dict(error.trailing_metadata()).get(BLAME_KEY)


async def test_a_request_whose_logits_are_not_finite_ends_alone_and_is_blamed(bench, solo):
    bench.engine._model.embed_tokens.weight.data[63] = float("nan")
    good = asyncio.create_task(generated(bench.stub.Generate(request(), timeout=60)))
    with pytest.raises(grpc.aio.AioRpcError, match="the request failed in step") as caught:
        await generated(bench.stub.Generate(request(prompt=(63, 1)), timeout=60))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert blame_of(caught.value) == Blame.REQUEST
    tokens, _ = await good
    assert tokens == solo(PROMPT, 8)


@pytest.mark.parametrize("blame", [Blame.STEP, Blame.REQUEST])
async def test_a_step_that_fails_blames_the_requests_that_were_in_it(bench, blame):
    calls = [bench.stub.Generate(request(max_tokens=90), timeout=60) for _ in range(2)]
    for call in calls:
        assert (await call.read()).tokens
    bench.gate.open.clear()
    keys = await several(bench.engine.submitted, 2)
    bench.service.close("it broke", failed_step=StepError("", keys=keys[:1], blame=blame))
    blames = []
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError, match="it broke") as caught:
            await to_the_end(call)
        blames.append(blame_of(caught.value))
    assert sorted(blames) == sorted([blame, Blame.NONE])


async def test_requests_before_the_first_rank_are_unavailable():
    async with stub_of(inference_of()) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generated(stub.Generate(request(), timeout=60))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "no rank yet" in caught.value.details()


async def test_limits_are_reported_while_requests_are_served(bench):
    limits = await bench.stub.GetLimits(pb.GetLimitsRequest(), timeout=60)
    assert limits.context_length == 96
    bench.service.draining = "this worker leaves"
    with pytest.raises(grpc.aio.AioRpcError, match="this worker leaves") as caught:
        await bench.stub.GetLimits(pb.GetLimitsRequest(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
