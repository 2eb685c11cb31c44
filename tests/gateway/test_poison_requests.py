"""A request that makes ranks fail is rejected, and harms no other."""

import asyncio
import re

import grpc
import pytest

from equipoise.gateway.suspicion import PROOF_TOKENS
from equipoise.wire.inference_messages import Blame
from tests.support.scripted_ranks import Fault, all_events, tokens_of, undisturbed

PROMPT = (3, 1, 4, 1, 5)
MAX_TOKENS = 12
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


async def is_served(gateway):
    async with gateway.stream(prompt=list(PROMPT), max_tokens=MAX_TOKENS) as response:
        assert response.status_code == 200, await response.aread()
        return tokens_of(await all_events(response)) == undisturbed(PROMPT, MAX_TOKENS)


async def rejection_of(gateway):
    async with gateway.stream(prompt=list(PROMPT), max_tokens=MAX_TOKENS) as response:
        assert response.status_code == 422, await response.aread()
        await response.aread()
        return response.json()["error"]


async def test_a_request_that_two_ranks_blame_is_rejected_by_name(gateway, fleet, caplog):
    fleet.fail(Fault(code=grpc.StatusCode.INTERNAL, blame=Blame.REQUEST))
    error = await rejection_of(gateway)
    assert error["code"] == "poison_request"
    assert "2 ranks blamed it for their failure" in error["message"]
    assert "INTERNAL: as the script says" in error["message"]
    assert fleet.num_requests == 2
    (line,) = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert re.fullmatch(rf"cmpl-\w+(-0)?: {re.escape(error['message'])}", line)


async def test_a_request_that_only_one_rank_blames_is_served_by_another(gateway, fleet):
    for rank in fleet.ranks:
        rank.faults.append(Fault(code=grpc.StatusCode.INTERNAL, blame=Blame.REQUEST))
    fleet.ranks[1].faults.clear()
    assert await is_served(gateway)


async def test_a_request_under_which_three_ranks_die_in_a_row_is_rejected(run_gateway, fleet):
    fleet.fail(*[Fault(code=UNAVAILABLE)] * 20)
    async with run_gateway(workers=tuple(fleet.addresses), max_attempts=99) as gateway:
        error = await rejection_of(gateway)
        assert error["code"] == "poison_request"
        assert "3 consecutive ranks failed" in error["message"]
    assert fleet.num_requests == 3


async def test_explained_breaks_and_progress_keep_a_request_from_rejection(run_gateway, fleet):
    explained = Fault(code=UNAVAILABLE, blame=Blame.NONE)
    fleet.fail(explained, explained, Fault(after=1, code=UNAVAILABLE), explained)
    async with run_gateway(workers=tuple(fleet.addresses), max_attempts=99) as gateway:
        assert await is_served(gateway)
    assert fleet.num_requests >= 4


async def test_requests_beside_one_that_kills_ranks_are_all_served(run_gateway, fleet):
    """Every rank dies under the poison with all that it has; it has more ranks than it may kill."""
    poison = (99, 99)
    for rank in fleet.ranks:
        rank.poison = poison
    async with run_gateway(workers=tuple(fleet.addresses), max_attempts=9) as gateway:

        async def one(prompt):
            async with gateway.stream(prompt=list(prompt), max_tokens=MAX_TOKENS) as response:
                if response.status_code == 422:
                    return None
                return tokens_of(await all_events(response))

        prompts = [(number, 7) for number in range(12)]
        prompts.insert(6, poison)
        results = await asyncio.gather(*(one(prompt) for prompt in prompts))
    assert [prompt for prompt, made in zip(prompts, results, strict=True) if made is None] == [
        poison
    ]
    assert 3 <= sum(rank.num_deaths for rank in fleet.ranks) < 9
    await fleet.until_idle()


@pytest.mark.parametrize("num_choices", [2, 4, 8])
async def test_requests_beside_one_whose_choices_kill_ranks_are_all_served(
    run_gateway, fleet, num_choices
):
    """Its choices are rejected together, before ranks die for an innocent request a third time."""
    poison = (99, 99)
    for rank in fleet.ranks:
        rank.poison = poison
    async with run_gateway(workers=tuple(fleet.addresses), max_attempts=9) as gateway:

        async def one(prompt, n=1):
            async with gateway.stream(prompt=list(prompt), max_tokens=MAX_TOKENS, n=n) as response:
                if response.status_code != 200:
                    return (await response.aread()).decode()
                return tokens_of(await all_events(response))

        prompts = [(number, 7) for number in range(12)]
        rejection, *results = await asyncio.gather(
            one(poison, num_choices), *(one(prompt) for prompt in prompts)
        )
    assert "poison_request" in rejection
    assert results == [undisturbed(prompt, MAX_TOKENS) for prompt in prompts]
    assert sum(rank.num_deaths for rank in fleet.ranks) <= num_choices + 3
    await fleet.until_idle()


async def test_a_request_under_which_ranks_die_after_a_token_each_is_rejected(gateway, fleet):
    fleet.fail(*[Fault(after=1, code=UNAVAILABLE)] * 20)
    async with gateway.stream(prompt=list(PROMPT), max_tokens=MAX_TOKENS) as response:
        *_, last = await all_events(response)
    assert '"code":"poison_request"' in last
    assert "3 consecutive ranks failed" in last


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault(after=PROOF_TOKENS, code=UNAVAILABLE), id="killed from outside"),
        pytest.param(Fault(after=1, code=UNAVAILABLE, blame=Blame.NONE), id="explained"),
    ],
)
async def test_exhausted_attempts_that_prove_nothing_stay_retryable(gateway, fleet, fault):
    fleet.fail(*[fault] * 20)
    response = await gateway.post(prompt=list(PROMPT), max_tokens=64)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "attempts_exhausted"
    assert fleet.num_requests == 4
