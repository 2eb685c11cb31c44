"""Triton's interpreter with correct casts between floating-point formats.

The interpreter of Triton 3.6 (and 3.9) rounds float32 to E4M3 and bfloat16 incorrectly: carries out
of the mantissa are lost, and numbers beyond the largest become NaN. This replaces its conversion
routine by `ml_dtypes` with the GPU's rules: round to nearest even, and saturate to E4M3. It also
computes products of bfloat16 numbers, whose bits the interpreter would multiply, in float32, and
keeps a broadcast comparison of two scalars boolean, the only type that 3.9 accepts for masks.
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
    """Correct the interpreter's casts within a `with` block."""
    original = interpreter._convert_float  # noqa: SLF001  there is no public place for it

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name not in _FORMATS or target.name not in _FORMATS or _truncates(rounding):
            return original(values, source, target, rounding)
        return cast(values, source.name, target.name)

    builder = interpreter.InterpreterBuilder
    original_dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return original_dot(self, _without_bf16(a), _without_bf16(b), *others)

    original_splat = builder.create_splat

    def create_splat(self: Any, kind: Any, scalar: Any) -> Any:
        spread = original_splat(self, kind, scalar)
        if scalar.data.dtype != np.bool_:
            return spread
        return interpreter.TensorHandle(spread.data.astype(np.bool_), interpreter.tl.int1)

    interpreter._convert_float = convert  # noqa: SLF001
    builder.create_dot = create_dot
    builder.create_splat = create_splat
    try:
        yield
    finally:
        interpreter._convert_float = original  # noqa: SLF001
        builder.create_dot = original_dot
        builder.create_splat = original_splat


def cast(values: Any, source: str, target: str) -> Any:
    """Bits of values, an unsigned array of the same shape, from bits or values of `source`."""
    numbers = np.frombuffer(values.tobytes(), dtype=_FORMATS[source]).astype(np.float32)
    if target == "fp8e4nv":
        numbers = np.clip(numbers, -_E4M3_MAX, _E4M3_MAX)
    with np.errstate(over="ignore", invalid="ignore"):
        converted = numbers.astype(_FORMATS[target])
    bits = np.dtype(f"uint{8 * converted.dtype.itemsize}")
    return converted.view(bits).reshape(values.shape)


def _without_bf16(handle: Any) -> Any:
    """Convert bfloat16 to float32; return other arrays unchanged."""
    if handle.dtype.scalar.name != "bf16":
        return handle
    values = cast(handle.data, "bf16", "fp32").view(np.float32)
    return interpreter.TensorHandle(values, interpreter.tl.float32)


def _truncates(rounding: Any) -> bool:
    return rounding is not None and "RTZ" in str(rounding)
