"""The gateway with real processes: a balancer, two workers of the tiny model, and HTTP clients.

All tests but the benchmarks share one fleet, in order: the last two tests break it.
"""

import asyncio
import json
import signal
import statistics
import time
from contextlib import suppress

import httpx2
import pytest
import pytest_asyncio

from equipoise.cli.bench.clients import BenchClients
from equipoise.cli.bench.report import report
from equipoise.cli.bench.requests import timed_requests
from equipoise.cli.bench.settings import BenchServeSettings
from equipoise.cli.demo.fleet import free_address
from equipoise.cli.demo.reference import ReferenceModel
from equipoise.cli.demo.traffic import prompts_of
from equipoise.formats.packaged import packaged_checkpoint
from equipoise_model.train.data import heldout_prompts
from tests.support.serving_fleet import BOUND_S, serving

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def answers():
    """Text prompts, and an unbalanced model's answers to them."""
    texts = heldout_prompts("code", num_prompts=6, seed=5)
    prompts = prompts_of("code", texts, max_tokens=(24, 48), seed=5)
    return ReferenceModel.load(packaged_checkpoint()).answer(prompts)


class Service:
    """The serving processes, one client, and the balancer's status."""

    def __init__(self, running):
        self.fleet, self.feed, self.client = running.fleet, running.feed, running.client
        self.balancer = running.balancer
        self.num_begun = self.num_tokens = 0
        self.changed = asyncio.Condition()

    async def begun(self, num_streams):
        """Wait until this many more streams have their first token."""
        wanted = self.num_begun + num_streams
        async with asyncio.timeout(BOUND_S), self.changed:
            await self.changed.wait_for(lambda: self.num_begun >= wanted)

    async def whole(self, prompt):
        response = await self.client.post("/v1/completions", json=_body(prompt))
        assert response.status_code == 200, response.text
        tokens = tuple(response.json()["choices"][0]["token_ids"])
        self.num_tokens += len(tokens)
        return tokens

    async def streamed(self, prompt):
        tokens = []
        body = {**_body(prompt), "stream": True}
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return tuple(tokens)
                if line:
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    if not tokens:
                        async with self.changed:
                            self.num_begun += 1
                            self.changed.notify_all()
                    tokens += choice["token_ids"]
                    self.num_tokens += len(choice["token_ids"])
        raise AssertionError("the stream has no end")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory):
    """A balancer, two workers and a gateway that is ready."""
    async with serving(tmp_path_factory.mktemp("service")) as running:
        yield Service(running)


def _body(prompt):
    return {
        "prompt": bytes(prompt.tokens).decode(),
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def test_tokens_over_http_are_the_reference_models(service, answers):
    wholes = await asyncio.gather(*(service.whole(prompt) for prompt in answers))
    streams = await asyncio.gather(*(service.streamed(prompt) for prompt in answers))
    assert wholes == list(answers.values())
    assert streams == list(answers.values())
    # Both ranks served requests.
    status = await service.feed.until(
        lambda status: all(rank.tokens_generated for rank in status.ranks), timeout_s=BOUND_S
    )
    assert len(status.ranks) == 2


@pytest.mark.benchmark
@pytest.mark.timeout(900)
async def test_many_streams_at_once_make_five_times_the_tokens_of_one_at_a_time(tmp_path):
    async def tokens_per_s(service, concurrency, num_requests):
        settings = BenchServeSettings(
            url=str(service.client.base_url), concurrency=concurrency, ignore_eos=True
        )
        async with BenchClients(settings, clock=time.perf_counter, done=lambda _: None) as load:
            warm_up = timed_requests(settings, count=concurrency // 2 + 1, stream=1)
            await load.run(warm_up, model="tiny")
            measured = timed_requests(settings, count=num_requests, stream=0)
            made = report(await load.run(measured, model="tiny"))
        assert not made.failures
        return made.output_tokens_per_s

    # In turns, so that other load on the machine affects both.
    alone, together = [], []
    async with serving(tmp_path) as service:
        for _ in range(3):
            alone.append(await tokens_per_s(service, 1, 3))
            together.append(await tokens_per_s(service, 32, 64))
    ratio = statistics.median(many / one for many, one in zip(together, alone, strict=True))
    print(f"32 streams: {together} tokens/s, one: {alone}; {ratio:.1f} times")
    assert ratio >= 5


@pytest.mark.benchmark
@pytest.mark.timeout(600)
async def test_a_cached_prefix_cuts_the_time_to_first_token_to_a_fifth(
    tmp_path,
):
    """Prompts of 1,000 tokens and a question, with and without a shared prefix, in turns."""
    texts = heldout_prompts("code", num_prompts=40, seed=3)
    beginning = b"".join(texts).decode("ascii", "ignore")[:1000]
    assert len(beginning) == 1000

    async def first_token_s(client, prompt):
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
        began = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            await anext(response.aiter_lines())
            return time.perf_counter() - began

    async with serving(tmp_path, "--context-length=1024", num_ranks=1) as service:
        await first_token_s(service.client, beginning + "# begins")
        new, known = [], []
        for turn in range(12):
            question = f"# question {turn:2}"
            other = f"# {turn:2}\n" + beginning[5:]
            new.append(await first_token_s(service.client, other + question))
            known.append(await first_token_s(service.client, beginning + question))
        status = await service.feed.until(
            lambda status: status.ranks[0].prefix_tokens_found >= 12 * 992, timeout_s=BOUND_S
        )
    ratios = sorted(one / other for one, other in zip(new, known, strict=True))
    print(
        f"first token of 1,000 new tokens {_spread(new)}, of 1,000 known ones {_spread(known)}; "
        f"{ratios[0]:.1f}, {statistics.median(ratios):.1f}, {ratios[-1]:.1f} times as early "
        f"(least, median, most); {status.ranks[0].prefix_tokens_found} tokens found"
    )
    assert statistics.median(ratios) >= 5


@pytest.mark.benchmark
@pytest.mark.timeout(600)
async def test_kept_connections_cost_no_time_to_first_token(tmp_path):
    """Within 5 ms of fresh ones, in turns; 40 ms more are a delayed acknowledgement."""
    body = {"prompt": "def f(", "max_tokens": 2, "temperature": 0, "stream": True}

    async def first_token_s(client):
        began = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            lines = response.aiter_lines()
            await anext(lines)
            took_s = time.perf_counter() - began
            async for _ in lines:
                pass
        return took_s

    kept, fresh = [], []
    async with serving(tmp_path, num_ranks=1) as service:
        await first_token_s(service.client)
        for _ in range(60):
            kept.append(await first_token_s(service.client))
            async with httpx2.AsyncClient(base_url=service.client.base_url) as other:
                fresh.append(await first_token_s(other))
    print(f"first token over a kept connection {_spread(kept)}, over a fresh one {_spread(fresh)}")
    assert statistics.median(kept) <= statistics.median(fresh) + 0.005


def _spread(durations_s):
    low, middle, high = (1000 * pick(durations_s) for pick in (min, statistics.median, max))
    return f"{low:.0f}, {middle:.0f}, {high:.0f} ms (least, median, most)"


async def test_a_client_that_hangs_up_frees_the_row_on_the_worker(service, answers):
    body = {"prompt": "def ", "max_tokens": 250, "ignore_eos": True, "stream": True}
    async with service.client.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_lines())
    await asyncio.gather(*(service.whole(prompt) for prompt in answers))
    # Everything answered since the workers started.
    answered = service.num_tokens
    # A report with the later requests' tokens was made after the disconnect.
    status = await service.feed.until(
        lambda status: (
            sum(rank.tokens_generated for rank in status.ranks) >= answered
            and not any(rank.active_requests or rank.queued_requests for rank in status.ranks)
        ),
        timeout_s=BOUND_S,
    )
    assert sum(rank.tokens_generated for rank in status.ranks) < answered + 250


async def test_a_killed_gateways_stream_has_no_end_and_another_one_repeats_it(service):
    address = free_address("127.0.0.1:0")
    await service.fleet.start(
        "doomed", ["gateway", f"--listen={address}", f"--balancer={service.balancer}"]
    )
    body = {
        "prompt": "def ", "max_tokens": 200, "ignore_eos": True, "seed": 7, "temperature": 1.0,
        "return_token_ids": True,
    }  # fmt: skip
    lines = []
    async with httpx2.AsyncClient(base_url=f"http://{address}", timeout=BOUND_S) as client:
        await _ready(client)
        with pytest.raises(httpx2.HTTPError):
            await _until_it_breaks(service, client, {**body, "stream": True}, lines)
    assert "data: [DONE]" not in lines
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    got = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert 5 <= len(got) < 200
    # Its request ended on the rank, and the same request elsewhere gives the same tokens.
    await service.feed.until(
        lambda status: not any(rank.active_requests for rank in status.ranks), timeout_s=BOUND_S
    )
    response = await service.client.post("/v1/completions", json=body)
    tokens = response.json()["choices"][0]["token_ids"]
    assert tokens[: len(got)] == got
    assert len(tokens) == 200


async def _ready(client):
    async with asyncio.timeout(BOUND_S):
        while True:
            with suppress(httpx2.ConnectError):
                if (await client.get("/readyz")).status_code == 200:
                    return
            await asyncio.sleep(0.1)


async def _until_it_breaks(service, client, body, lines):
    """Read a stream, and kill its gateway after some lines."""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if len(lines) == 10:
                await service.fleet.stop("doomed", with_signal=signal.SIGKILL)


async def test_no_stream_notices_a_killed_worker(service, answers):
    begun = asyncio.create_task(service.begun(len(answers)))
    streams = [asyncio.create_task(service.streamed(prompt)) for prompt in answers]
    await begun
    await service.fleet.stop("worker-1", with_signal=signal.SIGKILL)
    assert await asyncio.gather(*streams) == list(answers.values())
    assert await service.streamed(next(iter(answers))) == next(iter(answers.values()))


async def test_serving_continues_without_the_balancer_and_ends_with_the_gateway(service, answers):
    prompt, expected = next(iter(answers.items()))
    assert await service.streamed(prompt) == expected
    await service.fleet.stop("balancer", with_signal=signal.SIGKILL)
    assert await service.streamed(prompt) == expected
    assert (await service.client.get("/readyz")).status_code == 200
    last = asyncio.create_task(service.streamed(prompt))
    assert await service.streamed(prompt) == expected
    assert await service.fleet.stop("gateway") == 0
    assert await last == expected
