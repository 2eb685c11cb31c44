"""`equipoise worker --explain`: the memory that a worker's settings need, without a worker."""

from dataclasses import asdict, replace
from typing import Any

import torch

from equipoise.cli.display import print_json
from equipoise.rank.errors import WorkerError
from equipoise.settings.numbers import format_bytes
from equipoise.worker.memory import capacity_bytes, rank_sizes
from equipoise.worker.settings import WorkerSettings
from equipoise_model.config import Fp8Config, ModelConfig, UnsupportedConfigError
from equipoise_model.device import AUTO, DeviceError, choose_device
from equipoise_model.latent_cache import BLOCK_TOKENS, KERNEL_BLOCK_TOKENS
from equipoise_model.memory import GIB, MemoryPlan, Term, plan_memory
from equipoise_model.operations import OperationsError, fp8_obstacle, wants_fp8


def run(settings: WorkerSettings) -> int:
    """Print the memory plan of a worker; returns 1 if its device cannot hold it, else 0.

    Reads only the checkpoint's config.json. A GPU that this machine lacks is planned for if
    --device-memory-gib gives its memory.

    Raises:
        WorkerError: the settings contradict each other or the model.
    """
    plan = _plan(settings)
    capacity = _capacity(settings)
    obstacle = None if capacity is None else plan.obstacle(capacity)
    if settings.json:
        print_json(_document(plan, capacity, obstacle))
    else:
        _print_text(plan, capacity, obstacle)
    return 0 if obstacle is None else 1


def _plan(settings: WorkerSettings) -> MemoryPlan:
    path, on_gpu = settings.checkpoint / "config.json", _on_gpu(settings)
    try:
        config = ModelConfig.from_json(path)
        config = replace(config, shared_as_routed=settings.shared_as_routed)
        is_fp8 = wants_fp8(settings.weights, config=config, on_gpu=on_gpu)
    except (OSError, UnsupportedConfigError) as error:
        raise WorkerError(f"checkpoint {settings.checkpoint}: {error}") from error
    except OperationsError as error:
        raise WorkerError(f"weights: {error}") from error
    reason = fp8_obstacle(config, batch_invariant=settings.batch_invariant)
    if is_fp8 and reason:
        raise WorkerError(f"weights: FP8 is not available: {reason}")
    default = KERNEL_BLOCK_TOKENS if is_fp8 and on_gpu else BLOCK_TOKENS
    sizes = rank_sizes(
        settings,
        is_fp8=is_fp8,
        on_gpu=on_gpu,
        block_tokens=settings.block_tokens or default,
    )
    fp8 = (config.quantization_config or Fp8Config()) if is_fp8 else None
    return plan_memory(replace(config, quantization_config=fp8), sizes)


def _on_gpu(settings: WorkerSettings) -> bool:
    if settings.device == AUTO:
        return torch.cuda.is_available()
    return settings.device.startswith("cuda")


def _capacity(settings: WorkerSettings) -> int | None:
    """Bytes that the device offers; None if it is not here and its memory is not given."""
    if _on_gpu(settings) and not torch.cuda.is_available():
        return round(settings.device_memory_gib * GIB) or None
    try:
        return capacity_bytes(settings, choose_device(settings.device))
    except DeviceError as error:
        raise WorkerError(f"device: {error}") from error


def _document(plan: MemoryPlan, capacity: int | None, obstacle: str | None) -> dict[str, Any]:
    return {
        "fits": None if capacity is None else obstacle is None,
        "obstacle": obstacle,
        "capacity_bytes": capacity,
        "needed_bytes": plan.num_bytes,
        "terms": [asdict(term) for term in plan.terms],
        "host_needed_bytes": plan.host_bytes,
        "host_terms": [asdict(term) for term in plan.host_terms],
    }


def _print_text(plan: MemoryPlan, capacity: int | None, obstacle: str | None) -> None:
    _print_terms("memory of the device", plan.terms, plan.num_bytes)
    if plan.host_terms:
        _print_terms("memory of the host, at most", plan.host_terms, plan.host_bytes)
    if obstacle is not None:
        print(f"does not fit: {obstacle}")
    elif capacity is None:
        print(
            "no such device here: give its memory with --device-memory-gib to check whether it fits"
        )
    else:
        left = format_bytes(capacity - plan.num_bytes)
        print(f"fits: {left} of {format_bytes(capacity)} remain free")


def _print_terms(title: str, terms: tuple[Term, ...], num_bytes: int) -> None:
    print(f"{title}: {format_bytes(num_bytes)}")
    for term in terms:
        print(f"  {term.name:<26}{format_bytes(term.num_bytes):>12}   {term.basis}")
