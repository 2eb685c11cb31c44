"""`.safetensors` files of numbers: a JSON header, then the tensors' bytes. Needs no package."""

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.formats.errors import FormatError
from equipoise.formats.tables import shown

_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
    "U8": "<u1",
}
_HEADER_LENGTH = struct.Struct("<Q")


def load(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Return tensors by name.

    Raises:
        FormatError: the file is damaged, or a tensor is of another type.
    """
    if len(data) < _HEADER_LENGTH.size:
        raise FormatError("it is not a safetensors file: the header is missing")
    (length,) = _HEADER_LENGTH.unpack_from(data)
    start = _HEADER_LENGTH.size + length
    if start > len(data):
        raise FormatError(f"its header should have {length} bytes, but the file has {len(data)}")
    try:
        header = json.loads(data[_HEADER_LENGTH.size : start])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"its header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise FormatError(f"its header must be an object, not {shown(header)}")
    return {
        name: _tensor(name, entry, data[start:])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def dump(tensors: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Write a file of these tensors."""
    header, bodies, end = {}, [], 0
    for name, tensor in tensors.items():
        (kind,) = [key for key, dtype in _DTYPES.items() if tensor.dtype == np.dtype(dtype)]
        body = np.ascontiguousarray(tensor).tobytes()
        header[name] = {
            "dtype": kind,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + len(body)],
        }
        end += len(body)
        bodies.append(body)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight bytes
    return _HEADER_LENGTH.pack(len(text)) + text + b"".join(bodies)


def _tensor(name: str, entry: Any, bodies: bytes) -> npt.NDArray[Any]:
    match entry:
        case {
            "dtype": str(kind),
            "shape": list(shape),
            "data_offsets": [int(begin), int(end)],
        } if kind in _DTYPES and all(type(n) is int and n >= 0 for n in shape):
            dtype = np.dtype(_DTYPES[kind])
        case _:
            raise FormatError(f"tensor {name[:40]!r} is not a tensor of numbers")
    size = math.prod(shape) * dtype.itemsize
    if not 0 <= begin <= end <= len(bodies) or end - begin != size or len(shape) > 8:
        raise FormatError(f"tensor {name[:40]!r} of shape {shape[:8]} should have {size} bytes")
    return np.frombuffer(bodies[begin:end], dtype=dtype).reshape(shape)
