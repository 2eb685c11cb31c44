"""`Shard`: one safetensors file, checked when opened and read in pieces.

Owns the file format: a length, a JSON header, then the tensors' bytes without gaps. Reads only the
requested rows, a piece at a time: loading a few tensors of a large file needs little memory, and a
file may be larger than memory. Never maps a file: a process that touches a mapped page of a file
that has been truncated is killed by SIGBUS.
"""

import json
import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from equipoise_model.checkpoint_tensors import BF16, F32, FP8

DTYPES = {BF16: torch.bfloat16, F32: torch.float32, FP8: torch.float8_e4m3fn}

_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", FP8, "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", BF16), 2),
    **dict.fromkeys(("U32", "I32", F32), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


class CheckpointError(Exception):
    """A checkpoint is missing, damaged or does not match its config; names the file and tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor is stored in its file."""

    dtype: str
    """Safetensors' name of the type."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    end: int
    """Byte after the last."""


class Shard:
    """An opened file; safe to read from any thread."""

    def __init__(self, *, file: Path, tensors: Mapping[str, StoredTensor], descriptor: int) -> None:
        """Call `open` instead; closing the shard closes the descriptor."""
        self.file = file
        self.tensors = tensors
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def open(cls, file: Path) -> Self:
        """Open a file and check its header against its size.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        try:
            with file.open("rb") as stream:
                tensors = _read_header(stream, size=os.fstat(stream.fileno()).st_size)
                descriptor = os.dup(stream.fileno())
        except FileNotFoundError as error:
            raise CheckpointError(f"{file} is missing: copy the checkpoint again") from error
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
        except _DamagedError as error:
            raise CheckpointError(f"{file} is damaged, copy it again: {error}") from error
        return cls(file=file, tensors=tensors, descriptor=descriptor)

    def pieces(
        self, name: str, *, max_bytes: int, multiple: int = 1
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield consecutive rows of a tensor, in pieces of about `max_bytes`.

        The number of rows in a piece is a multiple of `multiple`. Each piece is valid until the
        next one, which replaces its bytes.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter since it was opened.
        """
        stored = self.tensors[name]
        num_rows = stored.shape[0]
        row_bytes = (stored.end - stored.start) // num_rows
        step = max(max_bytes // row_bytes // multiple, 1) * multiple
        room = torch.empty(min(step, num_rows) * row_bytes, dtype=torch.uint8)
        for first in range(0, num_rows, step):
            rows = slice(first, min(first + step, num_rows))
            shape = (rows.stop - rows.start, *stored.shape[1:])
            data = room[: shape[0] * row_bytes]
            self._read(name, stored.start + first * row_bytes, data)
            yield rows, data.view(DTYPES[stored.dtype]).view(shape)

    def _read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out`, uint8 [count], with the file's bytes from `start`."""
        missing = stored_bytes(out)
        end = start + len(missing)
        while missing:
            try:
                count = os.preadv(self._descriptor, [missing], end - len(missing))
            except OSError as error:
                raise self._unreadable(name, str(error.strerror)) from error
            if not count:
                found = os.fstat(self._descriptor).st_size
                raise self._unreadable(
                    name, f"the file was truncated to {found} bytes after it was opened"
                )
            missing = missing[count:]

    def _unreadable(self, name: str, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file}: {name} cannot be read: {why}: copy the file again, and restart the "
            "processes that have it open"
        )


def stored_bytes(tensor: Tensor) -> memoryview:
    """View a contiguous tensor's bytes, as a file stores them."""
    return tensor.flatten().view(torch.uint8).numpy().data


def header_of(tensors: Mapping[str, StoredTensor]) -> bytes:
    """Return the start of a file that holds tensors; offsets count from the header's end."""
    values: dict[str, Any] = {_METADATA: {"format": "pt"}}
    for name, stored in tensors.items():
        values[name] = {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "data_offsets": [stored.start, stored.end],
        }
    text = json.dumps(values, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class _DamagedError(Exception):
    """A file is damaged; the message says how."""


def _read_header(stream: BinaryIO, *, size: int) -> dict[str, StoredTensor]:
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    begin = _LENGTH_BYTES + length
    if size < _LENGTH_BYTES or length > _MAX_HEADER_BYTES or begin > size:
        raise _DamagedError(f"its header of {length} bytes does not fit the file's {size}")
    try:
        values = json.loads(stream.read(length), object_pairs_hook=_without_repeats)
        values.pop(_METADATA, None)
        tensors = {name: _stored(name, value, begin=begin) for name, value in values.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _DamagedError(f"its header is not safetensors': {error!r}") from error
    end = begin
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if stored.start != end:
            raise _DamagedError(f"{name} starts at byte {stored.start}, not at {end}")
        end = stored.end
        if end > size:
            raise _DamagedError(f"{name} ends at byte {end}, the file at {size}")
    if end != size:
        raise _DamagedError(f"its tensors end at byte {end}, the file at {size}")
    return tensors


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name appears twice")
    return values


def _stored(name: str, value: Mapping[str, Any], *, begin: int) -> StoredTensor:
    """Parse one header entry; malformed JSON values raise their own exceptions."""
    start, end = value["data_offsets"]
    dtype, shape = value["dtype"], tuple(value["shape"])
    if any(type(number) is not int or number < 0 for number in (start, end, *shape)):
        raise _DamagedError(f"{name} has sizes that are not integers")
    item_bytes = _ITEM_BYTES.get(dtype)
    if item_bytes is None:
        raise _DamagedError(f"{name} has the unknown type {dtype!r}")
    if end - start != math.prod(shape) * item_bytes:
        raise _DamagedError(
            f"{name} has {end - start} bytes, which does not match {dtype} {list(shape)}"
        )
    return StoredTensor(dtype=dtype, shape=shape, start=begin + start, end=begin + end)
