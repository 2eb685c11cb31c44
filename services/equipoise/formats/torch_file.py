"""Reads `.pt` files without torch and without executing code.

A .pt file is a zip of a pickle and the bytes of each tensor. A pickle can call any function by
name; this reader accepts only the names of a tensor's parts and rejects all others. The result
has plain values, dicts, lists and dense tensors of numbers only.
"""

import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from equipoise.formats import archive
from equipoise.formats.errors import FormatError

MAX_PICKLE_BYTES = 16 * 1024
"""A recorder's `stat` file has about 240. The limit prevents nesting that overflows the C stack."""

_STORAGES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
}
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")


def load(data: bytes) -> Any:
    """Load the saved value, with tensors as arrays.

    Raises:
        FormatError: the file is damaged or names anything except plain values and tensors.
    """
    members = archive.unpacked(data)
    pickles = [name for name in members if name.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise FormatError("it is not a .pt file: it must contain exactly one data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    if members.get(f"{folder}byteorder", b"little").strip() != b"little":
        raise FormatError("its tensors are big-endian: save it on another machine")
    pickled = members[pickles[0]]
    if len(pickled) > MAX_PICKLE_BYTES:
        raise FormatError(
            f"its pickle has {len(pickled)} bytes, a recorder's `stat` file has about 240: "
            f"recordings of single passes or tokens are not supported: record in mode stat"
        )
    try:
        return _Unpickler(pickled, members, folder).load()
    except FormatError:
        raise
    except Exception as error:  # noqa: BLE001  # a damaged pickle can raise anything
        raise FormatError(f"its pickle is damaged: {type(error).__name__}: {error}") from None


def dump(document: Mapping[str, Any]) -> bytes:
    """Write a .pt file for torch.load(weights_only=True): plain values and arrays by name."""
    tensors: list[npt.NDArray[Any]] = []
    body = b"".join(
        _opcodes(key, tensors) + _opcodes(value, tensors) for key, value in document.items()
    )
    return archive.packed(
        {
            "archive/data.pkl": b"\x80\x02}(" + body + b"u.",
            "archive/byteorder": b"little",
            **{f"archive/data/{key}": tensor.tobytes() for key, tensor in enumerate(tensors)},
            "archive/version": b"3\n",
        }
    )


class _Storage(NamedTuple):
    """A tensor's storage, or its type. A tuple, so that a pickle cannot change it."""

    dtype: str
    data: bytes = b""


class _Rebuild:
    """Builds a tensor from a storage for a pickle. Has no state that a pickle could change."""

    __slots__ = ()

    def __call__(
        self,
        storage: _Storage,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        *_unused: Any,
    ) -> npt.NDArray[Any]:
        numbers = np.frombuffer(storage.data, dtype=storage.dtype)
        if not all(type(one) is int and one >= 0 for one in (offset, *size, *stride)):
            raise FormatError("a tensor's sizes and strides must be whole numbers of 0 or more")
        if len(size) != len(stride) or len(size) > 8:
            raise FormatError(f"a tensor has {len(size)} sizes, but {len(stride)} strides")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if math.prod(size) > numbers.size or last >= max(numbers.size, 1):
            raise FormatError(f"a tensor of shape {list(size)} has only {numbers.size} numbers")
        if not math.prod(size):
            return np.zeros(size, dtype=storage.dtype)
        strides = tuple(step * numbers.itemsize for step in stride)
        view = np.lib.stride_tricks.as_strided(numbers[offset:], shape=size, strides=strides)
        return view.copy()


class _Unpickler(pickle.Unpickler):
    """Accepts only the names of a tensor's parts."""

    def __init__(self, pickled: bytes, members: Mapping[str, bytes], folder: str) -> None:
        super().__init__(io.BytesIO(pickled))
        self._members = members
        self._folder = folder

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == _REBUILD:
            return _Rebuild()
        if module == "torch" and name in _STORAGES:
            return _Storage(_STORAGES[name])
        raise FormatError(
            f"it names {f'{module}.{name}'[:80]!r}, which is not part of a plain tensor; a file "
            f"that could run code is rejected"
        )

    def persistent_load(self, pid: Any, /) -> _Storage:
        match pid:
            case ("storage", _Storage(dtype=dtype), str(key), str(), int()):
                name = f"{self._folder}data/{key}"
                if name not in self._members:
                    raise FormatError(f"the bytes of tensor {key!r} are missing")
                data = self._members[name]
                return _Storage(dtype, data[: len(data) - len(data) % np.dtype(dtype).itemsize])
            case _:
                raise FormatError("the description of a tensor's storage is not supported")


def _opcodes(value: Any, tensors: list[npt.NDArray[Any]]) -> bytes:
    """Encode a plain value as a protocol 2 pickle; an array as a reference to its bytes."""
    match value:
        case None | True | False:
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        case int():
            digits = value.to_bytes(8, "little", signed=True)
            return b"\x8a\x08" + digits
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            text = value.encode()
            return b"X" + struct.pack("<I", len(text)) + text
        case tuple():
            return b"(" + b"".join(_opcodes(one, tensors) for one in value) + b"t"
        case np.ndarray():
            return _tensor_opcodes(np.ascontiguousarray(value), tensors)
        case _:
            raise AssertionError(f"not a plain value: {type(value)}")


def _tensor_opcodes(array: npt.NDArray[Any], tensors: list[npt.NDArray[Any]]) -> bytes:
    (storage,) = [name for name, dtype in _STORAGES.items() if array.dtype == np.dtype(dtype)]
    key = str(len(tensors))
    tensors.append(array)
    strides = tuple(step // array.itemsize for step in array.strides)
    return b"".join(
        (
            b"ctorch._utils\n_rebuild_tensor_v2\n((",
            _opcodes("storage", tensors),
            b"ctorch\n" + storage.encode() + b"\n",
            b"".join(_opcodes(one, tensors) for one in (key, "cpu", array.size)),
            b"tQ",
            b"".join(_opcodes(one, tensors) for one in (0, array.shape, strides, False)),
            b"ccollections\nOrderedDict\n)RtR",
        )
    )
