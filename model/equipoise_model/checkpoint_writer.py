"""`save`: write a model as a checkpoint; `write`: write one from any source of tensors.

Assigns tensors to shards and replaces files atomically, the index last: after a crash there is the
old checkpoint, or one that readers reject. The manifest is computed from the bytes in memory, not
from what arrived on the disk. Holds one tensor at a time plus the source.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from equipoise_model.checkpoint_fp8 import quantize
from equipoise_model.checkpoint_manifest import MANIFEST, UNFINISHED, ManifestBuilder
from equipoise_model.checkpoint_shard import DTYPES, StoredTensor, header_of, stored_bytes
from equipoise_model.checkpoint_tensors import (
    FP8,
    ITEM_BYTES,
    SCALE_SUFFIX,
    TensorSpec,
    tensor_specs,
)
from equipoise_model.config import Fp8Config, ModelConfig
from equipoise_model.plain.transformer import Transformer
from equipoise_model.tensor_names import dense_tensors, expert_tensors, mtp_copies

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def save(
    model: Transformer,
    path: Path,
    *,
    fp8: Fp8Config | None = None,
    max_shard_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a checkpoint of a model whose slot e holds expert e in every layer.

    Rounds weights to BF16, or quantises linear maps to `fp8`; routers' biases stay float32. Writes
    multi-token-prediction modules if the model has them. For the other arguments see `write`.

    Raises:
        OSError: the folder cannot be written.
    """
    tensors = dense_tensors(model) | expert_tensors(model) | mtp_copies(model)
    write(
        path,
        dataclasses.replace(model.config, quantization_config=fp8),
        read=tensors.__getitem__,
        mtp=model.num_mtp_layers > 0,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )


def write(
    path: Path,
    config: ModelConfig,
    *,
    read: Callable[[str], Tensor],
    mtp: bool,
    max_shard_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a checkpoint of a config, with FP8 weights if it says so.

    Args:
        path: the folder; created if missing. An existing checkpoint is replaced.
        config: of the checkpoint to write.
        read: returns a weight of any float dtype by name; never called for scales.
        mtp: whether to write multi-token-prediction modules.
        max_shard_bytes: size of a shard, exceeded only by a single larger tensor; one file by
            default.
        progress: called after each tensor with the bytes written so far and the total.

    Raises:
        OSError: the folder cannot be written.
    """
    specs = tensor_specs(config, mtp=mtp)
    total = sum(spec.num_bytes for spec in specs.values())
    shards = _deal(specs, max_bytes=max_shard_bytes or total)
    files = _file_names(len(shards))
    path.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.safetensors.new", UNFINISHED):
        for unfinished in path.glob(pattern):
            unfinished.unlink()
    digests, done = ManifestBuilder(config), 0
    for names, file in zip(shards, files, strict=True):
        with (path / f"{file}.new").open("wb") as stream:
            own = {name: specs[name] for name in names}
            writer = _ShardWriter(stream, own, digests=digests)
            for name in names:
                if name.endswith(SCALE_SUFFIX):
                    continue
                done += writer.put(name, read(name), fp8=config.quantization_config)
                if progress is not None:
                    progress(done, total)
    _write_json(path / f"{CONFIG}.new", config.to_dict())
    digests.build().write(path / f"{MANIFEST}.new")
    if len(files) > 1:
        file_of = {n: file for names, file in zip(shards, files, strict=True) for n in names}
        _write_json(
            path / f"{INDEX}.new", {"metadata": {"total_size": total}, "weight_map": file_of}
        )
    _replace(path, files)


class _ShardWriter:
    """Writes the tensors of one file in any order, each at its offset."""

    def __init__(
        self, stream: BinaryIO, specs: Mapping[str, TensorSpec], *, digests: ManifestBuilder
    ) -> None:
        self._stream = stream
        self._digests = digests
        self._places: dict[str, StoredTensor] = {}
        end = 0
        # Widest element type first, so that every tensor starts at a multiple of its element size.
        for name in sorted(specs, key=lambda name: (-ITEM_BYTES[specs[name].dtype], name)):
            spec = specs[name]
            begin, end = end, end + spec.num_bytes
            self._places[name] = StoredTensor(
                dtype=spec.dtype, shape=spec.shape, start=begin, end=end
            )
        header = header_of(self._places)
        self._begin = len(header)
        stream.write(header)
        stream.truncate(self._begin + end)

    def put(self, name: str, tensor: Tensor, *, fp8: Fp8Config | None) -> int:
        """Write a tensor, with its scales if it is quantised; return the number of bytes."""
        if self._places[name].dtype != FP8:
            return self._put(name, tensor)
        assert fp8 is not None
        quantized = quantize(tensor.detach(), fp8)
        num_bytes = self._put(name, quantized.codes)
        return num_bytes + self._put(name + SCALE_SUFFIX, quantized.scales)

    def _put(self, name: str, tensor: Tensor) -> int:
        place = self._places[name]
        assert tuple(tensor.shape) == place.shape
        stored = tensor.detach().to(device="cpu", dtype=DTYPES[place.dtype]).contiguous()
        self._digests.add(name, (stored,))
        self._stream.seek(self._begin + place.start)
        return self._stream.write(stored_bytes(stored))


def _deal(specs: Mapping[str, TensorSpec], *, max_bytes: int) -> list[list[str]]:
    """Assign consecutive tensors to shards; a weight and its scales stay together."""
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name in specs:
        if name.endswith(SCALE_SUFFIX):
            continue
        pair = [one for one in (name, name + SCALE_SUFFIX) if one in specs]
        needed = sum(specs[one].num_bytes for one in pair)
        if shards[-1] and needed > room:
            shards.append([])
            room = max_bytes
        shards[-1] += pair
        room -= needed
    return shards


def _file_names(num_files: int) -> list[str]:
    if num_files == 1:
        return [WEIGHTS]
    return [f"model-{n:05}-of-{num_files:05}.safetensors" for n in range(1, num_files + 1)]


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _replace(path: Path, files: Sequence[str]) -> None:
    """Replace all old files with the new ones."""
    for name in (INDEX, MANIFEST):
        (path / name).unlink(missing_ok=True)
    for old in [path / WEIGHTS, *path.glob("model-*-of-*.safetensors")]:
        if old.name not in files:
            old.unlink(missing_ok=True)
    for name in (CONFIG, MANIFEST, *files):
        (path / f"{name}.new").replace(path / name)
    if len(files) > 1:
        (path / f"{INDEX}.new").replace(path / INDEX)
