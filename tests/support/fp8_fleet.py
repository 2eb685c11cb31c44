"""Runs a balancer and two FP8 workers that share a device through a rollout; prints what it saw.

python fp8_fleet.py FOLDER [DEVICE]    FOLDER: an empty one, for the checkpoint and the logs
"""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

import grpc
import torch

from equipoise.cli.demo.fleet import Fleet
from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from equipoise_model.checkpoint import save
from equipoise_model.config import Fp8Config
from equipoise_model.plain.transformer import Transformer
from tests.support.fp8_models import NARROW
from tests.support.real_pool import BOUND_S, Pool, mirrored

NAMES = ("worker-0", "worker-1")
CONFIG = dataclasses.replace(NARROW, n_routed_experts=8)
SLOTS_PER_RANK = 6
PROMPTS = ((5, 9, 2, 40, 7), (11, 3), (8, 8, 8))
NUM_TOKENS = 24


async def main(folder, device="cuda:0"):
    torch.manual_seed(7)
    model = Transformer(CONFIG).requires_grad_(requires_grad=False)
    for tensor in model.state_dict().values():
        if tensor.ndim > 1:
            tensor.normal_(std=0.2)
    save(model, folder / "checkpoint", fp8=Fp8Config())
    pool = Pool(folder, num_ranks=len(NAMES), slots_per_rank=SLOTS_PER_RANK)
    pool.fleet = Fleet(folder)
    async with pool.fleet:
        await pool.start_balancer()
        for name in NAMES:
            await pool.start_worker(
                name, f"--checkpoint={folder / 'checkpoint'}", f"--device={device}",
                "--weights=fp8", "--no-batch-invariant", "--context-length=64",
                "--step-timeout-s=10",
                *(["--device-memory-gib=16"] if device != "cpu" else []),
            )  # fmt: skip
        following = asyncio.create_task(pool.feed.run())
        try:
            first = await pool.serving(*NAMES)
            before = await completions(first)
            request = admin_pb2.PinRequest(
                reason="to roll out", layout=mirrored(await pool.layout())
            )
            async with grpc.aio.insecure_channel(pool.address) as channel:
                admin = admin_pb2_grpc.AdminStub(channel)
                await admin.Pin(request, timeout=BOUND_S, wait_for_ready=True)
            during = await completions(first)
            after = await pool.until(
                lambda status: status.generation > first.generation and status.hold.at_pin
            )
            layout = await pool.layout()
            report = {
                "before": before,
                "during": during,
                "after": await completions(after),
                "generations": [first.generation, after.generation],
                "epochs": [first.epoch, after.epoch],
                "is_pinned_layout": layout.expert_of_slot == request.layout.expert_of_slot,
                "ranks": [
                    {"device": rank.device, "kernels": rank.kernels, "steps": rank.steps}
                    for rank in after.ranks
                ],
            }
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    print(json.dumps(report))


async def completions(status):
    """The tokens of every prompt from every rank, all at once."""

    async def of(address, prompt):
        async with grpc.aio.insecure_channel(address) as channel:
            call = worker_pb2_grpc.InferenceStub(channel).Generate(
                worker_pb2.GenerateRequest(prompt=prompt, max_tokens=NUM_TOKENS), timeout=BOUND_S
            )
            return [token async for response in call for token in response.tokens]

    places = [(rank.address, prompt) for rank in status.ranks for prompt in PROMPTS]
    return await asyncio.gather(*(of(*place) for place in places))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
