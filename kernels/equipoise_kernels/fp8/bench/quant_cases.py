"""Gates C1 and C2: the quantisation family, with many rows and with few."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from equipoise_kernels.formats import QuantizedRows, ScaleFormat, ScaleLayout, empty_rows
from equipoise_kernels.fp8.bench.bench import Bench, fp8_bytes, num_copies
from equipoise_kernels.fp8.bench.checks import backend_faults, result_faults
from equipoise_kernels.fp8.bench.report import Sample
from equipoise_kernels.fp8.quant.group_quant import GROUP_QUANT
from equipoise_kernels.fp8.quant.rms_norm_quant import RMS_NORM_QUANT
from equipoise_kernels.fp8.quant.silu_mul_quant import SILU_MUL_QUANT
from equipoise_kernels.fp8.testing.cases import spread_normal

Quantize = Callable[[Tensor, QuantizedRows], None]

_HIDDEN = 7168
_EXPERT_HIDDEN = 2048
_MANY_ROWS = 4096
_FEW_ROWS = 128


def many_rows(bench: Bench, num_rows: int = _MANY_ROWS, dim: int = _HIDDEN) -> list[Sample]:
    """C1: bytes per second."""
    return _every_operation(bench, "C1", num_rows, dim)


def few_rows(bench: Bench, num_rows: int = _FEW_ROWS, dim: int = _HIDDEN) -> list[Sample]:
    """C2: microseconds."""
    return _every_operation(bench, "C2", num_rows, dim)


def _every_operation(bench: Bench, gate: str, num_rows: int, dim: int) -> list[Sample]:
    weight = torch.rand(dim, generator=bench.generator, device=bench.device).bfloat16()
    return [
        _sample(bench, gate, "group_quant", (num_rows, dim), dim, _group_quant),
        _sample(bench, gate, "rms_norm_quant", (num_rows, dim), dim, _rms_norm_quant(weight)),
        _sample(
            bench,
            gate,
            "silu_mul_quant",
            (num_rows, 2 * min(dim, _EXPERT_HIDDEN)),
            min(dim, _EXPERT_HIDDEN),
            _silu_mul_quant,
        ),
    ]


def _sample(
    bench: Bench,
    gate: str,
    name: str,
    shape: tuple[int, int],
    out_dim: int,
    run: Callable[[str], Quantize],
) -> Sample:
    copies = range(num_copies(2 * shape[0] * shape[1]))
    inputs = [spread_normal(shape, bench.generator).clamp(-50, 50) for _ in copies]
    outs = [_poisoned(bench, (shape[0], out_dim)) for _ in copies]
    calls = _calls(run("triton"), inputs, outs)
    timing = bench.timer.interleaved({name: calls})[name]
    wanted = _poisoned(bench, (shape[0], out_dim))
    run("reference")(inputs[-1], wanted)
    faults = result_faults(outs[-1].dequantized(), wanted.dequantized().double())
    faults += backend_faults(bench.timer.kernel_names(calls[0]), f"{name}_kernel")
    rate = fp8_bytes(inputs[0], outs[0].codes, outs[0].scales) / timing.median_us / 1e6
    return Sample(
        gate=gate,
        shape=f"{name} {shape}",
        value=rate / bench.machine.copy_tb_s if gate == "C1" else timing.median_us,
        raw={"us": timing.median_us, "spread": timing.spread, "tb_s": rate},
        faults=faults,
    )


def _calls(
    run: Quantize, inputs: Sequence[Tensor], outs: Sequence[QuantizedRows]
) -> list[Callable[[], None]]:
    return [
        lambda x=x, out=out: run(x, out)  # type: ignore[misc]
        for x, out in zip(inputs, outs, strict=True)
    ]


def _poisoned(bench: Bench, shape: tuple[int, int]) -> QuantizedRows:
    out = empty_rows(shape, device=bench.device, layout=ScaleLayout.MN_ALIGNED)
    out.codes.view(torch.uint8).fill_(0xFF)
    out.scales.fill_(float("nan"))
    return out


def _group_quant(backend: str) -> Quantize:
    run = GROUP_QUANT.backends[backend]
    return lambda x, out: run(x, scale_format=ScaleFormat.FP32, out=out)


def _rms_norm_quant(weight: Tensor) -> Callable[[str], Quantize]:
    def choose(backend: str) -> Quantize:
        run = RMS_NORM_QUANT.backends[backend]
        return lambda x, out: run(
            x, weight, eps=1e-6, residual_MD=None, scale_format=ScaleFormat.FP32, out=out
        )

    return choose


def _silu_mul_quant(backend: str) -> Quantize:
    run = SILU_MUL_QUANT.backends[backend]
    return lambda x, out: run(x, rows_per_group=None, scale_format=ScaleFormat.FP32, out=out)
