"""`Checkpoint`: a model's weights on disk, in Hugging Face's layout; `save`: write one.

A checkpoint is a folder with `config.json` and BF16 safetensors, in one file or in shards with an
index. Everything is checked when it is opened, so that a wrong file is named before any weight is
used. Which expert belongs in which slot is the caller's business.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from equipoise_model.config import ModelConfig
from equipoise_model.tensor_names import (
    dense_tensors,
    expert_tensors,
    is_mtp,
    mtp_copies,
    payload_names,
)
from equipoise_model.transformer import Transformer

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_BIAS = ".e_score_correction_bias"
_IGNORED = ".rotary_emb.inv_freq"  # old checkpoints store what the config says
_SAMPLE_BYTES = 1 << 20


class CheckpointError(Exception):
    """A checkpoint that is missing, damaged or not of its config; names the file and tensor."""


def save(model: Transformer, path: Path) -> None:
    """Write a checkpoint of a model whose slot e holds expert e in every layer.

    Weights are rounded to BF16; routers' biases stay float32. Multi-token-prediction modules are
    written if the model has them. The folder is made if need be; files there are replaced, each as
    a whole.

    Raises:
        OSError: the folder cannot be written.
    """
    tensors = dense_tensors(model) | expert_tensors(model) | mtp_copies(model)
    stored = {
        name: tensor.to(
            device="cpu",
            dtype=torch.float32 if name.endswith(_BIAS) else torch.bfloat16,
            copy=True,
        ).contiguous()
        for name, tensor in tensors.items()
    }
    path.mkdir(parents=True, exist_ok=True)
    weights, config = path / f"{_WEIGHTS}.new", path / f"{_CONFIG}.new"
    save_file(stored, weights, metadata={"format": "pt"})
    config.write_text(json.dumps(model.config.to_dict(), indent=2) + "\n", encoding="utf-8")
    # safetensors makes files that only their owner reads, but a service may run as someone else.
    weights.chmod(config.stat().st_mode)
    weights.replace(path / _WEIGHTS)
    config.replace(path / _CONFIG)


class Checkpoint:
    """An opened checkpoint: every tensor is known to be there, of the right shape and type.

    Weights are mapped, not read: opening is cheap, and each read touches its own bytes only.
    Reads may come from any thread.
    """

    def __init__(
        self, *, path: Path, config: ModelConfig, fingerprint: str, shards: Mapping[str, Any]
    ) -> None:
        """Use `open`; `shards` has the opened file of every tensor."""
        self.path = path
        self.config = config
        self.fingerprint = fingerprint
        self._shards = shards

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open and check a checkpoint's folder.

        Raises:
            CheckpointError: a file is missing or damaged, or a tensor is missing, unknown, or of
                another shape or type than the config implies.
            UnsupportedConfigError: the model cannot run the checkpoint's config.
        """
        config = _read_config(path / _CONFIG)
        files = _shard_files(path)
        shards: dict[str, Any] = {}
        for file in files:
            shard = _open_shard(file)
            shards |= {name: shard for name in shard.keys() if not name.endswith(_IGNORED)}  # noqa: SIM118
        _check_tensors(shards, config=config, path=path)
        return cls(path=path, config=config, fingerprint=_fingerprint(config, files), shards=shards)

    @property
    def has_mtp(self) -> bool:
        """Whether multi-token-prediction modules are stored; their config alone does not say."""
        return any(is_mtp(name, self.config) for name in self._shards)

    def load_model(self, *, row_block: int | None = None, mtp: bool = False) -> Transformer:
        """A model in one process, slot e holding expert e in every layer.

        Raises:
            CheckpointError: `mtp` is asked for, the checkpoint has no such modules.
        """
        model = Transformer(self.config, row_block=row_block, mtp=mtp)
        self.load_dense(model)
        self.load_slots(model, [range(self.config.n_routed_experts)] * self.config.num_moe_layers)
        return model.eval()

    @torch.no_grad()
    def load_dense(self, model: Transformer) -> None:
        """Load everything but the routed experts that a layout places.

        Multi-token-prediction modules are loaded whole, if the model has them.

        Raises:
            CheckpointError: the model has multi-token-prediction modules, the checkpoint has not.
        """
        assert model.config == self.config
        if len(model.mtp_layers) and not self.has_mtp:
            raise CheckpointError(
                f"{self.path} has no multi-token-prediction modules: build the model without them"
            )
        for name, tensor in dense_tensors(model).items():
            tensor.copy_(self._read(name))

    @torch.no_grad()
    def load_slots(self, model: Transformer, expert_of_slot: npt.ArrayLike) -> None:
        """Load routed experts into this rank's slots, integers [MoE layers, slots of the rank]."""
        assert model.config == self.config
        for layer, (moe, experts) in enumerate(
            zip(model.moe_layers, np.asarray(expert_of_slot).tolist(), strict=True)
        ):
            for slot, expert in enumerate(experts):
                moe.experts.write(slot, self.read_expert(layer, expert))

    def read_expert(self, layer: int, expert: int) -> Tensor:
        """The payload of a logical expert, uint8 [expert_bytes]; MoE layers count from 0."""
        assert 0 <= layer < self.config.num_moe_layers
        assert 0 <= expert < self.config.n_routed_experts
        names = payload_names(self.config, layer=layer, expert=expert)
        return torch.cat([self._read(name).flatten() for name in names]).view(torch.uint8)

    def _read(self, name: str) -> Tensor:
        tensor: Tensor = self._shards[name].get_tensor(name)
        return tensor


def _read_config(file: Path) -> ModelConfig:
    try:
        return ModelConfig.from_json(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def _shard_files(path: Path) -> list[Path]:
    """The weights' files in order, whether there is an index or not."""
    index = path / _INDEX
    if not index.exists():
        return [path / _WEIGHTS]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        plain = all(Path(name).name == name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of shards: {error!r}") from error
    if not plain:
        raise CheckpointError(f"{index} names a file outside its folder")
    return [path / name for name in sorted(names)]


def _open_shard(file: Path) -> Any:
    """An open safetensors file; the library checks its header against its size."""
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: copy the checkpoint again") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged, copy it again: {error}") from error


def _check_tensors(shards: Mapping[str, Any], *, config: ModelConfig, path: Path) -> None:
    """Compare names, shapes and types with those of a model of that config."""
    with torch.device("meta"):
        model = Transformer(config, mtp=True)
    expected = dense_tensors(model) | expert_tensors(model)
    if not any(is_mtp(name, config) for name in shards):
        expected = {name: t for name, t in expected.items() if not is_mtp(name, config)}
    known = expected | mtp_copies(model)
    for name in sorted(expected.keys() - shards.keys()):
        raise CheckpointError(f"{path}: {name} is missing")
    for name in sorted(shards.keys() - known.keys()):
        raise CheckpointError(f"{path}: {name} is not part of a model of this config")
    for name, tensor in known.items():
        if name not in shards:
            continue
        stored = shards[name].get_slice(name)
        shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        if shape != tensor.shape:
            raise CheckpointError(
                f"{path}: {name} is {list(shape)}, the config implies {list(tensor.shape)}"
            )
        if dtype not in ({"BF16", "F32"} if name.endswith(_BIAS) else {"BF16"}):
            raise CheckpointError(
                f"{path}: {name} is {dtype}, only BF16 is supported: convert the checkpoint"
            )


def _fingerprint(config: ModelConfig, files: list[Path]) -> str:
    """32 hex digits that differ for different checkpoints, wherever they are stored.

    Covers the config, each shard's header and size, and the first and last MiB of its weights: a
    change of a few weights within a large shard may go unseen, experts' checksums see it.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(config.to_dict(), sort_keys=True).encode())
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_size = stream.read(8)
            digest.update(size.to_bytes(8, "little") + header_size)
            digest.update(stream.read(int.from_bytes(header_size, "little") + _SAMPLE_BYTES))
            stream.seek(max(size - _SAMPLE_BYTES, stream.tell()))
            digest.update(stream.read())
    return digest.hexdigest()
