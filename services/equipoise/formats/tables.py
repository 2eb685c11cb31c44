"""Converts nested lists to arrays; rejects ragged rows and values that are not numbers.

Checks shapes and types; `Recording` and `ExpertPlacement` check values.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.formats.errors import FormatError
from equipoise.planning.arrays import ExpertTable

Numbers = npt.NDArray[np.float64]

LARGEST_ID = 2**31 - 1


def member(document: Any, key: str) -> Any:
    """Return a required value.

    Raises:
        FormatError: it is missing, or the document is not an object.
    """
    if not isinstance(document, Mapping):
        raise FormatError(f"an object with {key!r} is required, not {shown(document)}")
    if key not in document:
        raise FormatError(f"{key!r} is missing")
    return document[key]


def whole(value: Any, what: str, *, least: int = 0) -> int:
    """Parse a whole number from `least` to 2^31 - 1; those of YAML are text.

    Raises:
        FormatError: it is not one; the message calls it `what`.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        value = int(value)
    if type(value) is not int or not least <= value <= LARGEST_ID:
        raise FormatError(f"{what} must be a whole number of {least} or more, not {shown(value)}")
    return value


def loads_3d(value: Any, *, first_layer: int = 0) -> Numbers:
    """Convert loads [layers][experts] or [windows][layers][experts] to three dimensions.

    `first_layer` is the number of row 0 in the file.

    Raises:
        FormatError: rows have different lengths or hold values that are not numbers.
    """
    if isinstance(value, np.ndarray):
        return _loads_3d_of_array(value)
    if _depth(value) == 3:
        matrices = [
            _loads_2d(matrix, first_layer, f"window {i}, ") for i, matrix in enumerate(value)
        ]
        for index, matrix in enumerate(matrices):
            if matrix.shape != matrices[0].shape:
                raise FormatError(
                    f"window {index} has {matrix.shape[0]} layers x {matrix.shape[1]} experts, "
                    f"window 0 has {matrices[0].shape[0]} x {matrices[0].shape[1]}"
                )
        return np.stack(matrices)
    return _loads_2d(value, first_layer, "")[None]


def ids_2d(value: Any, *, first_layer: int = 0) -> ExpertTable:
    """Convert expert ids [layers][slots] to int32; ids may be digits as text.

    Raises:
        FormatError: rows have different lengths or hold values that are not ids.
    """
    if isinstance(value, np.ndarray):
        return _ids_2d_of_array(value)
    if not isinstance(value, list) or not value:
        raise FormatError(f"expert ids must be rows [layers][slots], not {shown(value)}")
    rows = [
        [_id(one, f"{layer}, slot {slot}: the expert") for slot, one in enumerate(row)]
        for layer, row in _rows(value, first_layer, row_of="expert ids", columns="slots")
    ]
    return np.array(rows, dtype=np.int32)


def shown(value: Any) -> str:
    """Format a value for an error message, always short."""
    if isinstance(value, Mapping):
        return f"an object of {len(value)} members"
    if isinstance(value, np.ndarray):
        return f"an array of shape {list(value.shape)} and type {value.dtype}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) > 10**20:
        return "a number of more than 20 digits"
    if not (value is None or isinstance(value, str | int | float)):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _rows(
    value: list[Any], first_layer: int, *, row_of: str, columns: str, where: str = ""
) -> Iterator[tuple[str, list[Any]]]:
    """The name of each layer and its row, checked to be a list as long as the first one."""
    for index, row in enumerate(value):
        layer = f"{where}layer {first_layer + index}"
        if not isinstance(row, list):
            raise FormatError(f"{layer} must be a row of {row_of}, not {shown(row)}")
        if len(row) != len(value[0]):
            raise FormatError(
                f"{layer} has {len(row)} {columns}, layer {first_layer} has {len(value[0])}"
            )
        yield layer, row


def _id(value: Any, what: str) -> int:
    # Negative ids are whole numbers: `ExpertPlacement` checks the range.
    if type(value) is int and -LARGEST_ID <= value <= LARGEST_ID:
        return value
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) < 10:
        return int(value)
    raise FormatError(f"{what} must be a whole number, not {shown(value)}")


def _depth(value: Any) -> int:
    depth = 0
    while isinstance(value, list) and value and depth < 4:
        depth, value = depth + 1, value[0]
    return depth


def _loads_2d(value: Any, first_layer: int, where: str) -> Numbers:
    if not isinstance(value, list) or not value:
        raise FormatError(f"{where}loads must be rows [layers][experts], not {shown(value)}")
    for layer, row in _rows(value, first_layer, row_of="loads", columns="experts", where=where):
        for expert, one in enumerate(row):
            # JSON allows integers of any length; float() of them could overflow.
            if type(one) is float or (type(one) is int and abs(one) <= 2**53):
                continue
            raise FormatError(
                f"{layer}, expert {expert}: the load must be a number from 0 to 2^53, "
                f"not {shown(one)}"
            )
    return np.array(value, dtype=np.float64)


def _loads_3d_of_array(value: npt.NDArray[Any]) -> Numbers:
    if value.dtype.kind not in "fiu" or value.ndim not in {2, 3}:
        raise FormatError(f"loads must be numbers [layers, experts], not {shown(value)}")
    numbers = value.astype(np.float64)
    return numbers[None] if value.ndim == 2 else numbers


def _ids_2d_of_array(value: npt.NDArray[Any]) -> ExpertTable:
    if value.dtype.kind not in "iu" or value.ndim != 2:
        raise FormatError(f"expert ids must be whole numbers [layers, slots], not {shown(value)}")
    if value.size and (value.max() > LARGEST_ID or value.min() < -LARGEST_ID):
        row, slot = (int(i) for i in np.argwhere(np.abs(value.astype(np.float64)) > LARGEST_ID)[0])
        raise FormatError(f"layer {row}, slot {slot} holds expert {int(value[row, slot])}")
    return value.astype(np.int32)
