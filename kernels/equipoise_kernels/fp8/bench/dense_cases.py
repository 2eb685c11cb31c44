"""Gates A1 to A5 and R6: the dense product, with many rows and with few."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from equipoise_kernels.formats import QuantizedRows, QuantizedWeight, ScaleLayout
from equipoise_kernels.fp8.bench.bench import Bench, bf16_calls, num_copies, row_scaled_calls
from equipoise_kernels.fp8.bench.checks import backend_faults, product_faults, repeat_faults
from equipoise_kernels.fp8.bench.report import Sample
from equipoise_kernels.fp8.bench.timing import TimedCall
from equipoise_kernels.fp8.gemm import dense
from equipoise_kernels.fp8.testing.cases import spread_rows, spread_weight

GemmShape = tuple[int, int, int]
Multiply = Callable[..., object]

# (N, K) of DeepSeek-V3: output projection, gate and up of the shared expert, queries, its down.
_WIDE = ((7168, 16384), (4096, 7168), (24576, 1536), (7168, 2048))
_NARROW = ((576, 7168), (2112, 7168))
_LARGE_ROWS = 4096
_FEW_ROWS = (1, 4, 16, 32, 64, 128)
# Smaller weights fit in the L2 cache too well to measure a bandwidth.
_MIN_WEIGHT_BYTES = 29_000_000


def large(bench: Bench, shapes: Sequence[GemmShape] | None = None) -> list[Sample]:
    """A1, A2 and A3."""
    fixed = [(_LARGE_ROWS, n, k) for n, k in _WIDE] if shapes is None else list(shapes)
    drawn = [(bench.rng.randrange(2048, 6000), *bench.rng.choice(_WIDE)) for _ in range(2)]
    held_out = drawn if shapes is None else []
    return [
        sample
        for shape in fixed + held_out
        for sample in _large(bench, shape, is_held_out=shape in held_out)
    ]


def few_rows(bench: Bench, shapes: Sequence[GemmShape] | None = None) -> list[Sample]:
    """A4, A5 and R6."""
    fixed = [(m, n, k) for n, k in (*_WIDE, *_NARROW) for m in _FEW_ROWS]
    drawn = [(bench.rng.randrange(2, 65), *bench.rng.choice(_WIDE)) for _ in range(4)]
    if shapes is not None:
        fixed, drawn = list(shapes), []
    return [
        sample
        for shape in fixed + drawn
        for sample in _few_rows(bench, shape, is_held_out=shape in drawn)
    ]


def _large(bench: Bench, shape: GemmShape, *, is_held_out: bool) -> list[Sample]:
    num_rows, num_columns, dim = shape
    problem = _DenseProblem(bench, shape)
    times, faults = bench.measure(
        {
            "triton": problem.calls(dense.gemm_triton),
            "bf16": bf16_calls(problem.a, problem.weights),
            "block": problem.calls(dense.GEMM_LARGE.backends["scaled_mm"]),
            "default": problem.calls(lambda a, w, *, out: dense.gemm(a, w, out=out)),
        }
    )
    tflops = {
        name: 2e-6 * num_rows * num_columns * dim / timing.median_us
        for name, timing in times.items()
    }
    spread = {f"{name}_spread": timing.spread for name, timing in times.items()}
    raw = {**{f"{name}_tflops": value for name, value in tflops.items()}, **spread}
    ratios = {"A1": ("triton", "bf16"), "A2": ("triton", "block")}
    if num_rows >= 2048 and dim >= 2048:
        ratios["A3"] = ("default", "bf16")
    wrong = {
        name: problem.faults(run, expected)
        for name, run, expected in (
            ("triton", dense.gemm_triton, "gemm_kernel"),
            ("default", lambda a, w, *, out: dense.gemm(a, w, out=out), ""),
        )
    }
    return [
        Sample(
            gate=gate,
            shape=str(shape),
            value=tflops.get(ours, float("nan")) / tflops.get(theirs, float("nan")),
            raw=raw,
            faults=[*wrong[ours], *(f for f in faults if f.split()[0] in {ours, theirs})],
            is_held_out=is_held_out,
        )
        for gate, (ours, theirs) in ratios.items()
    ]


def _few_rows(bench: Bench, shape: GemmShape, *, is_held_out: bool) -> list[Sample]:
    num_rows, num_columns, dim = shape
    problem = _DenseProblem(bench, shape)
    times, faults = bench.measure(
        {
            "triton": problem.calls(dense.gemm_triton),
            "row": row_scaled_calls(problem.a, problem.weights),
        }
    )
    raw = {f"{name}_us": timing.median_us for name, timing in times.items()}
    raw |= {f"{name}_spread": timing.spread for name, timing in times.items()}
    nothing = float("nan")
    triton_us = raw.get("triton_us", nothing)
    faults += problem.faults(dense.gemm_triton, "gemm_kernel")
    values = {"A5": triton_us / raw.get("row_us", nothing)}
    if num_rows <= 64 and num_columns * dim >= _MIN_WEIGHT_BYTES:
        values["A4"] = num_columns * dim / triton_us / 1e6 / bench.machine.copy_tb_s
    if num_rows == 1 and num_columns == _WIDE[0][0]:
        values["R6"] = bench.timer.eager_us(
            lambda: dense.gemm(problem.a, problem.weights[0], out=problem.outs[0])
        )
    return [
        Sample(
            gate=gate,
            shape=str(shape),
            value=value,
            raw=raw,
            faults=faults if gate == "A5" else [f for f in faults if not f.startswith("row ")],
            is_held_out=is_held_out,
        )
        for gate, value in values.items()
    ]


class _DenseProblem:
    """Rows, copies of weights, and a poisoned output for each."""

    def __init__(self, bench: Bench, shape: GemmShape) -> None:
        num_rows, num_columns, dim = shape
        self._timer = bench.timer
        self.a: QuantizedRows = spread_rows(
            (num_rows, dim), bench.generator, layout=ScaleLayout.MN_ALIGNED
        )
        self.weights: list[QuantizedWeight] = [
            spread_weight((num_columns, dim), bench.generator)
            for _ in range(num_copies(num_columns * dim))
        ]
        self.outs: list[Tensor] = [
            torch.full(
                (num_rows, num_columns), float("nan"), dtype=torch.bfloat16, device=bench.device
            )
            for _ in self.weights
        ]

    def calls(self, multiply: Multiply) -> list[TimedCall]:
        """One call per copy."""
        return [
            lambda w=w, out=out: multiply(self.a, w, out=out)  # type: ignore[misc]
            for w, out in zip(self.weights, self.outs, strict=True)
        ]

    def faults(self, multiply: Multiply, kernel: str) -> list[str]:
        """Return the faults of a way to multiply, on poisoned outputs; `kernel` must have run."""
        calls = self.calls(multiply)
        for out in self.outs:
            out.fill_(float("nan"))
        try:
            self._timer.interleaved({"checked": calls})
            found = repeat_faults(calls[0], self.outs[0])
            for place in (0, len(calls) - 1):
                found += product_faults(self.outs[place], self.a, self.weights[place])
            return found + (backend_faults(self._timer.kernel_names(calls[0]), kernel))
        except Exception as error:  # noqa: BLE001  record the failure and continue
            return [f"{type(error).__name__}: {error}"]
