"""`.npz` files: arrays by name. Pickled objects, which could run code, are rejected."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.formats import archive
from equipoise.formats.errors import FormatError


def load(members: Mapping[str, bytes]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an unpacked .npz.

    Raises:
        FormatError: a member is not an array of plain numbers, or is damaged.
    """
    return {name.removesuffix(".npy"): _array(name, data) for name, data in members.items()}


def dump(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Write a reproducible .npz file."""
    members = {}
    for name, array in arrays.items():
        file = io.BytesIO()
        np.save(file, array, allow_pickle=False)
        members[f"{name}.npy"] = file.getvalue()
    return archive.packed(members)


def _array(name: str, data: bytes) -> npt.NDArray[Any]:
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # noqa: BLE001  # the header is Python literals: any error is possible
        raise FormatError(f"{name} is not an array of numbers: {error}") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise FormatError(f"{name} is not an array of numbers")
    return array
