"""A relay before two real pools: answers are one pool's, and latents travelled. In one process."""

import asyncio
from contextlib import aclosing

import pytest

from equipoise.gateway.metrics import RequestTally
from equipoise.gateway.rank_channels import RankChannels
from equipoise.gateway.rank_load import RankInfo, RankState
from equipoise.gateway.rank_table import RankTable
from equipoise.gateway.relay import Relay
from equipoise.gateway.settings import GatewaySettings
from equipoise.gateway.suspicion import Suspicion
from equipoise.trust.credentials import Credentials
from equipoise.wire.inference_messages import GenerateRequest, Sampling
from tests.support.latent_ranks import a_rank

B = 16
TOKENS = [(7 * number) % 61 for number in range(95)]
SAMPLINGS = {
    "greedy": Sampling(logprobs=2),
    "sampled": Sampling(temperature=1.0, top_p=0.9, seed=11, logprobs=2),
    "penalties": Sampling(
        temperature=0.8,
        seed=5,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        logprobs=0,
    ),
}


def table_of(rank):
    table = RankTable(max_queued=64, clock=asyncio.get_running_loop().time)
    table.update(
        [
            RankInfo(
                name="worker-0",
                address=rank.address,
                state=RankState.OPEN,
                latent_form="v1/small",
                block_tokens=B,
            )
        ]
    )
    return table


def relay_of(decode, prefill=None):
    return Relay(
        table_of(decode),
        vocab_size=64,
        settings=GatewaySettings(prefill_pool="prefill" if prefill else ""),
        tally=RequestTally(),
        credentials=Credentials(),
        channels=RankChannels(Credentials()),
        prefill=table_of(prefill) if prefill else None,
    )


async def answer(relay, request):
    """Tokens, logprobs and the finish reason, whatever the parts they came in."""
    async with aclosing(relay.stream(request, suspicion=Suspicion())) as stream:
        parts = [part async for part in stream]
    assert all(part.finish is None for part in parts[:-1])
    return (
        [token for part in parts for token in part.tokens],
        [one for part in parts for one in part.logprobs],
        parts[-1].finish,
    )


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_two_pools_answer_as_one_and_prefill_no_prompt_twice(rank_of_one, name):
    num_tokens, lengths = 9, (1, B - 1, B, B + 1, 3 * B, 86)
    async with (
        a_rank(*rank_of_one(), boot_id="alone") as alone,
        a_rank(*rank_of_one(), boot_id="prefills") as prefill,
        a_rank(*rank_of_one(), boot_id="writes") as decode,
    ):
        one_pool, two_pools = relay_of(alone), relay_of(decode, prefill)
        requests = [
            GenerateRequest(
                request_id=str(length),
                prompt=(place + 1, *TOKENS[1:length]),
                max_tokens=num_tokens,
                sampling=SAMPLINGS[name],
            )
            for place, length in enumerate(lengths)
        ]
        answers = await asyncio.gather(*(answer(two_pools, one) for one in requests))
        for request, found in zip(requests, answers, strict=True):
            assert found == await answer(one_pool, request)
        long = [length for length in lengths if length >= B]
        short = sum(length + num_tokens - 1 for length in lengths if length < B)
        counts = decode.scheduler.counts
        assert counts.processed == short + sum(length % B + num_tokens - 1 for length in long)
        assert counts.prefilled_missing == 0
        assert prefill.scheduler.counts.processed == sum(long)
        per_block = decode.core.cache.bytes_per_token * B
        assert decode.puller.num_bytes == per_block * sum(length // B for length in long)
        for rank in (prefill, decode):
            async with asyncio.timeout(10):
                while rank.scheduler.blocks.num_used:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        holds = prefill.scheduler.holds
        assert (holds.num_taken, holds.num_open) == (len(long), 0)
