"""`Manifest`: the digests of a checkpoint's contents, in a file beside the weights.

Every read is verified against it, so that every reader detects a damaged file. The digests
of experts' payloads are what a pool compares, pulls and reports by.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from equipoise_model.checkpoint_shard import CheckpointError, stored_bytes
from equipoise_model.checkpoint_tensors import SCALE_SUFFIX
from equipoise_model.config import Fp8Config, ModelConfig
from equipoise_model.experts import CHECKSUM_BYTES
from equipoise_model.tensor_names import payload_names, placed_expert

MANIFEST = "equipoise-manifest.json"
"""Name of the file, in the checkpoint's folder."""

UNFINISHED = f"{MANIFEST}.*.new"
"""Pattern of files whose writer died."""

COMMAND = "equipoise checkpoint manifest --checkpoint"

Payloads = npt.NDArray[np.uint8]
"""Checksums of experts' payloads in one format, [layers, experts, 16]."""

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """What a checkpoint's files hold, by digest; all digests are BLAKE2b-128."""

    tensors: Mapping[str, bytes]
    """Digest of each tensor's stored bytes, by checkpoint name."""

    payloads: Mapping[str, Payloads]
    """Checksums of the MoE layers' payloads by format: at least the one that is stored."""

    draft_payloads: Mapping[str, Payloads] = field(default_factory=dict)
    """Checksums of the multi-token-prediction modules' payloads by format. Earlier releases wrote
    none, so that a format may be missing."""

    shared_payloads: Mapping[str, Payloads] = field(default_factory=dict)
    """Checksums of the shared experts' payloads by format, [layers, 1, 16]: of the MoE layers, then
    of the modules if they are stored. Empty for a model with several shared experts per layer.
    Earlier releases wrote none."""

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """Read a file; None if there is none.

        Raises:
            CheckpointError: it cannot be read, is damaged, or has another version.
        """
        try:
            document = _document(file.read_bytes())
            return cls(
                tensors={name: bytes.fromhex(one) for name, one in document["tensors"].items()},
                payloads=_tables(document["payloads"]),
                draft_payloads=_tables(document.get("draft_payloads", {})),
                shared_payloads=_tables(document.get("shared_payloads", {})),
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{file} is damaged ({error}): copy it again, or, if the weights are known to be "
                f"good, write it again with {COMMAND} {file.parent} --replace"
            ) from error

    def write(self, file: Path) -> None:
        """Write the file in one step: readers see the old one or the new one, never a part.

        Raises:
            OSError: the folder cannot be written.
        """
        document = self._document()
        document["digest"] = _digest_of(document).hex()
        unfinished = file.with_name(f"{file.name}.{uuid.uuid4().hex}.new")
        try:
            with unfinished.open("x", encoding="utf-8") as stream:
                stream.write(json.dumps(document, indent=0) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)

    def checksums(self, config: ModelConfig, *, mtp: bool) -> Payloads | None:
        """Checksums of the experts that a config places; None if some of them are unknown.

        With `mtp`, those of the multi-token-prediction modules follow those of the MoE layers.
        """
        name = format_name(config.quantization_config)
        routed, drafts = self.payloads.get(name), self.draft_payloads.get(name)
        if routed is None or (mtp and drafts is None):
            return None
        if mtp and drafts is not None:
            routed = np.concatenate([routed, drafts])
        if not config.shared_as_routed:
            return routed
        shared = self.shared_payloads.get(name)
        if shared is None or len(shared) < len(routed):
            return None
        return np.concatenate([routed, shared[: len(routed)]], axis=1)

    def checksum(self, config: ModelConfig, *, layer: int, expert: int) -> bytes | None:
        """Checksum of the payload of one expert that a config places; None if it is unknown."""
        name = format_name(config.quantization_config)
        if expert >= config.n_routed_experts:
            tables, expert = self.shared_payloads, 0
        elif layer < config.num_moe_layers:
            tables = self.payloads
        else:
            tables, layer = self.draft_payloads, layer - config.num_moe_layers
        table = tables.get(name)
        return None if table is None or layer >= len(table) else table[layer, expert].tobytes()

    def check(self, config: ModelConfig, names: Iterable[str], *, file: Path) -> None:
        """Check that it is about a checkpoint of these tensors.

        Raises:
            CheckpointError: it is about another checkpoint.
        """
        row = (config.n_routed_experts, CHECKSUM_BYTES)
        stored = format_name(config.quantization_config)
        different = sorted(set(names) ^ self.tensors.keys())
        shapes = {table.shape for table in self.payloads.values()}
        of_drafts = {table.shape for table in self.draft_payloads.values()}
        of_shared = {table.shape for table in self.shared_payloads.values()}
        is_other = (
            stored not in self.payloads
            or shapes != {(config.num_moe_layers, *row)}
            or not of_drafts <= {(config.num_nextn_predict_layers, *row)}
            or not of_shared
            <= {(n, 1, CHECKSUM_BYTES) for n in (config.num_moe_layers, config.num_expert_layers)}
        )
        if different or is_other:
            about = f": {different[0]} is in one of them only" if different else ""
            raise CheckpointError(
                f"{file} describes another checkpoint than the files beside it{about}: copy both "
                f"again, or write it again with {COMMAND} {file.parent} --replace"
            )

    def fingerprint(self, config: ModelConfig) -> str:
        """Return 32 hex digits that identify the weights under a config, wherever they are stored.

        They change with every bit of every tensor, and with the format of payloads. Modules and
        shared experts count by their tensors, whether or not the checksums of their payloads are
        known, and whether or not the shared ones are placed.
        """
        digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
        digest.update(json.dumps(config.to_dict(), sort_keys=True).encode())
        for name in sorted(self.tensors):
            digest.update(name.encode() + b"\0" + self.tensors[name])
        digest.update(self.payloads[format_name(config.quantization_config)].tobytes())
        return digest.hexdigest()

    def _document(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "version": _VERSION,
            "tensors": {name: self.tensors[name].hex() for name in sorted(self.tensors)},
            "payloads": _rows(self.payloads),
        }
        # Readers of earlier releases expect MoE layers and routed experts only among the payloads.
        others = {"draft_payloads": self.draft_payloads, "shared_payloads": self.shared_payloads}
        return document | {name: _rows(tables) for name, tables in others.items() if tables}


class ManifestBuilder:
    """Computes a manifest from the stored bytes of tensors.

    Each tensor is added once. The tensors of one expert are added in the order gate, up, down, with
    scales behind their weight, by one thread; otherwise the order is free.
    """

    def __init__(self, config: ModelConfig) -> None:
        """`config` is that of the checkpoint as stored."""
        self._config = config
        self._tensors: dict[str, bytes] = {}
        # The last column is that of the shared expert.
        shape = (config.num_expert_layers, config.n_routed_experts + 1, CHECKSUM_BYTES)
        self._payloads = np.zeros(shape, dtype=np.uint8)
        self._has_drafts = False
        self._open: dict[tuple[int, int], _Payload] = {}

    def add(self, name: str, pieces: Iterable[Tensor]) -> None:
        """Add a tensor as consecutive pieces of any shape, in the type that is stored."""
        own = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
        place = placed_expert(name, self._config)
        payload = None if place is None else self._open.setdefault(place, _Payload())
        for piece in pieces:
            data = stored_bytes(piece)
            own.update(data)
            if payload is not None:
                payload.add(data, is_scale=name.endswith(SCALE_SUFFIX))
        self._tensors[name] = own.digest()
        if place is not None and payload is not None and name == self._last_name(*place):
            self._payloads[place] = np.frombuffer(payload.digest(), dtype=np.uint8)
            self._has_drafts |= place[0] >= self._config.num_moe_layers
            del self._open[place]

    def build(self) -> Manifest:
        """Return the manifest of everything that was added."""
        assert not self._open, "every expert is complete"
        config, payloads = self._config, self._payloads
        if not self._has_drafts:
            payloads = payloads[: config.num_moe_layers]
        routed, shared = np.split(payloads, [config.n_routed_experts], axis=1)
        layers, drafts = np.split(routed, [config.num_moe_layers])
        stored = format_name(config.quantization_config)
        return Manifest(
            tensors=self._tensors,
            payloads={stored: layers},
            draft_payloads={stored: drafts} if self._has_drafts else {},
            shared_payloads={stored: shared} if config.n_shared_experts == 1 else {},
        )

    def _last_name(self, layer: int, expert: int) -> str:
        last = payload_names(self._config, layer=layer, expert=expert)[-1]
        return last if self._config.quantization_config is None else last + SCALE_SUFFIX


def format_name(fp8: Fp8Config | None) -> str:
    """Name of a payload's format: bf16, fp8, or fp8-ue8m0 with powers of two as scales."""
    if fp8 is None:
        return "bf16"
    return "fp8" if fp8.scale_fmt is None else f"fp8-{fp8.scale_fmt}"


class _Payload:
    """The checksum of a payload in the making: weights, then scales."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
        self._scales: list[bytes] = []

    def add(self, data: memoryview, *, is_scale: bool) -> None:
        if is_scale:
            self._scales.append(bytes(data))
        else:
            self._hash.update(data)

    def digest(self) -> bytes:
        for scales in self._scales:
            self._hash.update(scales)
        return self._hash.digest()


def _document(data: bytes) -> dict[str, Any]:
    """Parse a file; anything but a whole manifest raises ValueError, KeyError or TypeError."""
    document: dict[str, Any] = json.loads(data)
    claimed = document.pop("digest")
    if claimed != _digest_of(document).hex():
        raise ValueError("its own digest differs")
    if document["version"] != _VERSION:
        raise ValueError(f"its version is {document['version']!r}, this release reads {_VERSION}")
    return document


def _digest_of(document: Mapping[str, Any]) -> bytes:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=CHECKSUM_BYTES).digest()


def _rows(tables: Mapping[str, Payloads]) -> dict[str, list[str]]:
    return {name: [layer.tobytes().hex() for layer in tables[name]] for name in sorted(tables)}


def _tables(rows_of: Mapping[str, list[str]]) -> dict[str, Payloads]:
    return {name: _table(rows) for name, rows in rows_of.items()}


def _table(rows: list[str]) -> Payloads:
    flat = np.frombuffer(b"".join(bytes.fromhex(row) for row in rows), dtype=np.uint8)
    return flat.reshape(len(rows), -1, CHECKSUM_BYTES)
