"""Whatever ranks do, the client sees an undisturbed stream or a clear error."""

import asyncio
import json
import random
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import grpc
import pytest

from equipoise.gateway.metrics import RequestTally
from equipoise.gateway.rank_channels import RankChannels
from equipoise.gateway.rank_load import RankInfo, RankState
from equipoise.gateway.rank_table import RankTable
from equipoise.gateway.relay import Relay
from equipoise.gateway.settings import GatewaySettings
from equipoise.gateway.suspicion import Suspicion
from equipoise.trust.credentials import Credentials
from equipoise.wire.inference_messages import Blame, GenerateRequest
from equipoise_api.v1 import worker_pb2 as pb
from tests.support.scripted_ranks import (
    BOUND_S,
    END_TOKEN,
    VOCAB_SIZE,
    Fault,
    all_events,
    events,
    listening,
    tokens_of,
    undisturbed,
)

PROMPT = (3, 1, 4, 1, 5)
MAX_TOKENS = 12
EXPECTED = undisturbed(PROMPT, MAX_TOKENS)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

# A fault of the rank, and how many right tokens are out before it. Requests meet it at any rank,
# so the first attempt always fails.
BREAKS = {
    "dies": lambda after: Fault(after=after, code=UNAVAILABLE),
    "ends as if all were well": lambda after: Fault(after=after),
    "fails inside": lambda after: Fault(after=after, code=grpc.StatusCode.INTERNAL),
    "is cancelled": lambda after: Fault(after=after, code=grpc.StatusCode.CANCELLED),
    "says it is done too early": lambda after: Fault(
        after=after, also=(pb.GenerateResponse(finish_reason=pb.FINISH_REASON_LENGTH),)
    ),
    "says it stopped, but did not": lambda after: Fault(
        after=after,
        also=(pb.GenerateResponse(tokens=[33], finish_reason=pb.FINISH_REASON_STOP),),
    ),
    "makes a token that is none": lambda after: Fault(
        after=after, also=(pb.GenerateResponse(tokens=[VOCAB_SIZE]),)
    ),
    "makes more than was asked": lambda after: Fault(
        after=after, also=(pb.GenerateResponse(tokens=[33] * 99),)
    ),
}


async def streamed(gateway, **fields):
    async with gateway.stream(prompt=list(PROMPT), max_tokens=MAX_TOKENS, **fields) as response:
        assert response.status_code == 200, await response.aread()
        return tokens_of(await all_events(response))


async def test_an_undisturbed_stream_has_the_ranks_tokens(gateway, fleet):
    assert await streamed(gateway) == EXPECTED
    assert fleet.num_requests == 1


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.parametrize("after", [0, 1, 5, MAX_TOKENS - 1])
async def test_a_break_is_invisible_to_the_client(gateway, fleet, name, after):
    fault = BREAKS[name](after)
    fleet.ranks[0].faults.append(fault)
    fleet.ranks[1].faults.append(fault)
    # The first attempt breaks, the second meets the other rank's fault, the third is well.
    assert await streamed(gateway) == EXPECTED
    assert fleet.num_requests == (3 if 2 * after < MAX_TOKENS else 2)


async def test_a_death_at_any_position_is_invisible_to_the_client(gateway, fleet):
    for after in range(MAX_TOKENS):
        for rank in fleet.ranks:
            rank.faults.clear()
        fleet.fail(Fault(after=after, code=UNAVAILABLE))
        assert await streamed(gateway) == EXPECTED, after


async def test_a_retry_requests_only_the_remaining_tokens(gateway, fleet):
    fleet.fail(Fault(after=5, code=UNAVAILABLE))
    await streamed(gateway)
    requests = sorted(
        (request for rank in fleet.ranks for request in rank.requests),
        key=lambda request: len(request.prompt),
    )
    assert [tuple(one.prompt) for one in requests] == [
        PROMPT, PROMPT + EXPECTED[:5], PROMPT + EXPECTED[:10],
    ]  # fmt: skip
    assert [one.max_tokens for one in requests] == [12, 7, 2]
    assert len({one.request_id for one in requests}) == 1


async def test_a_death_after_the_last_token_is_not_a_break(gateway, fleet):
    fleet.fail(Fault(after=MAX_TOKENS, code=UNAVAILABLE))
    assert await streamed(gateway) == EXPECTED
    assert fleet.num_requests == 1


async def test_a_break_between_messages_of_several_tokens_loses_none(gateway, fleet):
    for rank in fleet.ranks:
        rank.tokens_a_message = 5
    fleet.fail(Fault(after=7, code=UNAVAILABLE))
    assert await streamed(gateway) == EXPECTED


@pytest.mark.parametrize("after", [0, 1, 6])
async def test_a_hanging_rank_is_left_after_the_timeout(run_gateway, fleet, after):
    fleet.ranks[0].faults.append(Fault(after=after, hang=True))
    async with run_gateway(
        workers=tuple(fleet.addresses), first_token_timeout_s=0.2, silence_timeout_s=0.2
    ) as gateway:
        assert await streamed(gateway) == EXPECTED
    assert fleet.num_requests == 2
    await fleet.until_idle()


async def test_messages_without_tokens_do_not_extend_the_timeout(run_gateway, fleet):
    fleet.ranks[0].faults.append(Fault(after=2, also=(pb.GenerateResponse(),) * 3, hang=True))
    async with run_gateway(workers=tuple(fleet.addresses), silence_timeout_s=0.2) as gateway:
        assert await streamed(gateway) == EXPECTED
    assert fleet.num_requests == 2


def waiting(step):
    return pb.GenerateResponse(epoch=1, step=step, is_waiting=True)


@pytest.mark.parametrize("after", [0, 2])
async def test_time_in_the_queue_of_a_rank_that_works_is_not_a_break(run_gateway, fleet, after):
    """Also after some tokens: a preempted request is queued again."""
    for rank in fleet.ranks:
        rank.waits_s = [0.15] * 6
        rank.waits_after = after
    async with run_gateway(
        workers=tuple(fleet.addresses), first_token_timeout_s=0.4, silence_timeout_s=0.4
    ) as gateway:
        assert await streamed(gateway) == EXPECTED
    assert fleet.num_requests == 1


async def test_reports_of_waiting_without_steps_do_not_extend_the_timeout(run_gateway, fleet):
    stuck = Fault(also=(waiting(7),) * 3, hang=True)
    fleet.ranks[0].faults.append(stuck)
    async with run_gateway(workers=tuple(fleet.addresses), first_token_timeout_s=0.3) as gateway:
        assert await streamed(gateway) == EXPECTED
    assert fleet.num_requests == 2


async def test_a_request_that_waits_too_long_in_a_ranks_queue_gets_503(run_gateway, fleet):
    for rank in fleet.ranks:
        rank.waits_s = [0.05] * 1000
    async with run_gateway(
        workers=tuple(fleet.addresses), rank_queue_timeout_s=0.5, first_token_timeout_s=9
    ) as gateway:
        response = await gateway.post(prompt="hello")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "queue_timeout"
    assert int(response.headers["retry-after"]) >= 1
    assert fleet.num_requests == 1
    await fleet.until_idle()


async def test_a_rank_that_does_not_accept_a_request_is_left_after_the_timeout(run_gateway, fleet):
    fleet.ranks[0].faults.append(Fault(hang=True, accept=False))
    async with run_gateway(workers=tuple(fleet.addresses), accept_timeout_s=0.2) as gateway:
        assert await streamed(gateway) == EXPECTED
    assert fleet.num_requests == 2


async def test_rejections_by_ranks_cost_no_attempt(run_gateway, fleet):
    away = Fault(code=UNAVAILABLE, accept=False)
    full = Fault(code=grpc.StatusCode.RESOURCE_EXHAUSTED, accept=False)
    fleet.fail(away, full, away)
    async with run_gateway(workers=tuple(fleet.addresses), max_attempts=1) as gateway:
        assert await streamed(gateway) == EXPECTED
    assert fleet.num_requests >= 2


async def test_an_unreachable_rank_is_skipped(run_gateway, fleet):
    async with listening(fleet.ranks[0]) as gone:
        pass
    async with run_gateway(workers=(gone, fleet.addresses[1])) as gateway:
        for _ in range(3):
            assert await streamed(gateway) == EXPECTED


async def test_a_request_fails_after_the_last_attempt(run_gateway, fleet):
    fleet.fail(*[Fault(after=2, code=UNAVAILABLE)] * 5)
    async with (
        run_gateway(workers=tuple(fleet.addresses), max_attempts=3) as gateway,
        gateway.stream(prompt=list(PROMPT), max_tokens=MAX_TOKENS) as response,
    ):
        *parts, last = await all_events(response)
    error = json.loads(last)["error"]
    assert error["code"] == "poison_request"
    assert "UNAVAILABLE: as the script says" in error["message"]
    # What came before the end is right, and there is no word of an end that was none.
    assert tokens_of([*parts, "[DONE]"]) == EXPECTED[:6]
    assert fleet.num_requests == 3


@pytest.mark.parametrize("code", [UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT])
async def test_a_ranks_words_reach_clients_and_logs_in_one_line(gateway, fleet, caplog, code):
    words = "no\n2026-01-01 ERROR all is lost\x1b[2J\u202e" + "x" * 3000
    fleet.fail(*[Fault(code=code, words=words)] * 9)
    message = (await gateway.post(prompt="hello")).json()["error"]["message"]
    assert r"no\n2026-01-01 ERROR all is lost\x1b[2J\u202e" in message
    assert message.isprintable()
    assert len(message) < 4000
    assert all(record.getMessage().isprintable() for record in caplog.records)


async def test_a_rejection_of_a_new_request_is_final(gateway, fleet):
    fleet.fail(Fault(code=grpc.StatusCode.INVALID_ARGUMENT, accept=False))
    response = await gateway.post(prompt="hello")
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "as the script says"
    assert fleet.num_requests == 1


async def test_a_rejection_of_a_retry_is_a_break_of_that_rank(run_gateway, fleet):
    first = Fault(after=4, code=UNAVAILABLE)
    rejects = Fault(code=grpc.StatusCode.INVALID_ARGUMENT, accept=False)
    fleet.fail(first, rejects)
    # Both ranks may reject it before one of them is out of faults.
    async with run_gateway(workers=tuple(fleet.addresses), max_attempts=5) as gateway:
        assert await streamed(gateway) == EXPECTED


async def test_rejections_of_a_retry_count_as_attempts(gateway, fleet):
    for rank in fleet.ranks:
        rank.faults.append(Fault(after=4, code=UNAVAILABLE))
        rank.faults.extend(
            [Fault(code=grpc.StatusCode.INVALID_ARGUMENT, accept=False)] * 9,
        )
    # The other rank's first fault breaks the stream once more.
    async with gateway.stream(prompt=list(PROMPT), max_tokens=MAX_TOKENS) as response:
        *parts, last = await all_events(response)
    assert tokens_of([*parts, "[DONE]"]) == EXPECTED[:8]
    assert json.loads(last)["error"]["code"] == "attempts_exhausted"
    assert fleet.num_requests == 4


async def test_a_stop_token_ends_a_stream_after_a_break_too(gateway, fleet):
    fleet.fail(
        Fault(
            after=3,
            also=(pb.GenerateResponse(tokens=[END_TOKEN], finish_reason=pb.FINISH_REASON_STOP),),
        )
    )
    async with gateway.stream(prompt=list(PROMPT), max_tokens=MAX_TOKENS) as response:
        chunks = await all_events(response)
    assert tokens_of(chunks) == (*EXPECTED[:3], END_TOKEN)
    assert json.loads(chunks[-2])["choices"][0]["finish_reason"] == "stop"
    assert fleet.num_requests == 1


async def test_requests_wait_until_a_rank_is_available(run_gateway, fleet):
    rank = fleet.ranks[0]
    async with listening(rank) as address:
        pass
    async with run_gateway(workers=(address,)) as gateway:
        waiting = [asyncio.create_task(streamed(gateway)) for _ in range(4)]
        assert (await gateway.client.get("/healthz")).status_code == 200
        async with listening(rank, address), asyncio.timeout(BOUND_S):
            assert await asyncio.gather(*waiting) == [EXPECTED] * 4


async def test_a_pool_that_restarts_in_mid_stream_is_invisible_to_the_client(run_gateway, fleet):
    rank = fleet.ranks[0]
    rank.faults.append(Fault(after=4, hang=True))
    async with AsyncExitStack() as stack:
        first_life = await stack.enter_async_context(AsyncExitStack())
        address = await first_life.enter_async_context(listening(rank))
        gateway = await stack.enter_async_context(run_gateway(workers=(address,)))
        async with gateway.stream(prompt=list(PROMPT), max_tokens=MAX_TOKENS) as response:
            coming = events(response)
            chunks = [await anext(coming) for _ in range(4)]
            await first_life.aclose()
            async with listening(rank, address):
                chunks += [data async for data in coming]
    assert tokens_of(chunks) == EXPECTED


async def test_an_unavailable_pool_gets_503_with_retry_after(run_gateway, fleet):
    async with listening(fleet.ranks[0]) as gone:
        pass
    async with run_gateway(workers=(gone,), queue_timeout_s=0.3) as gateway:
        response = await gateway.post(prompt="hello")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    error = response.json()["error"]
    assert error["code"] == "pool_unavailable"
    assert gone in error["message"]


async def test_a_full_queue_gets_503_at_once(run_gateway):
    nowhere = ("127.0.0.1:1",)
    async with run_gateway(balancer=nowhere, max_queued_requests=0) as gateway:
        response = await gateway.post(prompt="hello")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "queue_full"
    assert int(response.headers["retry-after"]) >= 1


async def test_work_is_spread_over_the_ranks(gateway, fleet):
    for rank in fleet.ranks:
        rank.gate.clear()
    running = [asyncio.create_task(streamed(gateway)) for _ in range(6)]
    for rank in fleet.ranks:
        await rank.until(lambda rank=rank: rank.num_open == 3)
        rank.gate.set()
    assert await asyncio.gather(*running) == [EXPECTED] * 6


async def test_many_streams_with_many_breaks_keep_their_own_tokens(gateway, fleet):
    fleet.fail(*(Fault(after=after % 7, code=UNAVAILABLE) for after in range(8)))
    prompts = [(number, 2, 3) for number in range(16)]

    async def one(prompt):
        async with gateway.stream(prompt=list(prompt), max_tokens=20) as response:
            return tokens_of(await all_events(response))

    results = await asyncio.gather(*(one(prompt) for prompt in prompts))
    assert results == [undisturbed(prompt, 20) for prompt in prompts]
    await fleet.until_idle()


@pytest.mark.parametrize("seed", range(6))
async def test_any_mix_of_faults_keeps_tokens_right_and_counters_balanced(fleet, seed):
    dice = random.Random(seed)
    kinds = [
        # These ranks explain themselves: unexplained deaths in a row get a request rejected.
        *(
            lambda after, kind=kind: replace(kind(after), blame=Blame.NONE)
            for kind in BREAKS.values()
        ),
        lambda after: Fault(after=after, hang=True),
        lambda _: Fault(hang=True, accept=False),
        lambda _: Fault(code=UNAVAILABLE, accept=False),
        lambda _: Fault(code=grpc.StatusCode.RESOURCE_EXHAUSTED, accept=False),
    ]
    for rank in fleet.ranks:
        rank.tokens_a_message = dice.randint(1, 3)
        rank.faults.extend(dice.choice(kinds)(dice.randint(0, 15)) for _ in range(12))
    ranks = RankTable(max_queued=64, clock=asyncio.get_running_loop().time)
    ranks.update(
        RankInfo(name=address, address=address, state=RankState.OPEN) for address in fleet.addresses
    )
    relay = Relay(
        ranks,
        vocab_size=VOCAB_SIZE,
        settings=GatewaySettings(
            accept_timeout_s=0.3,
            first_token_timeout_s=0.3,
            silence_timeout_s=0.3,
            queue_timeout_s=BOUND_S,
            max_attempts=30,
        ),
        tally=RequestTally(),
        credentials=Credentials(),
        channels=RankChannels(Credentials()),
    )

    async def one(prompt, max_tokens):
        # Every other one asks for the logprobs of its prompt, which come with its first tokens.
        num_top = prompt[1] % 2 or None
        request = GenerateRequest(
            request_id=f"{prompt}", prompt=prompt, max_tokens=max_tokens, prompt_logprobs=num_top
        )
        async with aclosing(relay.stream(request, suspicion=Suspicion())) as parts:
            first, *rest = [made async for made in parts]
        logprobs = [(-token / 64, ((token, -token / 64),)) for token in prompt[1:] if num_top]
        assert [(one.value, one.top) for one in first.prompt.logprobs] == logprobs
        return tuple(token for made in (first, *rest) for token in made.tokens)

    asked = [((seed, number, 5, 6, 7), dice.randint(1, 20)) for number in range(24)]
    async with asyncio.timeout(BOUND_S):
        results = await asyncio.gather(*(one(*each) for each in asked))
    assert results == [undisturbed(*each) for each in asked]
    assert fleet.num_requests > len(asked)
    for load in ranks.loads():
        assert load.num_unanswered == 0
        for amount in (load.requests, load.latents, load.pending_tokens, load.pending_pairs):
            assert amount.booked == 0
    await fleet.until_idle()
