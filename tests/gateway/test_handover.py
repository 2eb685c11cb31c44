"""A request's prompt is run by the prefill pool and continued by a decode rank, or directly."""

import asyncio
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import grpc
import pytest

from equipoise.gateway.errors import InvalidRequestError, NoRankError
from equipoise.gateway.handover import Direct, first_leg, why_direct
from equipoise.gateway.metrics import RequestTally
from equipoise.gateway.rank_channels import RankChannels
from equipoise.gateway.rank_load import RankInfo, RankLoad, RankState
from equipoise.gateway.rank_table import RankTable
from equipoise.gateway.relay import Relay
from equipoise.gateway.settings import GatewaySettings
from equipoise.gateway.suspicion import Suspicion
from equipoise.settings.errors import InvalidSettingsError
from equipoise.trust.credentials import Credentials
from equipoise.wire.inference_messages import Blame, FinishReason, GenerateRequest, Sampling
from tests.support.scripted_ranks import (
    BOUND_S,
    VOCAB_SIZE,
    FakeRank,
    Fault,
    listening,
    undisturbed,
)

B = 16
PROMPT = tuple(range(40))
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def load(form="v1/16", *, state=RankState.OPEN, answers=None):
    return RankLoad(
        name="w", address="h:1", state=state, answers=answers, latent_form=form, block_tokens=B
    )


@pytest.mark.parametrize(
    ("prompt", "num_cached", "prefill", "is_suspect", "expected"),
    [
        (PROMPT[:B], 0, [load()], False, None),
        (PROMPT[: B - 1], 0, [load()], False, Direct.SHORT),
        (PROMPT[: B - 1], 0, [], False, Direct.SHORT),
        (PROMPT[: 2 * B], B, [load()], False, None),
        (PROMPT[: 2 * B - 1], B, [load()], False, Direct.SHORT),
        (PROMPT, 0, [], False, Direct.NO_PREFILL),
        (PROMPT, 0, [load(state=RankState.CLOSED)], False, Direct.NO_PREFILL),
        (PROMPT, 0, [load(answers=False)], False, Direct.NO_PREFILL),
        (PROMPT, 0, [load("v1/64")], False, Direct.FORM),
        (PROMPT, 0, [load("")], False, Direct.FORM),
        (PROMPT, 0, [load("v1/64"), load()], False, None),
        (PROMPT, 0, [load()], True, Direct.SUSPECT),
    ],
)
def test_the_prefill_pool_runs_what_fills_a_block_and_can_be_fetched(
    prompt, num_cached, prefill, is_suspect, expected
):
    request = GenerateRequest(request_id="r", prompt=prompt, max_tokens=8)
    chosen = why_direct(
        request, decode=load(), num_cached=num_cached, prefill=prefill, is_suspect=is_suspect
    )
    assert chosen is expected


def test_unknown_forms_are_never_paired():
    request = GenerateRequest(request_id="r", prompt=PROMPT, max_tokens=8)
    reason = why_direct(
        request, decode=load(""), num_cached=0, prefill=[load("")], is_suspect=False
    )
    assert reason is Direct.FORM


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": ("127.0.0.1:1",)}, "prefill_pool needs a balancer"),
        ({"pool": "p"}, "prefill_pool must be another pool than pool p"),
    ],
)
def test_a_prefill_pool_is_another_pool_of_a_balancer(changes, words):
    with pytest.raises(InvalidSettingsError, match=words):
        GatewaySettings(prefill_pool="p", **changes)


@asynccontextmanager
async def pools(*, num_prefill=2, num_decode=2, prefill_forms=("v1/16",), queue_timeout_s=BOUND_S):
    """A relay before a prefill pool, whose ranks have these forms in turn, and a decode pool."""
    prefill = [FakeRank() for _ in range(num_prefill)]
    decode = [FakeRank() for _ in range(num_decode)]
    async with AsyncExitStack() as stack:
        tables = []
        for ranks, forms in ((prefill, prefill_forms), (decode, ("v1/16",))):
            table = RankTable(max_queued=64, clock=asyncio.get_running_loop().time)
            addresses = [await stack.enter_async_context(listening(one)) for one in ranks]
            table.update(
                RankInfo(
                    name=address,
                    address=address,
                    state=RankState.OPEN,
                    latent_form=forms[place % len(forms)],
                    block_tokens=B,
                )
                for place, address in enumerate(addresses)
            )
            tables.append(table)
        tally = RequestTally()
        relay = Relay(
            tables[1],
            vocab_size=VOCAB_SIZE,
            settings=GatewaySettings(
                prefill_pool="prefill",
                accept_timeout_s=5.0,
                first_token_timeout_s=5.0,
                silence_timeout_s=5.0,
                queue_timeout_s=queue_timeout_s,
            ),
            tally=tally,
            credentials=Credentials(),
            channels=RankChannels(Credentials()),
            prefill=tables[0],
        )
        yield SimpleNamespace(
            relay=relay, tally=tally, prefill=prefill, decode=decode, tables=tables
        )
        for table in tables:
            for rank in table.loads():
                assert_idle(rank)


def assert_idle(rank):
    for amount in (rank.requests, rank.latents, rank.pending_tokens, rank.pending_pairs):
        assert amount.booked == 0, rank


def legs(ranks):
    return [request for rank in ranks for request in rank.requests]


async def answer(rig, prompt=PROMPT, max_tokens=12, **fields):
    request = GenerateRequest(request_id="r", prompt=prompt, max_tokens=max_tokens, **fields)
    async with aclosing(rig.relay.stream(request, suspicion=Suspicion())) as parts:
        return [part async for part in parts]


def num_released(rig):
    return sum(len(rank.released) for rank in rig.prefill)


def tokens_of(parts):
    return tuple(token for part in parts for token in part.tokens)


@pytest.mark.parametrize("length", [B, B + 1, 40])
async def test_the_first_token_comes_from_one_pool_and_the_others_from_the_other(length):
    prompt = PROMPT[:length]
    async with pools() as rig:
        parts = await answer(rig, prompt, sampling=Sampling(seed=3, temperature=1.0, logprobs=1))
        assert tokens_of(parts) == undisturbed(prompt, 12)
        assert [part.finish for part in parts] == [None] * 11 + [FinishReason.LENGTH]
        assert all(len(part.logprobs) == len(part.tokens) for part in parts)
        # The scripted rank says that it had the whole prompt but its last token.
        handed_over = [part.num_handed_over for part in parts]
        assert handed_over == [None, parts[1].prompt.num_cached, *[None] * 10]
        (first,), (second,) = legs(rig.prefill), legs(rig.decode)
        assert (first.max_tokens, first.hold_latents, tuple(first.prompt)) == (1, True, prompt)
        assert (second.max_tokens, second.num_replayed) == (11, 1)
        assert tuple(second.prompt) == (*prompt, *undisturbed(prompt, 1))
        assert first.sampling == second.sampling
        source = second.latents_from
        assert (source.pool, source.boot_id, source.hold) == ("prefill", "boot", 1)
        assert source.address in [rank.address for rank in rig.tables[0].loads()]
        assert (rig.tally.num_handed_over, rig.tally.replays) == (1, 0)
        assert rig.tally.second_token_s.count == 1
        assert rig.tally.outcomes["finished"] == 1


async def test_a_request_that_ends_with_its_first_token_moves_nowhere_and_leaves_no_hold():
    async with pools() as rig:
        (part,) = await answer(rig, max_tokens=1)
        assert (part.finish, tokens_of([part])) == (FinishReason.LENGTH, undisturbed(PROMPT, 1))
        (part,) = await answer(rig, stop_tokens=frozenset(undisturbed(PROMPT, 1)))
        assert part.finish is FinishReason.STOP
        assert [one.hold_latents for one in legs(rig.prefill)] == [False, True] or [
            one.hold_latents for one in legs(rig.prefill)
        ] == [True, False]
        assert [hold for rank in rig.prefill for hold in rank.released] == [1]
        assert legs(rig.decode) == []
        assert rig.tally.num_handed_over == 0


@pytest.mark.parametrize(
    ("settings", "prompt", "reason"),
    [
        ({"num_prefill": 0}, PROMPT, Direct.NO_PREFILL),
        ({"prefill_forms": ("v1/64",)}, PROMPT, Direct.FORM),
        ({}, PROMPT[: B - 1], Direct.SHORT),
    ],
)
async def test_a_decode_rank_prefills_the_prompt_itself_and_that_is_counted(
    settings, prompt, reason, caplog
):
    async with pools(**settings) as rig:
        assert tokens_of(await answer(rig, prompt)) == undisturbed(prompt, 12)
        (request,) = legs(rig.decode)
        assert not request.HasField("latents_from")
        assert legs(rig.prefill) == []
        assert rig.tally.direct == {reason: 1}
        if reason is Direct.FORM:
            assert "its latents are v1/16, those of the prefill pool v1/64" in caplog.text


async def test_a_prompt_that_its_decode_rank_has_cached_up_to_a_block_goes_there_directly():
    async with pools(num_decode=1) as rig:
        for suffix in ((), (1,), range(B)):
            prompt = (*PROMPT, *suffix)
            assert tokens_of(await answer(rig, prompt)) == undisturbed(prompt, 12)
        assert rig.tally.direct == {Direct.SHORT: 1}
        assert rig.tally.num_handed_over == 2
        assert [one.HasField("latents_from") for one in legs(rig.decode)] == [True, False, True]


async def test_only_prefill_ranks_of_the_same_form_are_chosen_while_a_pool_has_two():
    """As in a rolling restart with other settings."""
    async with pools(prefill_forms=("v1/64", "v1/16")) as rig:
        many = await asyncio.gather(*(answer(rig, (n, *PROMPT)) for n in range(8)))
        assert [len(tokens_of(one)) for one in many] == [12] * 8
        assert [len(rank.requests) for rank in rig.prefill] == [0, 8]
        assert (rig.tally.num_handed_over, rig.tally.direct) == (8, {})


@pytest.mark.parametrize("after", [0, 1])
async def test_a_prefill_rank_that_fails_is_replaced_by_the_other_one(after):
    async with pools() as rig:
        # After the token it has made, the rank's stream is not read any more.
        for rank in rig.prefill:
            rank.faults.append(Fault(after=after, code=UNAVAILABLE, blame=Blame.NONE))
        await answer(rig, max_tokens=12)
        assert tokens_of(await answer(rig)) == undisturbed(PROMPT, 12)


async def test_when_all_prefill_ranks_fail_the_decode_rank_prefills_the_prompt():
    async with pools() as rig:
        for rank in rig.prefill:
            rank.faults.extend([Fault(code=UNAVAILABLE, accept=False)] * 5)
        assert tokens_of(await answer(rig)) == undisturbed(PROMPT, 12)
        assert rig.tally.direct[Direct.NO_PREFILL] == 1
        assert rig.tally.num_handed_over == 0


async def test_a_full_prefill_pool_makes_the_decode_rank_prefill_the_prompt():
    async with pools(num_prefill=1) as rig:
        full = Fault(code=grpc.StatusCode.RESOURCE_EXHAUSTED, accept=False)
        rig.prefill[0].faults.extend([full] * 5)
        assert tokens_of(await answer(rig)) == undisturbed(PROMPT, 12)
        assert rig.tally.direct == {Direct.CROWDED: 1}
        # The rank is not asked again for this prompt, and the next prompt finds that it rests.
        assert len(rig.prefill[0].faults) == 4
        (rank,) = rig.tables[0].loads()
        assert rank.resting_reason == "as the script says"


async def test_a_prompt_that_only_the_prefill_pool_rejects_goes_to_the_decode_rank(caplog):
    """As one that is longer than the context of the prefill pool's ranks."""
    words = "150 prompt tokens are more than this worker's context"
    async with pools(num_prefill=1) as rig:
        rig.prefill[0].faults.append(
            Fault(code=grpc.StatusCode.INVALID_ARGUMENT, accept=False, words=words)
        )
        assert tokens_of(await answer(rig)) == undisturbed(PROMPT, 12)
        (request,) = legs(rig.decode)
        assert not request.HasField("latents_from")
        assert rig.tally.direct == {Direct.REJECTED: 1}
        assert rig.tally.num_handed_over == rig.tally.replays == 0
        assert f"rejects it: {words}" in caplog.text


async def test_a_request_that_both_pools_reject_is_the_clients_fault():
    async with pools(num_prefill=1, num_decode=1) as rig:
        for rank in (*rig.prefill, *rig.decode):
            rank.faults.append(Fault(code=grpc.StatusCode.INVALID_ARGUMENT, accept=False))
        with pytest.raises(InvalidRequestError, match="as the script says"):
            await answer(rig)
        assert rig.tally.direct == {}
        assert rig.tally.outcomes["rejected"] == 1


@pytest.mark.parametrize(("num_cached", "num_released_"), [(0, 1), (15, 1), (16, 0)])
async def test_a_hold_whose_latents_the_decode_rank_lacks_ends_at_once(num_cached, num_released_):
    """It may not fetch them, as without the prefill pool among its peers."""
    async with pools(num_prefill=1, num_decode=1) as rig:
        (rank,) = rig.decode
        rank.num_cached = num_cached
        request = GenerateRequest(request_id="r", prompt=PROMPT, max_tokens=12)
        async with aclosing(rig.relay.stream(request, suspicion=Suspicion())) as parts:
            some = [await anext(parts) for _ in range(3)]
            async with asyncio.timeout(BOUND_S):
                while num_released(rig) < num_released_:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            rest = [part async for part in parts]
        assert tokens_of([*some, *rest]) == undisturbed(PROMPT, 12)
        assert num_released(rig) == num_released_


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_decode_rank_that_fails_is_replaced_and_nothing_is_made_twice(after):
    async with pools() as rig:
        fault = Fault(after=after, code=UNAVAILABLE, blame=Blame.NONE)
        rig.decode[0].faults.append(fault)
        rig.decode[1].faults.append(fault)
        for rank in rig.decode:
            rank.num_cached = len(PROMPT)
        parts = await answer(rig)
        assert tokens_of(parts) == undisturbed(PROMPT, 12)
        handed_over = [one.num_handed_over for one in parts if one.num_handed_over is not None]
        assert handed_over == [len(PROMPT)]
        assert rig.tally.replays == 2
        assert rig.tally.num_handed_over == 3
        # A decode rank that has generated tokens has fetched what is held.
        assert num_released(rig) == (0 if after else 2)


async def test_handovers_do_not_use_up_a_requests_attempts():
    async with pools() as rig:
        many = await asyncio.gather(*(answer(rig, (n, *PROMPT)) for n in range(12)))
        assert [tokens_of(one) for one in many] == [
            undisturbed((n, *PROMPT), 12) for n in range(12)
        ]
        assert (rig.tally.num_handed_over, rig.tally.replays) == (12, 0)


def test_the_first_leg_asks_for_no_more_tokens_than_it_makes():
    request = GenerateRequest(request_id="r", prompt=PROMPT, max_tokens=8, min_tokens=6)
    leg = first_leg(replace(request, num_replayed=2))
    assert (leg.max_tokens, leg.min_tokens, leg.hold_latents) == (1, 3, True)
    assert not first_leg(replace(request, max_tokens=1)).hold_latents


async def test_full_decode_ranks_are_tried_again_and_nothing_is_made_twice():
    async with pools() as rig:
        for rank in rig.decode:
            rank.faults.append(Fault(code=grpc.StatusCode.RESOURCE_EXHAUSTED, accept=False))
            rank.num_cached = len(PROMPT)
        assert tokens_of(await answer(rig)) == undisturbed(PROMPT, 12)
        assert (rig.tally.replays, rig.tally.outcomes["finished"]) == (0, 1)
        assert num_released(rig) == 2


async def test_without_a_decode_pool_no_prompt_is_prefilled():
    async with pools(num_decode=0, queue_timeout_s=0.2) as rig:
        with pytest.raises(NoRankError, match=r"no rank accepted the request within 0\.2 s"):
            await answer(rig)
        assert legs(rig.prefill) == []


async def test_a_client_that_leaves_while_its_prompt_is_prefilled_ends_the_first_leg():
    async with pools(num_prefill=1) as rig:
        rig.prefill[0].gate.clear()
        leg = asyncio.create_task(answer(rig))
        await rig.prefill[0].until(lambda: rig.prefill[0].num_open == 1)
        leg.cancel()
        await asyncio.wait([leg])
        await rig.prefill[0].until(lambda: rig.prefill[0].num_open == 0)
        assert legs(rig.decode) == []


async def test_a_client_that_leaves_after_the_first_token_leaves_no_hold():
    async with pools(num_prefill=1) as rig:
        request = GenerateRequest(request_id="r", prompt=PROMPT, max_tokens=12)
        async with aclosing(rig.relay.stream(request, suspicion=Suspicion())) as parts:
            assert (await anext(parts)).tokens == undisturbed(PROMPT, 1)
        assert rig.prefill[0].released == [1]
        assert legs(rig.decode) == []
        assert rig.tally.num_handed_over == 0


async def test_a_client_that_leaves_during_the_fetch_leaves_no_hold():
    async with pools(num_prefill=1, num_decode=1) as rig:
        rig.decode[0].gate.clear()
        leg = asyncio.create_task(answer(rig))
        await rig.decode[0].until(lambda: rig.decode[0].num_open == 1)
        assert rig.prefill[0].released == []
        leg.cancel()
        await asyncio.wait([leg])
        assert rig.prefill[0].released == [1]
