"""Checks a worker's settings against the memory of its device, before anything is loaded."""

from pathlib import Path

import psutil
import torch

from equipoise.rank.errors import WorkerError
from equipoise.worker.settings import WorkerSettings
from equipoise_model.config import ModelConfig
from equipoise_model.latent_cache import blocks_for
from equipoise_model.memory import GIB, RankSizes, plan_memory
from equipoise_model.operations import Operations

_CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files with a container's memory limit, in cgroup versions 2 and 1."""


def check_memory(config: ModelConfig, settings: WorkerSettings, operations: Operations) -> None:
    """Compare what a rank needs with what its device has.

    Raises:
        WorkerError: it needs more; the message names the term and the remedy.
    """
    sizes = rank_sizes(
        settings,
        is_fp8=operations.fp8 is not None,
        on_gpu=operations.device.type == "cuda",
        block_tokens=operations.block_tokens,
    )
    capacity = capacity_bytes(settings, operations.device)
    obstacle = plan_memory(config, sizes).obstacle(capacity)
    if obstacle is not None:
        raise WorkerError(f"memory: {obstacle} (`equipoise worker --explain` shows every term)")


def rank_sizes(
    settings: WorkerSettings, *, is_fp8: bool, on_gpu: bool, block_tokens: int
) -> RankSizes:
    """Return what the settings say about memory."""
    return RankSizes(
        is_fp8=is_fp8,
        on_gpu=on_gpu,
        num_ranks=settings.num_ranks,
        slots_per_rank=settings.slots_per_rank,
        spare_slots=settings.spare_slots,
        places=settings.places,
        num_blocks=num_blocks(settings, block_tokens=block_tokens),
        block_tokens=block_tokens,
        fp8_latents=settings.latents == "fp8",
        context_length=settings.context_length,
        max_requests=settings.max_requests,
        max_step_tokens=settings.max_step_tokens,
        max_graph_rows=settings.graph_rows,
        speculate=settings.speculate,
        row_block=settings.row_block,
    )


def num_blocks(settings: WorkerSettings, *, block_tokens: int) -> int:
    """Return the configured number, or enough for `max_requests` requests of full length."""
    if settings.cache_tokens:
        return blocks_for(settings.cache_tokens, block_tokens=block_tokens)
    return settings.max_requests * blocks_for(settings.context_length, block_tokens=block_tokens)


def capacity_bytes(settings: WorkerSettings, device: torch.device) -> int:
    """Bytes of a device that this worker may use: at most what is free on a GPU now.

    On a CPU, the memory of the machine or the limit of the container, used or not.
    """
    if device.type == "cuda":
        available, _ = torch.cuda.mem_get_info(device)
    else:
        limits = [psutil.virtual_memory().total, *map(_limit, _CONTAINER_LIMITS)]
        available = min(limit for limit in limits if limit is not None)
    allowed = round(settings.device_memory_gib * GIB)
    return min(available, allowed) if allowed else available


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
