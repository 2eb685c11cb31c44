"""What every case needs: a timer, randomness, the machine's figures, and the denominators."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from equipoise_kernels.formats import CODE, QuantizedRows, QuantizedWeight
from equipoise_kernels.fp8.bench.report import Machine
from equipoise_kernels.fp8.bench.timing import TimedCall, Timer, Timing

# Copies of a kernel's inputs, so that the next one is never in the L2 cache (60 MB).
MIN_COPIES = 4
MIN_COPIED_BYTES = 256 * 1024 * 1024
_COPY_BYTES = 4 * 1024**3
_SQUARE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The environment of a case."""

    timer: Timer
    """Times calls."""
    generator: torch.Generator
    """Random numbers on the device."""
    rng: random.Random
    """Random shapes, drawn at run time."""
    machine: Machine
    """The machine's figures, measured before the cases."""
    within_s: float = 120.0
    """Seconds that the case may take."""

    @property
    def device(self) -> torch.device:
        """Where the cases run."""
        return self.generator.device

    def measure(
        self, candidates: Mapping[str, Sequence[TimedCall]]
    ) -> tuple[dict[str, Timing], list[str]]:
        """Time the candidates that run; name those that raise."""
        able, faults = {}, []
        for name, calls in candidates.items():
            try:
                calls[0]()
            except Exception as error:  # noqa: BLE001  a library may fail in any way
                faults.append(f"{name} does not run ({type(error).__name__}: {error})")
            else:
                able[name] = calls
        return self.timer.interleaved(able), faults


def measured_machine(timer: Timer, device: torch.device) -> Machine:
    """Measure the figures that decide whether a run is valid."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    square = torch.randn(_SQUARE, _SQUARE, device=device).bfloat16()
    words, target_words = source.view(torch.int32), target.view(torch.int32)
    times = timer.interleaved(
        {
            "copy": [lambda: target.copy_(source)],
            # A kernel that reads and writes: on some cards it is faster than the driver's copy.
            "kernel": [lambda: torch.bitwise_not(words, out=target_words)],
            "bf16": [lambda: square @ square],
        }
    )
    fastest_us = min(times["copy"].median_us, times["kernel"].median_us)
    return Machine(
        copy_tb_s=2 * _COPY_BYTES / fastest_us / 1e6,
        bf16_tflops=2 * _SQUARE**3 / times["bf16"].median_us / 1e6,
    )


def num_copies(num_bytes: int) -> int:
    """How many copies to rotate through."""
    return max(MIN_COPIES, -(-MIN_COPIED_BYTES // num_bytes))


def bf16_calls(a: QuantizedRows, weights: Sequence[QuantizedWeight]) -> list[TimedCall]:
    """The same product in bfloat16 by cuBLAS."""
    rows = a.dequantized().bfloat16()
    dense = [weight.dequantized().bfloat16() for weight in weights]
    return [_product(rows, w) for w in dense]


def row_scaled_calls(a: QuantizedRows, weights: Sequence[QuantizedWeight]) -> list[TimedCall]:
    """An FP8 product with one scale per row and output: less work than ours."""
    scale_a = torch.ones(a.codes.shape[0], 1, device=a.codes.device)
    scale_b = torch.ones(1, weights[0].codes.shape[0], device=a.codes.device)
    return [_row_scaled(a.codes, weight.codes, scale_a, scale_b) for weight in weights]


def grouped_bf16_calls(
    counts: Sequence[int], slabs: Sequence[Tensor], generator: torch.Generator
) -> list[TimedCall]:
    """The same rows, packed, by torch's bfloat16 grouped product; slabs are codes [G, N, K]."""
    device = generator.device
    ends = torch.tensor(counts, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    shape = (sum(counts), slabs[0].shape[2])
    rows = torch.randn(shape, generator=generator, device=device).bfloat16()
    dense = [slab.float().bfloat16().transpose(1, 2) for slab in slabs]
    return [_grouped(rows, weight, ends) for weight in dense]


def fp8_bytes(*tensors: Tensor) -> int:
    """Bytes of tensors, each counted once."""
    assert all(tensor.dtype is CODE or tensor.dtype.is_floating_point for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _product(rows: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    return lambda: functional.linear(rows, weight)


def _row_scaled(
    rows: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor
) -> Callable[[], Tensor]:
    return lambda: torch._scaled_mm(  # noqa: SLF001  the public name takes no row scales everywhere
        rows, weight.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16
    )


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Callable[[], Tensor]:
    return lambda: functional.grouped_mm(rows, weight, offs=ends)
