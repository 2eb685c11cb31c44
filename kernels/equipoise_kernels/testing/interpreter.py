"""Triton's interpreter with right casts between floating-point formats.

The interpreter of Triton 3.6 (and 3.9) rounds float32 to E4M3 and bfloat16 wrongly: carries out of
the mantissa are lost, numbers beyond the largest become NaN. Here its one conversion routine gives
way to `ml_dtypes`, with the GPU's rules: to nearest even, and E4M3 saturates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
from triton.runtime import interpreter

_FORMATS: dict[str, Any] = {
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e5": ml_dtypes.float8_e5m2,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp32": np.float32,
}
_E4M3_MAX = 448.0


@contextmanager
def corrected_casts() -> Iterator[None]:
    """Correct the interpreter's casts for the duration of a `with`."""
    original = interpreter._convert_float  # noqa: SLF001  there is no public place for it

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name not in _FORMATS or target.name not in _FORMATS or _truncates(rounding):
            return original(values, source, target, rounding)
        return cast(values, source.name, target.name)

    interpreter._convert_float = convert  # noqa: SLF001
    try:
        yield
    finally:
        interpreter._convert_float = original  # noqa: SLF001


def cast(values: Any, source: str, target: str) -> Any:
    """Bits of values, an unsigned array of the same shape, from bits or values of `source`."""
    numbers = np.frombuffer(values.tobytes(), dtype=_FORMATS[source]).astype(np.float32)
    if target == "fp8e4nv":
        numbers = np.clip(numbers, -_E4M3_MAX, _E4M3_MAX)
    with np.errstate(over="ignore", invalid="ignore"):
        converted = numbers.astype(_FORMATS[target])
    bits = np.dtype(f"uint{8 * converted.dtype.itemsize}")
    return converted.view(bits).reshape(values.shape)


def _truncates(rounding: Any) -> bool:
    return rounding is not None and "RTZ" in str(rounding)
