"""`verified`: a checkpoint with its manifest, which is computed and written if it has none."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np

from equipoise_model.checkpoint import Checkpoint, ProgressCallback
from equipoise_model.checkpoint_manifest import (
    MANIFEST,
    Manifest,
    ManifestBuilder,
    Payloads,
    format_name,
)
from equipoise_model.checkpoint_tensors import SCALE_SUFFIX
from equipoise_model.experts import CHECKSUM_BYTES, checksum
from equipoise_model.tensor_names import payload_names, placed_expert

_MAX_THREADS = 8

_Item = TypeVar("_Item")

_log = logging.getLogger(__name__)


def verified(
    checkpoint: Checkpoint, *, mtp: bool = False, progress: ProgressCallback | None = None
) -> Checkpoint:
    """Return the checkpoint with a manifest that has the checksums of its payloads.

    With `mtp`, also those of its multi-token-prediction modules. What was computed is written to
    the folder; if that is read-only, it stays in memory. Several processes may do this at once:
    each replaces the file as a whole, with the same contents.

    Raises:
        CheckpointError: a file cannot be read or is damaged.
    """
    manifest = complete(checkpoint, mtp=mtp, progress=progress)
    if manifest is checkpoint.manifest:
        return checkpoint
    file = checkpoint.path / MANIFEST
    try:
        manifest.write(file)
    except OSError as error:
        _log.warning(
            "%s cannot be written (%s), so that every start reads all weights to compute it: "
            "write it once with `equipoise checkpoint manifest`",
            file,
            error.strerror,
        )
    else:
        _log.info("wrote %s", file)
    return checkpoint.with_manifest(manifest)


def complete(
    checkpoint: Checkpoint, *, mtp: bool, progress: ProgressCallback | None = None
) -> Manifest:
    """Return the manifest; compute what it lacks, which reads every weight, or every module.

    Raises:
        CheckpointError: a file cannot be read or is damaged.
    """
    manifest = checkpoint.manifest
    if manifest is None:
        manifest = compute(checkpoint, progress=progress)
    checkpoint = checkpoint.with_manifest(manifest)
    config, name = checkpoint.config, format_name(checkpoint.config.quantization_config)
    layers, routed = range(config.num_moe_layers), range(config.n_routed_experts)
    if name not in manifest.payloads:
        table = _payloads(checkpoint, layers, routed, progress=progress)
        manifest = replace(manifest, payloads={**manifest.payloads, name: table})
    if mtp and name not in manifest.draft_payloads:
        modules = range(config.num_moe_layers, config.num_expert_layers)
        table = _payloads(checkpoint, modules, routed, progress=progress)
        manifest = replace(manifest, draft_payloads={**manifest.draft_payloads, name: table})
    if manifest.checksums(config, mtp=mtp) is None:
        if checkpoint.has_mtp:
            layers = range(config.num_expert_layers)
        shared = range(config.n_routed_experts, config.num_placed_experts)
        table = _payloads(checkpoint, layers, shared, progress=progress)
        manifest = replace(manifest, shared_payloads={**manifest.shared_payloads, name: table})
    return manifest


def compute(checkpoint: Checkpoint, *, progress: ProgressCallback | None = None) -> Manifest:
    """Compute the manifest of a checkpoint as stored; an existing manifest is ignored.

    Raises:
        CheckpointError: a file cannot be read.
    """
    raw, builder = checkpoint.with_manifest(None), ManifestBuilder(checkpoint.stored_config)

    def add(names: Sequence[str]) -> int:
        for name in names:
            builder.add(name, (part for _, part in raw.pieces(name)))
        return sum(raw.size_of(name) for name in names)

    total = sum(raw.size_of(name) for name in raw.names)
    _in_parallel(add, _groups(raw), total=total, progress=progress)
    return builder.build()


def verify_all(checkpoint: Checkpoint, *, progress: ProgressCallback | None = None) -> None:
    """Read every tensor, and with it verify the whole checkpoint, then every expert's payload.

    Payloads are verified in the checkpoint's format, if the manifest has it.

    Raises:
        CheckpointError: a tensor is not that of the manifest, or the manifest contradicts itself;
            names the first one found.
    """
    assert checkpoint.manifest is not None, "a manifest"
    config, manifest = checkpoint.config, checkpoint.manifest
    num_layers = config.num_expert_layers if checkpoint.has_mtp else config.num_moe_layers
    places = [
        (layer, expert)
        for layer, expert in np.ndindex(num_layers, config.num_placed_experts)
        if manifest.checksum(config, layer=layer, expert=expert) is not None
    ]

    def read(one: str | tuple[int, int]) -> int:
        if not isinstance(one, str):
            return checkpoint.read_expert(*one).nbytes
        for _ in checkpoint.pieces(one):
            pass
        return checkpoint.size_of(one)

    total = sum(checkpoint.size_of(name) for name in checkpoint.names)
    total += config.expert_bytes * len(places)
    items: list[str | tuple[int, int]] = [*checkpoint.names, *places]
    _in_parallel(read, items, total=total, progress=progress)


def _payloads(
    checkpoint: Checkpoint, layers: range, experts: range, *, progress: ProgressCallback | None
) -> Payloads:
    """Compute the checksums of some layers' payloads as `read_expert` returns them."""
    config = checkpoint.config
    shape = (len(layers), len(experts))
    table = np.zeros((*shape, CHECKSUM_BYTES), dtype=np.uint8)

    def add(place: tuple[int, ...]) -> int:
        layer, expert = place
        payload = checkpoint.read_expert(layers[layer], experts[expert])
        table[place] = np.frombuffer(checksum(payload), np.uint8)
        return config.expert_bytes

    total = config.expert_bytes * shape[0] * shape[1]
    _in_parallel(add, np.ndindex(shape), total=total, progress=progress)
    return table


def _groups(checkpoint: Checkpoint) -> list[Sequence[str]]:
    """List the tensors to read by one thread in order: those of an expert, or a single one."""
    config = checkpoint.stored_config
    suffixes = ("",) if config.quantization_config is None else ("", SCALE_SUFFIX)
    groups: list[Sequence[str]] = [
        (name,) for name in checkpoint.names if placed_expert(name, config) is None
    ]
    num_layers = config.num_expert_layers if checkpoint.has_mtp else config.num_moe_layers
    num_experts = config.n_routed_experts + (config.n_shared_experts == 1)
    for layer, expert in np.ndindex(num_layers, num_experts):
        names = payload_names(config, layer=layer, expert=expert)
        groups.append([name + suffix for name in names for suffix in suffixes])
    return groups


def _in_parallel(
    work: Callable[[_Item], int],
    items: Iterable[_Item],
    *,
    total: int,
    progress: ProgressCallback | None,
) -> None:
    """Do `work`, which returns the number of bytes that it has handled, on several threads."""
    done = 0
    executor = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
    try:
        for num_bytes in executor.map(work, items):
            done += num_bytes
            if progress is not None:
                progress(done, total)
    finally:
        executor.shutdown(cancel_futures=True)
