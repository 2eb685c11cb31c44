"""`Checkpoint`: a model's weights on disk, in Hugging Face's layout.

A checkpoint is a folder with `config.json` and safetensors, in one file or in shards with an index.
Weights are BF16, or FP8 with scales. Opening checks everything, so that a wrong file is reported
before any weight is used. The caller decides which expert goes into which slot; `checkpoint_writer`
writes checkpoints.
"""

import dataclasses
import hashlib
import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equipoise_kernels.formats import GROUP, weight_scale_shape
from equipoise_model.checkpoint_fp8 import STRIP_BYTES, dequantize_strip, quantize
from equipoise_model.checkpoint_manifest import COMMAND, MANIFEST, Manifest, Payloads
from equipoise_model.checkpoint_shard import CheckpointError, Shard, stored_bytes
from equipoise_model.checkpoint_tensors import F32, FP8, SCALE_SUFFIX, TensorSpec, tensor_specs
from equipoise_model.checkpoint_writer import CONFIG, INDEX, WEIGHTS, save
from equipoise_model.config import Fp8Config, ModelConfig
from equipoise_model.experts import CHECKSUM_BYTES, checksum
from equipoise_model.plain.transformer import Transformer
from equipoise_model.serving_model import ServingModel
from equipoise_model.tensor_names import dense_tensors, is_mtp, payload_names, placed_expert

__all__ = ["Checkpoint", "CheckpointError", "ProgressCallback", "save"]

ProgressCallback = Callable[[int, int], None]
"""Called after each tensor or expert with the bytes loaded so far and the total."""

_IGNORED = ".rotary_emb.inv_freq"  # old checkpoints store these; the config already defines them
_ORIGINALS = {
    ".embed_tokens.weight": "model.embed_tokens.weight",
    ".shared_head.head.weight": "lm_head.weight",
}
_PIECE_BYTES = 8 << 20


class Checkpoint:
    """An opened checkpoint: every tensor is present, with the right shape and type.

    Reads are verified against the manifest, if there is one: a read of other bytes raises
    CheckpointError, which names file and tensor, and what was read must not be used. Opening is
    cheap, and a read touches only its own bytes and keeps a few MiB of them in memory. Safe to read
    from any thread.
    """

    def __init__(
        self,
        *,
        path: Path,
        config: ModelConfig,
        stored_config: ModelConfig,
        manifest: Manifest | None,
        shards: Mapping[str, Shard],
    ) -> None:
        """Call `open` instead; `shards` maps every tensor name to its opened file."""
        self.path = path
        self.config = config
        self.stored_config = stored_config
        """The config of the files, whatever payloads are converted to."""
        self.manifest = manifest
        """What reads are verified against; None if the checkpoint has none yet."""
        self._shards = shards

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        keep_fp8: bool = False,
        quantize_as: Fp8Config | None = None,
        shared_as_routed: bool = False,
        ignore_manifest: bool = False,
    ) -> Self:
        """Open and check a checkpoint's folder.

        Args:
            path: the folder.
            keep_fp8: whether payloads of an FP8 checkpoint are its codes and scales. Otherwise
                payloads and `config` are those of the checkpoint converted to BF16.
            quantize_as: how to quantise a BF16 checkpoint while reading, so that its payloads and
                `config` are those of an FP8 checkpoint; ignored for an FP8 checkpoint.
            shared_as_routed: whether the shared expert is placed like the routed ones.
            ignore_manifest: whether to open it as if it had none.

        Raises:
            CheckpointError: a file is missing or damaged, or a tensor is missing, unknown, or has
                another shape or type than the config implies, or the manifest is of another
                checkpoint.
            UnsupportedConfigError: the model cannot run the checkpoint's config.
        """
        stored_config = _read_config(path / CONFIG)
        config = dataclasses.replace(stored_config, shared_as_routed=shared_as_routed)
        shards = _open_shards(path)
        _check_tensors(shards, config=config, path=path)
        if config.quantization_config is None:
            config = dataclasses.replace(config, quantization_config=quantize_as)
        elif not keep_fp8 and quantize_as is None:
            config = dataclasses.replace(config, quantization_config=None)
        manifest = None if ignore_manifest else Manifest.read(path / MANIFEST)
        if manifest is not None:
            manifest.check(stored_config, shards, file=path / MANIFEST)
        return cls(
            path=path, config=config, stored_config=stored_config, manifest=manifest, shards=shards
        )

    def with_manifest(self, manifest: Manifest | None) -> Self:
        """Return the same checkpoint, verified against another manifest; None verifies nothing."""
        return type(self)(
            path=self.path,
            config=self.config,
            stored_config=self.stored_config,
            manifest=manifest,
            shards=self._shards,
        )

    @property
    def names(self) -> Sequence[str]:
        """Names of the stored tensors."""
        return tuple(self._shards)

    def size_of(self, name: str) -> int:
        """Size of a stored tensor in bytes."""
        stored = self._shards[name].tensors[name]
        return stored.end - stored.start

    def payload_checksums(self, *, mtp: bool = False) -> Payloads | None:
        """Checksums of what `read_expert` returns; None if the manifest lacks some of them."""
        if self.manifest is None:
            return None
        return self.manifest.checksums(self.config, mtp=mtp)

    @property
    def fingerprint(self) -> str:
        """32 hex digits that identify config, weights and the format of payloads.

        Needs a manifest with the payloads of this format: see `checkpoint_digests.verified`.
        """
        assert self.manifest is not None, "a manifest"
        return self.manifest.fingerprint(self.config)

    @property
    def has_mtp(self) -> bool:
        """Whether multi-token-prediction modules are stored; the config alone does not say."""
        return any(is_mtp(name, self.config) for name in self._shards)

    @property
    def is_fp8(self) -> bool:
        """Whether linear maps are stored as codes and scales."""
        return any(name.endswith(SCALE_SUFFIX) for name in self._shards)

    def load_model(
        self,
        *,
        row_block: int | None = None,
        mtp: bool = False,
        progress: ProgressCallback | None = None,
    ) -> Transformer:
        """Load the whole model into one process: slot e holds expert e in every layer.

        `progress` runs twice from 0: for the dense tensors, then for the experts.

        Raises:
            CheckpointError: `mtp` is set, but the checkpoint has no such modules.
        """
        model = Transformer(self.config, row_block=row_block, mtp=mtp)
        self.load_dense(model, progress=progress)
        identity = [range(self.config.num_placed_experts)] * len(model.slots)
        self.load_slots(model, identity, progress=progress)
        return model.eval()

    @torch.no_grad()
    def load_dense(self, model: ServingModel, *, progress: ProgressCallback | None = None) -> None:
        """Load everything but the experts that a layout places.

        Raises:
            CheckpointError: the model has multi-token-prediction modules and the checkpoint does
                not.
        """
        assert model.config == self.config
        if model.num_mtp_layers and not self.has_mtp:
            raise CheckpointError(
                f"{self.path} has no multi-token-prediction modules: build the model without them"
            )
        tensors = dense_tensors(model)
        done, total = 0, sum(tensor.nbytes for tensor in tensors.values())
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float8_e4m3fn:
                self.read_quantized(name, codes=tensor, scales=tensors[name + SCALE_SUFFIX])
            elif not name.endswith(SCALE_SUFFIX):
                self.read_into(name, tensor)
            done += tensor.nbytes
            if progress is not None:
                progress(done, total)

    @torch.no_grad()
    def load_slots(
        self,
        model: ServingModel,
        expert_of_slot: npt.ArrayLike,
        *,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Load placed experts into this rank's slots, integers [layers, slots per rank].

        Multi-token-prediction modules are the last layers, if the model has them.
        """
        assert model.config == self.config
        table = np.asarray(expert_of_slot)
        done, total = 0, table.size * self.config.expert_bytes
        for layer, (slots, experts) in enumerate(zip(model.slots, table.tolist(), strict=True)):
            for slot, expert in enumerate(experts):
                slots.write(slot, self.read_expert(layer, expert))
                done += self.config.expert_bytes
                if progress is not None:
                    progress(done, total)

    @torch.no_grad()
    def read_expert(self, layer: int, expert: int) -> Tensor:
        """Read a logical expert's payload, uint8 [expert_bytes]; MoE layers count from 0.

        Modules' layers, which must be stored, come last, and so does a shared expert if placed.

        Gate, up and down in BF16, or with `keep_fp8` their codes, then their scales.

        Raises:
            CheckpointError: a file is damaged, or the manifest contradicts itself about the expert.
        """
        assert 0 <= layer < self.config.num_expert_layers
        assert 0 <= expert < self.config.num_placed_experts
        manifest = self.manifest
        known = manifest and manifest.checksum(self.config, layer=layer, expert=expert)
        if known is None:
            return self._payload(layer, expert)
        # One hash of the whole payload instead of one per tensor.
        payload = self.with_manifest(None)._payload(layer, expert)  # noqa: SLF001 - its own class
        if checksum(payload) == known:
            return payload
        payload = self._payload(layer, expert)  # Raises if it is a tensor that differs.
        if checksum(payload) == known:
            return payload
        names = payload_names(self.config, layer=layer, expert=expert)
        raise CheckpointError(
            f"{self.path / MANIFEST} contradicts itself: {', '.join(names)} match their digests in "
            f"it, but expert {expert} of MoE layer {layer}, which consists of them, does not match "
            f"its own: write the manifest again with {COMMAND} {self.path} --replace"
        )

    def _payload(self, layer: int, expert: int) -> Tensor:
        """Read an expert's payload, each tensor verified if there is a manifest."""
        names = payload_names(self.config, layer=layer, expert=expert)
        # Pages of its own: small objects would otherwise settle in the holes that payloads leave in
        # the heap.
        pages = mmap.mmap(-1, self.config.expert_bytes)
        payload = torch.frombuffer(pages, dtype=torch.uint8)
        shapes = [self._shards[name].tensors[name].shape for name in names]
        if self.config.quantization_config is None:
            weights, _ = _parts(payload, shapes, dtype=torch.bfloat16)
            for name, weight in zip(names, weights, strict=True):
                self.read_into(name, weight)
            return payload
        codes, rest = _parts(payload, shapes, dtype=torch.float8_e4m3fn)
        scale_shapes = [weight_scale_shape(shape) for shape in shapes]
        scales, _ = _parts(rest, scale_shapes, dtype=torch.float32)
        for part in zip(names, codes, scales, strict=True):
            self.read_quantized(part[0], codes=part[1], scales=part[2])
        return payload

    def read(self, name: str) -> Tensor:
        """Read a tensor by checkpoint name into a new tensor: float32 if stored so, else BF16.

        Handles checkpoints that omit the repeated embedding and head.
        """
        if name not in self._shards:
            name = next(own for copy, own in _ORIGINALS.items() if name.endswith(copy))
        stored = self._shards[name].tensors[name]
        dtype = torch.float32 if stored.dtype == F32 else torch.bfloat16
        out = torch.empty(stored.shape, dtype=dtype)
        self.read_into(name, out)
        return out

    def read_quantized(self, name: str, *, codes: Tensor, scales: Tensor) -> None:
        """Fill codes and scales of a weight: as stored, or by quantising its BF16 weights."""
        if self._shards[name].tensors[name].dtype == FP8:
            self.read_into(name, codes)
            self.read_into(name + SCALE_SUFFIX, scales)
            return
        assert self.config.quantization_config is not None
        quantized = quantize(self.read(name), self.config.quantization_config)
        codes.copy_(quantized.codes)
        scales.copy_(quantized.scales)

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill a tensor of the stored shape; FP8 is converted to BF16 unless `out` is FP8."""
        if self._shards[name].tensors[name].dtype != FP8 or out.dtype == torch.float8_e4m3fn:
            for rows, part in self.pieces(name, max_bytes=_PIECE_BYTES):
                out[rows].copy_(part)
            return
        scales = self.read(name + SCALE_SUFFIX)
        for rows, codes in self.pieces(name, max_bytes=STRIP_BYTES, multiple=GROUP):
            out[rows].copy_(dequantize_strip(codes, scales, first=rows.start))

    def pieces(
        self, name: str, *, max_bytes: int = _PIECE_BYTES, multiple: int = 1
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield a tensor as stored, in pieces of consecutive rows; the end verifies the whole.

        Each piece is valid until the next one.

        Raises:
            CheckpointError: the bytes, all of which were yielded, are not those of the manifest.
        """
        shard = self._shards[name]
        pieces = shard.pieces(name, max_bytes=max_bytes, multiple=multiple)
        if self.manifest is None:
            yield from pieces
            return
        digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
        for rows, part in pieces:
            digest.update(stored_bytes(part))
            yield rows, part
        if digest.digest() != self.manifest.tensors[name]:
            raise CheckpointError(_mismatch(name, shard.file, self.stored_config))


def _mismatch(name: str, file: Path, config: ModelConfig) -> str:
    layer, expert = placed_expert(name, config) or (0, config.n_routed_experts)
    is_routed = expert < config.n_routed_experts
    of_expert = f" (expert {expert} of MoE layer {layer})" if is_routed else ""
    return (
        f"{file} is damaged: {name}{of_expert} does not match the digest in {MANIFEST}: copy the "
        f"file again; after a change of the weights, write the manifest again with {COMMAND} "
        f"{file.parent} --replace"
    )


def _parts(
    payload: Tensor, shapes: Sequence[tuple[int, ...]], *, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """Split a payload into tensors that share its bytes; also return the remaining bytes."""
    parts = []
    for shape in shapes:
        size = math.prod(shape) * dtype.itemsize
        parts.append(payload[:size].view(dtype).view(shape))
        payload = payload[size:]
    return parts, payload


def _read_config(file: Path) -> ModelConfig:
    try:
        return ModelConfig.from_json(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def _open_shards(path: Path) -> dict[str, Shard]:
    """Open the file of every tensor, with or without an index."""
    index = path / INDEX
    if not index.exists():
        shard = Shard.open(path / WEIGHTS)
        found = dict.fromkeys(shard.tensors, shard)
    else:
        file_of = _read_index(index)
        opened = {file: Shard.open(path / file) for file in sorted(set(file_of.values()))}
        found = {name: opened[file] for name, file in file_of.items()}
        for name, shard in found.items():
            if name not in shard.tensors:
                raise CheckpointError(f"{shard.file}: {name} is missing, although {index} lists it")
    return {name: shard for name, shard in found.items() if not name.endswith(_IGNORED)}


def _read_index(index: Path) -> dict[str, str]:
    """Return each tensor's file; every file must be in the index's own folder."""
    try:
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        good = all(isinstance(file, str) for file in file_of.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of shards: {error!r}") from error
    if not good:
        raise CheckpointError(f"{index} is not an index of shards: a file name is not text")
    for name, file in file_of.items():
        # Reading `..` or `/etc/passwd` as weights would disclose their contents.
        if Path(file).name != file or not file.endswith(".safetensors") or "\\" in file:
            raise CheckpointError(
                f"{index}: {name} is listed in {file!r}, which is not a safetensors file of this "
                "folder"
            )
    return dict(file_of)


def _check_tensors(shards: Mapping[str, Shard], *, config: ModelConfig, path: Path) -> None:
    """Compare names, shapes and types with those the config implies."""
    expected = tensor_specs(config, mtp=any(is_mtp(name, config) for name in shards))
    for name in sorted(shards.keys() - expected.keys()):
        raise CheckpointError(f"{shards[name].file}: {name} is not part of a model of this config")
    for name, spec in expected.items():
        if name in shards:
            _check_tensor(name, spec, shard=shards[name])
        elif not spec.optional:
            raise CheckpointError(f"{path}: {name} is missing")


def _check_tensor(name: str, spec: TensorSpec, *, shard: Shard) -> None:
    stored = shard.tensors[name]
    if stored.shape != spec.shape:
        raise CheckpointError(
            f"{shard.file}: {name} is {list(stored.shape)}, the config implies {list(spec.shape)}"
        )
    if stored.dtype not in (spec.dtype, *spec.also):
        raise CheckpointError(
            f"{shard.file}: {name} is {stored.dtype}, the config implies {spec.dtype}: convert the "
            "checkpoint"
        )
