"""FP8 ranks with a real balancer: a rollout changes the layout, and no token.

Ranks exchange rows by the kernels, in Triton's interpreter over shared memory, or over gloo when
they draft; the torch twins compute the rest.
"""

import asyncio
import dataclasses

import grpc
import pytest
import torch

from equipoise.worker.alone import engine_alone
from equipoise.worker.sequence import Request
from equipoise.worker.settings import WorkerSettings
from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from equipoise_model.checkpoint import save
from equipoise_model.config import Fp8Config
from equipoise_model.plain.transformer import Transformer
from tests.support.fp8_models import NARROW
from tests.support.kernel_backends import use_backends
from tests.support.real_pool import BOUND_S, Pool, mirrored

pytest.importorskip("triton", reason="kernels need the extra `kernels`")
pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

NAMES = ("worker-0", "worker-1")
SLOTS_PER_RANK = 3
PROMPTS = ((5, 9, 2, 40, 7), (11, 3))
NUM_TOKENS = 6


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(7)
    config = dataclasses.replace(NARROW, num_nextn_predict_layers=1)
    model = Transformer(config, mtp=True).requires_grad_(requires_grad=False)
    for tensor in model.state_dict().values():
        if tensor.ndim > 1:
            tensor.normal_(std=0.2)
    save(model, tmp_path / "checkpoint", fp8=Fp8Config())
    return tmp_path / "checkpoint"


async def completions(status):
    """The tokens of every prompt from every rank, one request at a time per rank."""

    async def of_rank(address):
        made = []
        async with grpc.aio.insecure_channel(address) as channel:
            for prompt in PROMPTS:
                call = worker_pb2_grpc.InferenceStub(channel).Generate(
                    worker_pb2.GenerateRequest(prompt=prompt, max_tokens=NUM_TOKENS),
                    timeout=BOUND_S,
                )
                made.append([token async for response in call for token in response.tokens])
        return made

    return await asyncio.gather(*(of_rank(rank.address) for rank in status.ranks))


def tokens_alone(checkpoint, monkeypatch, *, shared_as_routed):
    """The tokens of every prompt from one rank that holds all experts and does not draft."""
    use_backends(monkeypatch, "reference")
    made = []

    def publish(result):
        made[-1] += [emission.token for emission in result.emissions]
        if any(emission.finish for emission in result.emissions):
            engine.leave()

    for prompt in PROMPTS:
        settings = WorkerSettings(
            checkpoint=checkpoint,
            weights="fp8",
            batch_invariant=False,
            context_length=64,
            shared_as_routed=shared_as_routed,
        )
        engine = engine_alone(settings, publish=publish)
        made.append([])
        engine.submit(Request(key=0, prompt=prompt, max_tokens=NUM_TOKENS))
        engine.run()
    return made


@pytest.mark.parametrize(
    ("exchange", "num_drafts", "shared_as_routed"),
    [("triton", 0, False), ("reference", 1, True)],
    ids=["kernels", "drafts with the shared expert in slots"],
)
async def test_a_rollout_to_fp8_ranks_changes_the_layout_and_no_token(
    checkpoint, tmp_path, monkeypatch, exchange, num_drafts, shared_as_routed
):
    alone = tokens_alone(checkpoint, monkeypatch, shared_as_routed=shared_as_routed)
    monkeypatch.setenv("EQUIPOISE_KERNELS", f"reference,all_to_all={exchange}")
    pool = Pool(tmp_path, num_ranks=2, slots_per_rank=SLOTS_PER_RANK)
    async with pool.fleet:
        await pool.start_balancer()
        for name in NAMES:
            await pool.start_worker(
                name, f"--checkpoint={checkpoint}", "--weights=fp8", "--no-batch-invariant",
                "--context-length=64", "--step-timeout-s=60", f"--speculate={num_drafts}",
                *(["--shared-as-routed"] if shared_as_routed else []),
            )  # fmt: skip
        following = asyncio.create_task(pool.feed.run())
        try:
            first = await pool.serving(*NAMES)
            expected = await completions(first)
            assert expected == [alone, alone], "no rank's place and no draft changes a token"
            assert len({tuple(tokens) for tokens in expected[0]}) == len(PROMPTS)
            held = await pool.layout()
            assert held.num_layers == 1 + num_drafts
            assert held.num_experts == NARROW.n_routed_experts + shared_as_routed
            wanted = mirrored(held)
            request = admin_pb2.PinRequest(reason="to be rolled out", layout=wanted)
            async with grpc.aio.insecure_channel(pool.address) as channel:
                admin = admin_pb2_grpc.AdminStub(channel)
                await admin.Pin(request, timeout=BOUND_S, wait_for_ready=True)
            # These requests are under way while the ranks switch.
            during = await completions(first)
            after = await pool.until(
                lambda status: status.generation > first.generation and status.hold.at_pin
            )
            assert (await pool.layout()).expert_of_slot == wanted.expert_of_slot
            assert during == await completions(after) == expected
            assert after.epoch == first.epoch, "no rank was lost"
            if num_drafts:
                await pool.until(lambda status: all(rank.drafts > 0 for rank in status.ranks))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
