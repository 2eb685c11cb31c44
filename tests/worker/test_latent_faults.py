"""A prefill rank fails while its latents are fetched: the rest is prefilled, nothing stays held."""

import asyncio
from types import SimpleNamespace

import pytest

from equipoise.wire.inference_messages import FinishReason
from equipoise.worker.latents.holds import HoldEnd
from equipoise.worker.latents.puller import MAX_PULLS, PullOutcome
from equipoise.worker.sequence import Emission
from equipoise_model.sampling_params import SampledToken
from tests.support.latent_ranks import (
    a_rank,
    answer,
    handed_over,
    nothing_is_held,
    source_of,
    two_pools,
)

B = 16
PROMPT = [(7 * number) % 61 for number in range(50)]
NUM_FULL = len(PROMPT) // B


def die(message):
    if message.index == 1:
        raise ConnectionResetError("the rank is gone")
    yield message


def hang(message):
    if message.index == 1:
        yield asyncio.Event()
    yield message


@pytest.mark.parametrize(
    ("tamper", "outcome", "end"),
    [
        (die, PullOutcome.LOST, HoldEnd.RELEASED),
        (hang, PullOutcome.TIMEOUT, HoldEnd.EXPIRED),
    ],
)
async def test_a_rank_that_fails_amid_a_fetch_leaves_a_shorter_prefix(
    rank_of_one, tamper, outcome, end
):
    async with two_pools(rank_of_one, tamper=tamper, hold_s=1.0, pull_s=1.5) as (prefill, decode):
        one = await handed_over(prefill, decode, PROMPT, 6)
        assert decode.puller.outcomes == {outcome: 1}
        assert decode.puller.num_bytes == decode.core.cache.block_bytes
        assert decode.scheduler.counts.prefilled_missing == (NUM_FULL - 1) * B
        assert one.tokens == (await answer(prefill, PROMPT, 6)).tokens
        await nothing_is_held(prefill, decode)
        assert prefill.scheduler.holds.ended == {end: 1}


async def leg(decode, prefill, first):
    """The second leg of a request whose first is done."""
    return await answer(
        decode,
        [*PROMPT, *first.tokens],
        5,
        num_replayed=1,
        latents_from=source_of(prefill, first.held),
    )


async def expired(rank):
    async with asyncio.timeout(20):
        while rank.scheduler.holds.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_after_a_hold_expired_its_blocks_are_fetched_while_they_are_cached(rank_of_one):
    async with two_pools(rank_of_one, hold_s=0.01) as (prefill, decode):
        first = await answer(prefill, PROMPT, 1, hold_latents=True)
        await expired(prefill)
        rest = await leg(decode, prefill, first)
        assert decode.puller.outcomes == {PullOutcome.WHOLE: 1}
        assert decode.scheduler.counts.prefilled_missing == 0
        assert first.tokens + rest.tokens == (await answer(prefill, PROMPT, 6)).tokens
        await nothing_is_held(prefill, decode)
        assert prefill.scheduler.holds.ended == {HoldEnd.EXPIRED: 1}


async def test_after_a_hold_expired_and_its_blocks_are_reused_the_prompt_is_prefilled_again(
    rank_of_one,
):
    async with two_pools(rank_of_one, hold_s=0.01) as (prefill, decode):
        first = await answer(prefill, PROMPT, 1, hold_latents=True)
        await expired(prefill)
        for number in range(8):  # More than the cache has room for.
            await answer(prefill, [number + 1] * 90, 1)
        rest = await leg(decode, prefill, first)
        assert decode.puller.outcomes == {PullOutcome.PARTIAL: 1}
        assert decode.scheduler.counts.prefilled_missing == NUM_FULL * B
        assert first.tokens + rest.tokens == (await answer(prefill, PROMPT, 6)).tokens
        await nothing_is_held(prefill, decode)


async def test_a_repeated_request_fetches_the_same_hold_without_harm(rank_of_one):
    async with two_pools(rank_of_one) as (prefill, decode):
        first = await answer(prefill, PROMPT, 1, hold_latents=True)
        one, other = await asyncio.gather(*(leg(decode, prefill, first) for _ in range(2)))
        assert one.tokens == other.tokens
        assert decode.puller.outcomes == {PullOutcome.WHOLE: 2}
        assert decode.scheduler.counts.prefilled_missing == 0
        await nothing_is_held(prefill, decode)
        assert prefill.scheduler.holds.ended == {HoldEnd.FETCHED: 1}


async def test_a_fetch_goes_on_while_either_pool_forms_a_new_epoch(rank_of_one):
    reached, resume = asyncio.Event(), asyncio.Event()

    def pause(message):
        if message.index == 1:
            reached.set()
            yield resume
        yield message

    async with two_pools(rank_of_one, tamper=pause) as (prefill, decode):
        first = await answer(prefill, PROMPT, 1, hold_latents=True)
        second = asyncio.create_task(leg(decode, prefill, first))
        async with asyncio.timeout(20):
            await reached.wait()
        for rank in (prefill, decode):
            await rank.end_epoch()
        resume.set()
        async with asyncio.timeout(20):
            while not decode.puller.outcomes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert decode.puller.outcomes == {PullOutcome.WHOLE: 1}
        for rank in (prefill, decode):
            rank.begin_epoch()
        rest = await second
        assert decode.scheduler.counts.prefilled_missing == 0
        assert first.tokens + rest.tokens == (await answer(prefill, PROMPT, 6)).tokens
        await nothing_is_held(prefill, decode)


async def test_a_fetch_goes_on_while_both_pools_switch_to_other_layouts(
    rank_of_one, staged_from_checkpoint, random_layout
):
    reached, resume = asyncio.Event(), asyncio.Event()

    def pause(message):
        if message.index == 1:
            reached.set()
            yield resume
        yield message

    async with two_pools(rank_of_one, tamper=pause) as (prefill, decode), asyncio.timeout(60):
        first = await answer(prefill, PROMPT, 1, hold_latents=True)
        second = asyncio.create_task(leg(decode, prefill, first))
        await reached.wait()
        for rank in (prefill, decode):
            running = rank.held.contents.layout
            rank.engine.offer(staged_from_checkpoint(rank.core, running, random_layout(2)))
            while rank.engine.generation != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        resume.set()
        rest = await second
        assert decode.puller.outcomes == {PullOutcome.WHOLE: 1}
        assert decode.scheduler.counts.prefilled_missing == 0
        assert first.tokens + rest.tokens == (await answer(prefill, PROMPT, 6)).tokens
        await nothing_is_held(prefill, decode)


async def test_a_prefill_rank_that_came_back_as_another_process_has_nothing(rank_of_one):
    async with two_pools(rank_of_one) as (prefill, decode):
        first = await answer(prefill, PROMPT, 1, hold_latents=True)
        async with a_rank(*rank_of_one(), boot_id="later") as successor:
            prefill.address = successor.address
            rest = await leg(decode, prefill, first)
            assert decode.puller.outcomes == {PullOutcome.LOST: 1}
            assert successor.service.rejected == {"latents_boot": 1}
            assert decode.scheduler.counts.prefilled_missing == NUM_FULL * B
            assert first.tokens + rest.tokens == (await answer(successor, PROMPT, 6)).tokens


async def test_a_rejected_fetch_ends_the_hold(rank_of_one):
    async with (
        a_rank(*rank_of_one(), boot_id="reads") as prefill,
        a_rank(*rank_of_one(), boot_id="writes", form="v1/other") as decode,
    ):
        one = await handed_over(prefill, decode, PROMPT, 6)
        assert decode.puller.outcomes == {PullOutcome.REJECTED: 1}
        assert prefill.service.rejected == {"latents_form": 1}
        assert one.tokens == (await answer(prefill, PROMPT, 6)).tokens
        await nothing_is_held(prefill, decode)
        assert prefill.scheduler.holds.ended == {HoldEnd.RELEASED: 1}


async def test_fetches_that_fail_again_and_again_do_not_flood_the_log(rank_of_one, caplog):
    async with two_pools(rank_of_one, peer_pools=()) as (prefill, decode):
        for number in range(6):
            prompt = [number, *PROMPT]
            await handed_over(prefill, decode, prompt, 2)
        assert decode.puller.outcomes == {PullOutcome.REJECTED: 6}
    told = [one.getMessage() for one in caplog.records if "is prefilled" in one.getMessage()]
    assert len(told) == 3
    assert "(rejected, 4 so far)" in told[-1]


async def test_fetches_that_wait_for_their_turn_for_too_long_end_the_hold(rank_of_one):
    stalled = asyncio.Event()

    def stall(message):
        yield stalled
        yield message

    async with two_pools(rank_of_one, tamper=stall, pull_s=1.0) as (prefill, decode):
        firsts = [await answer(prefill, PROMPT, 1, hold_latents=True) for _ in range(MAX_PULLS + 1)]
        await asyncio.gather(*(leg(decode, prefill, first) for first in firsts))
        assert decode.puller.outcomes == {PullOutcome.TIMEOUT: len(firsts)}
        stalled.set()
        await nothing_is_held(prefill, decode)
        assert prefill.scheduler.holds.ended == {HoldEnd.RELEASED: len(firsts)}


async def test_a_hold_that_nobody_hears_of_ends(rank_of_one):
    """The client left after the step that finished its request, before the token was sent."""
    async with a_rank(*rank_of_one(), boot_id="reads") as prefill:
        first = await answer(prefill, PROMPT, 1, hold_latents=True)
        last = Emission(
            key=99,
            sampled=SampledToken(token=1, logprob=0.0),
            finish=FinishReason.LENGTH,
            hold=first.held.hold,
        )
        result = SimpleNamespace(emissions=(last,))
        prefill.inference_service.deliver(result)
        await nothing_is_held(prefill)
        assert prefill.scheduler.holds.ended == {HoldEnd.RELEASED: 1}
