"""Drafts across a handover: the latents of the module that drafts travel too."""

from contextlib import AsyncExitStack

import pytest
import torch

from equipoise.planning.layout import contiguous_layout
from equipoise.wire.block_keys import keys_of
from equipoise.worker.core import ModelCore
from equipoise.worker.settings import WorkerSettings
from equipoise_api.v1 import worker_pb2 as pb
from tests.support.held_slots import held_by
from tests.support.latent_ranks import a_rank, answer, handed_over, nothing_is_held

B, CONTEXT, NUM_TOKENS = 16, 128, 24
TOKEN_BYTES = 1920
"""Latents of the tiny model with its module, in float32."""

TEXT = b"def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\n" * 2
LENGTHS = (1, B - 1, B, B + 1, 3 * B, CONTEXT - NUM_TOKENS)


def rank_of_one():
    """The committed checkpoint, with every expert in its own slot."""
    core = ModelCore.load(WorkerSettings(speculate=1, context_length=CONTEXT))
    experts = core.shape.num_experts
    core.checkpoint.load_slots(core.model, [range(experts)] * core.shape.num_layers)
    layout = contiguous_layout(
        num_layers=core.shape.num_layers,
        num_experts=experts,
        num_ranks=1,
        slots_per_rank=experts,
    )
    return core, held_by(core, layout)


def latents_of(rank, prompt):
    """Of a prompt's full blocks: [layers, blocks, positions, width], the module's layer last."""
    blocks = [rank.scheduler.blocks.find(key) for key in keys_of(prompt, block_tokens=B)]
    (store,) = rank.core.cache._stores
    return store[:, blocks]


@pytest.mark.parametrize(
    "sampling",
    [pb.Sampling(logprobs=1), pb.Sampling(temperature=0.7, seed=7, frequency_penalty=0.3)],
    ids=["greedy", "sampled"],
)
async def test_tokens_are_one_pools_and_as_many_drafts_are_right(sampling):
    requests = [([*TEXT[:length]], NUM_TOKENS) for length in LENGTHS]
    # The decode rank's only token is the context's last one.
    requests.append(([*TEXT[1 : CONTEXT - 1]], 2))
    async with AsyncExitStack() as stack:
        alone, prefill, decode = [
            await stack.enter_async_context(a_rank(*rank_of_one(), boot_id=boot_id, num_drafts=1))
            for boot_id in ("alone", "prefills", "writes")
        ]
        for prompt, num_tokens in requests:
            one = await handed_over(prefill, decode, prompt, num_tokens, sampling)
            other = await answer(alone, prompt, num_tokens, sampling=sampling)
            assert vars(one) == vars(other), len(prompt)
        await nothing_is_held(prefill, decode)
        counts, usual = decode.scheduler.counts, alone.scheduler.counts
        assert (counts.prefilled_missing, counts.prefilled_own) == (0, 0)
        # Of the prompts that share a beginning, each block travels once.
        num_blocks = (CONTEXT - NUM_TOKENS) // B + (CONTEXT - 2) // B
        assert decode.puller.num_bytes == num_blocks * B * TOKEN_BYTES
        assert prefill.scheduler.counts.drafted == 0
        assert counts.accepted / counts.drafted > 0.95 * usual.accepted / usual.drafted > 0.4
        prompt, _ = requests[-1]
        fetched, computed = (latents_of(rank, prompt) for rank in (decode, alone))
        assert torch.equal(fetched[:-1], computed[:-1])
        # At a block's last position, the module also knows the token after the block.
        assert torch.equal(fetched[-1, :, : B - 1], computed[-1, :, : B - 1])
