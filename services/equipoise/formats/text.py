"""Numbers as JSON text, one row per line, whole numbers without a fraction."""

import json

import numpy as np
import numpy.typing as npt


def number_rows(matrix: npt.NDArray[np.float64]) -> str:
    """Format the rows of [layers, experts], one per line, separated by commas."""
    return ",".join(f"\n{number_row(row)}" for row in matrix)


def id_rows(table: npt.NDArray[np.int32]) -> str:
    """Format the rows of [layers, slots] likewise, without a leading line break."""
    return ",\n".join(json.dumps(row, separators=(",", ":")) for row in table.tolist())


def number_row(row: npt.NDArray[np.float64]) -> str:
    """Format a list of numbers; reading it gives the same float64 values."""
    values = [int(value) if value.is_integer() else value for value in row.tolist()]
    return json.dumps(values, separators=(",", ":"))
