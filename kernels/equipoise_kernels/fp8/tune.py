"""Choose the kernels' configurations on this machine's GPU, and write the files to commit.

    python -m equipoise_kernels.fp8.tune [--only gemm ...]

Times every configuration of an operation's space that compiles without violations
(`testing.gates`), on DeepSeek-V3's shapes, at the largest number of rows of each bucket. Serving
never tunes: it reads the files.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import torch

from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.bench.__main__ import NO_DEVICE, versions, why_not_here
from equipoise_kernels.fp8.bench.report import NOISE
from equipoise_kernels.fp8.bench.timing import GraphTimer, TimedCall, Timer
from equipoise_kernels.fp8.configurations import Entry
from equipoise_kernels.fp8.jit import triton_version
from equipoise_kernels.fp8.self_test import start_process
from equipoise_kernels.fp8.testing.committed import TUNABLES, specializations
from equipoise_kernels.fp8.tune_plans import PLANS, TuningPlan, TuningShape

# Candidates whose times differ by less are equally fast.
_EQUAL = 0.01


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune; return 0 after writing the files, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="tune", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(PLANS), default=sorted(PLANS))
    options = parser.parse_args(arguments)
    reason = why_not_here()
    if reason:
        sys.stderr.write(f"tune: {reason}; the committed configurations stay as they are\n")
        return NO_DEVICE
    start_process()
    generator = torch.Generator(device="cuda").manual_seed(int.from_bytes(os.urandom(4)))
    for operation in options.only:
        candidates = sound_configs(operation)
        entries = tuned(PLANS[operation], candidates, timer=GraphTimer(), generator=generator)
        path = configurations.path_of(
            operation, device=configurations.device_name(), triton=triton_version() or ""
        )
        configurations.write(path, entries, origin=_origin())
        sys.stdout.write(f"{path}: {len(entries)} entries from {len(candidates)} configurations\n")
    return 0


def sound_configs(operation: str) -> list[Any]:
    """The configurations of an operation's space whose machine code has no violations.

    Where `ctas_per_sm` is not part of the search, it becomes what the compiled kernel allows.
    """
    # Needs the compiler, which a machine without Triton lacks; `main` has checked.
    from equipoise_kernels.fp8.testing.codegen import compile_for_hopper  # noqa: PLC0415
    from equipoise_kernels.fp8.testing.gates import violations  # noqa: PLC0415

    found = []
    for config in TUNABLES[operation].configs:
        kernels = specializations(operation, config)
        codes = [compile_for_hopper(kernel) for kernel in kernels]
        pairs = zip(kernels, codes, strict=True)
        if not any(violations(kernel, code) for kernel, code in pairs):
            fitting = codes[0].ctas_per_sm
            found.append(replace(config, ctas_per_sm=fitting) if operation == "gemm" else config)
    assert found, f"no configuration of {operation} compiles without violations"
    return found


def tuned(
    plan: TuningPlan, candidates: Sequence[Any], *, timer: Timer, generator: torch.Generator
) -> list[Entry]:
    """Entries of a file: per bucket, shapes that differ from the best for all, then the default."""
    entries = []
    for bucket in plan.buckets:
        times = {
            shape: _times(plan.problem(bucket, shape, generator), candidates, timer)
            for shape in plan.shapes
        }
        entries += best_entries(
            times, candidates, max_rows=None if bucket == plan.buckets[-1] else bucket
        )
    return entries


def best_entries(
    times_us: Mapping[TuningShape, Sequence[float]],
    candidates: Sequence[Any],
    *,
    max_rows: int | None,
) -> list[Entry]:
    """The entries of one bucket, from each candidate's times on each shape.

    The default has the smallest product of times, so that every shape has the same weight. A shape
    has its own entry if that gains more than two runs of one configuration differ, and of equally
    fast candidates the first, so that few kernels are compiled.
    """
    logs = torch.tensor(list(times_us.values()), dtype=torch.float64).log().sum(dim=0)
    default = int(logs.argmin())
    shapes_of: dict[int, list[TuningShape]] = {}
    for shape, row in times_us.items():
        best = next(n for n, time_us in enumerate(row) if time_us <= min(row) * (1 + _EQUAL))
        if row[best] < row[default] * (1 - NOISE):
            shapes_of.setdefault(best, []).append(shape)
    special = [
        Entry(max_rows=max_rows, shapes=tuple(shapes), config=asdict(candidates[best]))
        for best, shapes in shapes_of.items()
    ]
    return [*special, Entry(max_rows=max_rows, config=asdict(candidates[default]))]


def _times(
    launches: Callable[[Any], list[TimedCall]], candidates: Sequence[Any], timer: Timer
) -> list[float]:
    """Median microseconds of each candidate; infinity for one that does not run."""
    times = []
    for config in candidates:
        try:
            calls = launches(config)
            calls[0]()
            times.append(timer.interleaved({"tuned": calls})["tuned"].median_us)
        except RuntimeError:
            times.append(float("inf"))
    return times


def _origin() -> dict[str, str]:
    made_with = ", ".join(f"{name} {version}" for name, version in versions().items())
    return {"from": f"make tune ({made_with})", "measured": datetime.now(UTC).date().isoformat()}


if __name__ == "__main__":
    sys.exit(main())
