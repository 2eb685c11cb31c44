"""Gates D1 to D3: attention of decode, with many heads, with few, and over one long sequence."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise_kernels.fp8.bench.bench import Bench
from equipoise_kernels.fp8.bench.checks import backend_faults, repeat_faults, result_faults
from equipoise_kernels.fp8.bench.mla_inputs import HEADS, MlaInputs, mla_inputs
from equipoise_kernels.fp8.bench.report import Sample

# Heads of a rank that shares them with seven others.
_FEW_HEADS = 16
_QUERIES, _LENGTH = 128, 4096
_LONG = 65536
_MAX_SUM_DIFFERENCE = 1e-2


def attention(
    bench: Bench,
    *,
    lengths: Sequence[Sequence[int]] | None = None,
    long: int = _LONG,
    heads: tuple[int, int] = (HEADS, _FEW_HEADS),
) -> list[Sample]:
    """Measure D1 and D2 on many sequences, and D3 on a long one.

    Args:
        bench: the environment.
        lengths: of the sequences of each shape; by default the fixed shape and a drawn one.
        long: positions of the long sequence.
        heads: many and few.
    """
    if lengths is None:
        drawn = (bench.rng.randrange(48, 160), bench.rng.randrange(1024, 6144))
        lengths = [_uneven(bench, _QUERIES, _LENGTH), _uneven(bench, *drawn)]
    many, few = heads
    samples, rates = [], []
    for place, shape in enumerate(lengths):
        samples.append(_sample(bench, "D1", shape, num_heads=many, is_held_out=place > 0))
        samples.append(_sample(bench, "D2", shape, num_heads=few, is_held_out=place > 0))
        rates.append(samples[-1].raw["tb_s"])
    return [*samples, _sample(bench, "D3", [long], num_heads=few, rate_tb_s=rates[0])]


def _uneven(bench: Bench, num_queries: int, longest: int) -> list[int]:
    """Lengths drawn uniformly from half the longest to the longest."""
    return [bench.rng.randint(longest // 2, longest) for _ in range(num_queries)]


def _sample(
    bench: Bench,
    gate: str,
    lengths: Sequence[int],
    *,
    num_heads: int,
    is_held_out: bool = False,
    rate_tb_s: float = float("nan"),
) -> Sample:
    """Measure one shape; D3 is compared with `rate_tb_s`, the rate of D2's fixed shape."""
    inputs = mla_inputs(lengths, bench.generator, num_heads=num_heads)
    calls = inputs.calls()
    timing = bench.timer.interleaved({"mla_decode": calls})["mla_decode"]
    # The timed run's own outputs are checked.
    faults = _result_faults(inputs, len(calls) - 1)
    faults += repeat_faults(calls[0], inputs.outs[0].out_BHR)
    faults += backend_faults(bench.timer.kernel_names(calls[0]), "mla_decode_kernel")
    tflops = inputs.flop / timing.median_us / 1e6
    tb_s = inputs.cache_bytes / timing.median_us / 1e6
    values = {
        "D1": tflops / bench.machine.bf16_tflops,
        "D2": tb_s / bench.machine.copy_tb_s,
        "D3": rate_tb_s / tb_s,
    }
    return Sample(
        gate=gate,
        shape=f"B={len(lengths)} S={max(lengths)} H={num_heads}",
        value=values[gate],
        raw={"us": timing.median_us, "spread": timing.spread, "tflops": tflops, "tb_s": tb_s},
        faults=faults,
        is_held_out=is_held_out,
    )


def _result_faults(inputs: MlaInputs, place: int) -> list[str]:
    """Return the faults of one call's outputs, against float64."""
    out, (exact_BHR, sums_BH) = inputs.outs[place], inputs.exact(place)
    faults = result_faults(out.out_BHR.flatten(0, 1), exact_BHR.flatten(0, 1))
    apart = float((out.lse_BH.double() - sums_BH).abs().max())
    if not apart < _MAX_SUM_DIFFERENCE:
        faults.append(f"a logarithm of a sum is {apart:.1e} away from float64")
    return faults
