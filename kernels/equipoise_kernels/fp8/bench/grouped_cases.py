"""Gates B1 to B5 and F2: the grouped product in its three schedules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equipoise_kernels.formats import QuantizedRows, QuantizedWeight
from equipoise_kernels.fp8.bench.bench import Bench, grouped_bf16_calls
from equipoise_kernels.fp8.bench.checks import backend_faults, product_faults, repeat_faults
from equipoise_kernels.fp8.bench.report import Sample
from equipoise_kernels.fp8.bench.timing import TimedCall
from equipoise_kernels.fp8.gemm import dense
from equipoise_kernels.fp8.gemm.grouped import grouped_gemm_triton
from equipoise_kernels.fp8.gemm.schedule import (
    GROUP_ALIGNMENT,
    ContiguousRows,
    MaskedRows,
    PrefixSumRows,
    Schedule,
)
from equipoise_kernels.fp8.testing.cases import spread_rows, spread_slab, spread_weight

# (N, K) of an expert's gate and up, and of its down projection.
_EXPERT = ((4096, 7168), (7168, 2048))
_CAPACITY = 1024
_MAPS = 4
_ZIPF = 1.2
_KERNEL = "grouped_gemm_kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Rows of each group, and the weights' (N, K)."""

    counts: tuple[int, ...]
    num_columns: int
    dim: int
    is_held_out: bool = False

    def __str__(self) -> str:
        return (
            f"G={len(self.counts)} rows={sum(self.counts)} max={max(self.counts)} "
            f"N={self.num_columns} K={self.dim}"
        )

    @property
    def flop(self) -> int:
        """Useful operations; padding does not count."""
        return 2 * sum(self.counts) * self.num_columns * self.dim

    @property
    def unique_bytes(self) -> int:
        """Codes of groups with rows, rows and bfloat16 outputs, each once."""
        weights = sum(count > 0 for count in self.counts) * self.num_columns * self.dim
        return weights + sum(self.counts) * (self.dim + 2 * self.num_columns)


def masked(bench: Bench, loads: Sequence[RowCounts] | None = None) -> list[Sample]:
    """B1 and its share of B5."""
    if loads is None:
        fixed = [_around(bench, *case) for case in itertools.product(_GROUPS_AND_ROWS, _EXPERT)]
        drawn = [
            replace(
                _around(bench, (bench.rng.randrange(6, 40), bench.rng.randrange(4, 48)), shape),
                is_held_out=True,
            )
            for shape in (*_EXPERT, *_EXPERT)
        ]
        loads = fixed + drawn
    return [sample for load in loads for sample in _masked(bench, load, gate="B1")]


def loaded(bench: Bench, loads: Sequence[RowCounts] | None = None) -> list[Sample]:
    """B2 and its share of B5: even and with one hot expert."""
    if loads is None:
        loads = [
            RowCounts(counts=counts, num_columns=n, dim=k)
            for counts in ((128,) * 8, (512, *(8,) * 7))
            for n, k in _EXPERT
        ]
    return [sample for load in loads for sample in _masked(bench, load, gate="B2")]


def flat(bench: Bench, loads: Sequence[RowCounts] | None = None) -> list[Sample]:
    """B3 and B4: both flat schedules against a dense product, and uneven groups against even."""
    even_cases = loads
    if even_cases is None:
        even_cases = [
            RowCounts(counts=_jittered(bench, *case), num_columns=n, dim=k)
            for case in ((4, 8192), (8, 4096))
            for n, k in _EXPERT
        ]
    samples = [
        _against_dense(bench, load, kind)
        for load in even_cases
        for kind in (ContiguousRows, PrefixSumRows)
    ]
    if loads is None:
        samples += [_against_even(bench, n, k) for n, k in _EXPERT]
    return samples


def flipped_map(bench: Bench, load: RowCounts | None = None) -> list[Sample]:
    """F2: one captured graph serves two layouts, without a new capture."""
    load = load or RowCounts(counts=(16,) * 8, num_columns=4096, dim=7168)
    problem = _GroupedProblem(bench, load, MaskedRows)
    slots, out = problem.maps[0].clone(), problem.out
    call = problem.call(slots)
    if bench.device.type == "cuda":
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    faults: list[str] = []
    for turn in range(4):
        slots.copy_(problem.maps[turn % 2])
        for _ in range(10):
            call()
        faults += problem.product_faults(slots)
        fresh = out.clone()
        problem.call(slots.clone())()
        if not torch.equal(fresh.view(torch.uint8), out.view(torch.uint8)):
            faults.append(f"turn {turn}: the graph's bits differ from a fresh launch's")
    return [Sample(gate="F2", shape=str(load), value=0.0 if faults else 1.0, faults=faults)]


_GROUPS_AND_ROWS = ((8, 16), (32, 20), (36, 32))


def _around(bench: Bench, groups_and_rows: tuple[int, int], shape: tuple[int, int]) -> RowCounts:
    """Groups with rows drawn uniformly from 0 to twice the mean."""
    num_groups, mean = groups_and_rows
    counts = [bench.rng.randint(0, 2 * mean) for _ in range(num_groups)]
    counts[0] = max(counts[0], 1)
    return RowCounts(counts=tuple(counts), num_columns=shape[0], dim=shape[1])


def _jittered(bench: Bench, num_groups: int, rows: int) -> tuple[int, ...]:
    return tuple(round(rows * bench.rng.uniform(0.7, 1.3)) for _ in range(num_groups))


def _masked(bench: Bench, load: RowCounts, *, gate: str) -> list[Sample]:
    problem = _GroupedProblem(bench, load, MaskedRows)
    times, faults = bench.measure(
        {
            "triton": [problem.call(slots) for slots in problem.maps],
            "grouped_mm": grouped_bf16_calls(load.counts, problem.slabs(), bench.generator),
        }
    )
    raw = {f"{name}_us": timing.median_us for name, timing in times.items()}
    raw |= {f"{name}_spread": timing.spread for name, timing in times.items()}
    triton_us = raw.get("triton_us", float("nan"))
    memory_us = load.unique_bytes / bench.machine.copy_tb_s / 1e6
    compute_us = load.flop / (2 * bench.machine.bf16_tflops) / 1e6
    ours = problem.faults()
    bound_us = max(memory_us, compute_us)
    value = memory_us / triton_us if gate == "B1" else triton_us / bound_us
    shared = {"shape": f"masked {load}", "raw": raw, "is_held_out": load.is_held_out}
    return [
        Sample(gate=gate, value=value, faults=ours, **shared),  # type: ignore[arg-type]
        Sample(
            gate="B5",
            value=triton_us / raw.get("grouped_mm_us", float("nan")),
            faults=[*ours, *faults],
            **shared,  # type: ignore[arg-type]
        ),
    ]


def _against_dense(
    bench: Bench, load: RowCounts, kind: type[ContiguousRows | PrefixSumRows]
) -> Sample:
    """B3: useful operations per second, against the dense kernel with as many rows."""
    problem = _GroupedProblem(bench, load, kind)
    a = spread_rows((sum(load.counts), load.dim), bench.generator)
    weight = spread_weight((load.num_columns, load.dim), bench.generator)
    out = torch.empty(sum(load.counts), load.num_columns, dtype=torch.bfloat16, device=bench.device)
    times, faults = bench.measure(
        {
            "grouped": [problem.call(slots) for slots in problem.maps],
            "dense": [lambda: dense.gemm_triton(a, weight, out=out)],
        }
    )
    raw = {f"{name}_us": timing.median_us for name, timing in times.items()}
    nothing = float("nan")
    return Sample(
        gate="B3",
        shape=f"{kind.__name__} {load}",
        value=raw.get("dense_us", nothing) / raw.get("grouped_us", nothing),
        raw=raw,
        faults=[*faults, *problem.faults()],
    )


def _against_even(bench: Bench, num_columns: int, dim: int, num_rows: int = 32768) -> Sample:
    """B4: groups by Zipf's law against even ones."""
    weights = [1 / (rank + 1) ** _ZIPF for rank in range(32)]
    uneven = tuple(max(1, round(num_rows * w / sum(weights))) for w in weights)
    loads = {"zipf": uneven, "even": (num_rows // 32,) * 32}
    problems = {
        name: _GroupedProblem(
            bench, RowCounts(counts=c, num_columns=num_columns, dim=dim), PrefixSumRows
        )
        for name, c in loads.items()
    }
    times, faults = bench.measure(
        {name: [p.call(slots) for slots in p.maps] for name, p in problems.items()}
    )
    tflops = {
        name: problems[name].load.flop / timing.median_us / 1e6 for name, timing in times.items()
    }
    nothing = float("nan")
    return Sample(
        gate="B4",
        shape=f"Zipf {problems['zipf'].load}",
        value=tflops.get("zipf", nothing) / tflops.get("even", nothing),
        raw={f"{name}_tflops": value for name, value in tflops.items()},
        faults=[*faults, *problems["zipf"].faults()],
    )


class _GroupedProblem:
    """Rows in a schedule, a slab, and disjoint slot maps that rotate through it."""

    def __init__(self, bench: Bench, load: RowCounts, kind: type[Schedule]) -> None:
        self.load, self._timer, self._device = load, bench.timer, bench.device
        num_groups = len(load.counts)
        num_slots = _MAPS * num_groups
        order = bench.rng.sample(range(num_slots), num_slots)
        self.maps: list[Tensor] = [
            self._int32(order[i * num_groups : (i + 1) * num_groups]) for i in range(_MAPS)
        ]
        self.weight: QuantizedWeight = spread_slab(
            num_slots, (load.num_columns, load.dim), bench.generator
        )
        self.schedule, shape, self._places = self._layout(kind)
        self.a: QuantizedRows = spread_rows((*shape, load.dim), bench.generator)
        self.out: Tensor = torch.full(
            (*shape, load.num_columns), float("nan"), dtype=torch.bfloat16, device=bench.device
        )

    def call(self, slots: Tensor) -> TimedCall:
        """Launch with a slot map."""
        return lambda: grouped_gemm_triton(
            self.a, self.weight, slots, schedule=self.schedule, out=self.out
        )

    def slabs(self) -> list[Tensor]:
        """Codes of each slot map's weights, in its order."""
        return [self.weight.codes.view(torch.uint8)[m.long()].view(self.weight.codes.dtype)
                for m in self.maps]  # fmt: skip

    def faults(self) -> list[str]:
        """Return the faults of launches on a poisoned output."""
        self.out.fill_(float("nan"))
        call = self.call(self.maps[-1])
        self._timer.interleaved({"checked": [call]})
        found = self.product_faults(self.maps[-1])
        valid = sum(self.load.counts) * self.load.num_columns
        if int((~self.out.isnan()).sum()) != valid:
            found.append("rows of no group were written")
        found += repeat_faults(call, self.out)
        return found + backend_faults(self._timer.kernel_names(call), _KERNEL)

    def product_faults(self, slots: Tensor) -> list[str]:
        """Compare each group with float64."""
        found = []
        for group, (index, slot) in enumerate(zip(self._places, slots.tolist(), strict=True)):
            if self.load.counts[group] > 0:
                rows = QuantizedRows(codes=self.a.codes[index], scales=self.a.scales[index])
                weight = QuantizedWeight(
                    codes=self.weight.codes[slot], scales=self.weight.scales[slot]
                )
                label = f"group {group}: "
                found += product_faults(self.out[index], rows, weight, label=label)
        return found

    def _layout(self, kind: type[Schedule]) -> tuple[Schedule, tuple[int, ...], list[Any]]:
        """A schedule of the load, the shape before columns, and each group's rows."""
        counts = self.load.counts
        if kind is MaskedRows:
            mean = -(-sum(counts) // len(counts))
            schedule = MaskedRows(rows_of_group=self._int32(counts), expected_rows=mean)
            places: list[Any] = [(g, slice(0, count)) for g, count in enumerate(counts)]
            return schedule, (len(counts), max(_CAPACITY, *counts)), places
        padded = [-(-count // GROUP_ALIGNMENT) * GROUP_ALIGNMENT for count in counts]
        starts = [0, *itertools.accumulate(padded)]
        ends = [start + count for start, count in zip(starts, counts, strict=False)]
        spans = [slice(start, end) for start, end in zip(starts, ends, strict=False)]
        if kind is PrefixSumRows:
            return PrefixSumRows(group_ends=self._int32(ends)), (starts[-1],), list(spans)
        ids = torch.full((starts[-1],), -1, dtype=torch.int32, device=self._device)
        for group, span in enumerate(spans):
            ids[span] = group
        return ContiguousRows(group_of_row=ids), (starts[-1],), list(spans)

    def _int32(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)
