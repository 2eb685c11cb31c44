"""Numbers as JSON text, a line a row, whole ones without a fraction."""

import json

import numpy as np
import numpy.typing as npt


def number_rows(matrix: npt.NDArray[np.float64]) -> str:
    """The rows of [layers, experts], separated by commas, each on a line of its own."""
    return ",".join(f"\n{number_row(row)}" for row in matrix)


def number_row(row: npt.NDArray[np.float64]) -> str:
    """A list of numbers; reading it gives the same float64 values."""
    values = [int(value) if value.is_integer() else value for value in row.tolist()]
    return json.dumps(values, separators=(",", ":"))
