"""A prompt prefilled in one pool continues in another: the same tokens, its latents travelled."""

import asyncio
import threading
from contextlib import suppress

import grpc
import pytest

from equipoise.worker.latents.holds import HoldEnd
from equipoise.worker.latents.puller import PullOutcome
from equipoise_api.v1 import worker_pb2 as pb
from tests.support.latent_ranks import a_rank, answer, handed_over, nothing_is_held, two_pools

B = 16
TOKENS = [(7 * number) % 61 for number in range(95)]


GREEDY = pb.Sampling(logprobs=2)
SAMPLED = pb.Sampling(
    temperature=1.0, top_p=0.9, seed=7, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2
)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_tokens_are_one_pools_and_latents_travel_instead_of_being_computed_again(
    rank_of_one, sampling
):
    num_tokens = 9
    async with two_pools(rank_of_one) as (prefill, decode):
        async with a_rank(*rank_of_one(), boot_id="alone") as alone:
            for number, length in enumerate((1, B - 1, B, B + 1, 2 * B, 4 * B + 5, 86)):
                prompt = [number + 1, *TOKENS[1:length]]
                before = (decode.scheduler.counts.processed, decode.puller.num_bytes)
                one = await handed_over(prefill, decode, prompt, num_tokens, sampling)
                other = await answer(alone, prompt, num_tokens, sampling=sampling)
                assert vars(one) == vars(other), length
                processed = decode.scheduler.counts.processed - before[0]
                assert processed == length % B + num_tokens - 1
                pulled = decode.puller.num_bytes - before[1]
                assert pulled == decode.core.cache.bytes_per_token * B * (length // B)
        counts = decode.scheduler.counts
        assert (counts.prefilled_missing, counts.prefilled_own) == (0, 0)
        await nothing_is_held(prefill, decode)
        assert prefill.scheduler.holds.ended == {HoldEnd.FETCHED: 5}
        stats = decode.engine.progress().stats
        assert (stats.handed_over_prompts, stats.handed_over_tokens) == (7, 13 * B)
        assert prefill.engine.progress().stats.held_prompts == 5


async def test_a_second_request_with_the_prefix_fetches_only_what_is_not_here(rank_of_one):
    prompt = TOKENS[:40]
    async with two_pools(rank_of_one) as (prefill, decode):
        one = await handed_over(prefill, decode, prompt, 6)
        num_bytes = decode.puller.num_bytes
        again = await handed_over(prefill, decode, prompt, 6)
        assert again.tokens == one.tokens
        assert decode.puller.num_bytes == num_bytes > 0
        assert decode.puller.outcomes == {PullOutcome.WHOLE: 2}
        assert prefill.scheduler.holds.ended == {HoldEnd.FETCHED: 1, HoldEnd.RELEASED: 1}
        await nothing_is_held(prefill, decode)


async def test_neither_steps_nor_calls_wait_while_a_block_is_copied_from_the_host(
    rank_of_one, monkeypatch
):
    async with two_pools(rank_of_one) as (prefill, decode):
        visits, unpacked = [], []
        visit, unpack = decode.engine.visit, decode.core.cache.unpack

        def noted(act):
            visits.append(act)
            try:
                return visit(act)
            finally:
                visits.remove(act)

        def counted(data):
            is_called = threading.current_thread() is threading.main_thread()
            unpacked.append((len(visits), is_called))
            return unpack(data)

        monkeypatch.setattr(decode.engine, "visit", noted)
        monkeypatch.setattr(decode.core.cache, "unpack", counted)
        await handed_over(prefill, decode, TOKENS[:40], 2)
        assert unpacked == [(0, False)] * 2


def flip(message):
    data = bytearray(message.data)
    data[len(data) // 2] ^= 1
    if message.index == 1:
        message.data = bytes(data)
    yield message


def cut(message):
    if message.index == 1:
        message.data = message.data[:-1]
    yield message


def lengthen(message):
    message.data += bytes(1) * (message.index == 1)
    yield message


def reorder(message):
    message.index += message.index == 1
    yield message


def repeat(message):
    yield message
    yield message


@pytest.mark.parametrize(
    ("tamper", "num_kept"), [(flip, 1), (cut, 1), (lengthen, 1), (reorder, 1), (repeat, 1)]
)
async def test_a_bad_block_is_dropped_with_all_behind_it_and_prefilled_instead(
    rank_of_one, tamper, num_kept
):
    prompt = TOKENS[:50]
    async with two_pools(rank_of_one, tamper=tamper) as (prefill, decode):
        one = await handed_over(prefill, decode, prompt, 6)
        assert decode.puller.outcomes == {PullOutcome.CORRUPTED: 1}
        ledger = prefill.scheduler.holds
        assert (ledger.num_open, ledger.ended[HoldEnd.EXPIRED]) == (0, 0)
        assert decode.puller.num_bytes == num_kept * decode.core.cache.block_bytes
        assert decode.scheduler.counts.prefilled_missing == (3 - num_kept) * B
        other = await answer(prefill, prompt, 6)
        assert one.tokens == other.tokens
        await nothing_is_held(prefill, decode)


@pytest.mark.parametrize(
    ("changes", "peer_pools", "outcome"),
    [
        ({"pool": "strangers"}, ("prefill",), PullOutcome.REJECTED),
        ({}, (), PullOutcome.REJECTED),
        ({"boot_id": "earlier"}, ("prefill",), PullOutcome.LOST),
        ({"address": "127.0.0.1:9"}, ("prefill",), PullOutcome.LOST),
    ],
)
async def test_what_cannot_be_fetched_is_prefilled_and_counted(
    rank_of_one, changes, peer_pools, outcome
):
    prompt = TOKENS[:50]
    async with two_pools(rank_of_one, peer_pools=peer_pools, hold_s=1.0) as (prefill, decode):
        one = await handed_over(prefill, decode, prompt, 6, **changes)
        assert decode.puller.outcomes == {outcome: 1}
        assert decode.puller.num_bytes == 0
        assert decode.scheduler.counts.prefilled_missing == 3 * B
        assert one.tokens == (await answer(prefill, prompt, 6)).tokens
        await nothing_is_held(prefill, decode)
        assert prefill.scheduler.holds.ended[HoldEnd.EXPIRED] == 1


@pytest.mark.parametrize(
    ("changes", "code", "kind", "words"),
    [
        ({"keys": []}, "INVALID_ARGUMENT", "latents_count", "0 blocks are asked for"),
        ({"keys": [bytes(16)] * 7}, "INVALID_ARGUMENT", "latents_count", "7 blocks are asked"),
        ({"keys": [bytes(15)]}, "INVALID_ARGUMENT", "latents_key", "key 0 has 15 bytes, not 16"),
        ({"form": "v1/other"}, "FAILED_PRECONDITION", "latents_form", "v1/small, not v1/other"),
        ({"boot_id": "earlier"}, "NOT_FOUND", "latents_boot", "another process"),
    ],
)
async def test_a_fetch_that_does_not_fit_is_rejected_by_name(
    rank_of_one, changes, code, kind, words
):
    async with a_rank(*rank_of_one(), boot_id="prefills") as rank:
        fields = {"form": "v1/small", "boot_id": "prefills", "keys": [bytes(16)]}
        with pytest.raises(grpc.aio.AioRpcError, match=words) as rejected:
            async for _ in rank.latents.Fetch(pb.LatentTransferFetchRequest(**fields | changes)):
                pass
        assert rejected.value.code().name == code
        assert rank.service.rejected == {kind: 1}
        assert rank.scheduler.blocks.num_used == 0


async def test_unknown_keys_end_the_stream_at_once(rank_of_one):
    async with a_rank(*rank_of_one(), boot_id="prefills") as rank:
        await answer(rank, TOKENS[:40], 1)
        request = pb.LatentTransferFetchRequest(
            form="v1/small", boot_id="prefills", keys=[bytes(16)]
        )
        assert [part async for part in rank.latents.Fetch(request)] == []
        assert rank.scheduler.blocks.num_used == 0


async def test_a_client_that_leaves_during_a_pull_leaves_nothing_behind(rank_of_one):
    fetching = asyncio.Event()

    def stall(message):
        fetching.set()
        yield asyncio.Event()
        yield message

    async with two_pools(rank_of_one, tamper=stall) as (prefill, decode):
        leg = asyncio.create_task(handed_over(prefill, decode, TOKENS[:50], 6))
        async with asyncio.timeout(60):
            await fetching.wait()
        leg.cancel()
        with suppress(asyncio.CancelledError):
            await leg
        await nothing_is_held(prefill, decode)
        assert decode.puller.outcomes == {PullOutcome.CANCELLED: 1}
        assert prefill.scheduler.holds.ended == {HoldEnd.RELEASED: 1}


async def test_no_pull_gets_a_block_that_a_running_step_still_writes_to(rank_of_one, monkeypatch):
    begun, may_run = threading.Event(), threading.Event()
    async with two_pools(rank_of_one) as (prefill, decode), asyncio.timeout(60):
        step = decode.core.model.step

        def held_up(*args):
            begun.set()
            assert may_run.wait(60)
            return step(*args)

        monkeypatch.setattr(decode.core.model, "step", held_up)
        leaving = asyncio.create_task(answer(decode, TOKENS[-12:], 6))
        await asyncio.to_thread(begun.wait)
        leaving.cancel()
        while decode.scheduler.num_active:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        leg = asyncio.create_task(handed_over(prefill, decode, TOKENS[:50], 6))
        while not decode.puller.outcomes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert decode.puller.outcomes == {PullOutcome.WHOLE: 1}
        may_run.set()
        assert (await leg).tokens == (await answer(prefill, TOKENS[:50], 6)).tokens
        await nothing_is_held(prefill, decode)
