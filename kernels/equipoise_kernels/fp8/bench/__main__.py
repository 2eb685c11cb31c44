"""Check and time the kernels on this machine's GPU, and write a report.

python -m equipoise_kernels.fp8.bench [--out FILE] [--only A4 B1 ...] [--budget-s 460]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.bench import (
    all_to_all_cases,
    dense_cases,
    grouped_cases,
    layer_cases,
    mla_cases,
    moe_cases,
    process_cases,
    quant_cases,
)
from equipoise_kernels.fp8.bench.bench import Bench, measured_machine
from equipoise_kernels.fp8.bench.report import GATES, Sample, as_json, as_text, has_passed, judge
from equipoise_kernels.fp8.bench.timing import GraphTimer
from equipoise_kernels.fp8.jit import is_interpreting, triton_version
from equipoise_kernels.fp8.self_test import HOPPER, start_process

NO_DEVICE = 2

Cases = Callable[[Bench], list[Sample]]

CASES: Mapping[tuple[str, ...], Cases] = {
    ("A4", "A5", "R6"): dense_cases.few_rows,
    ("B1",): grouped_cases.masked,
    ("B2",): grouped_cases.loaded,
    ("F2",): grouped_cases.flipped_map,
    ("C1",): quant_cases.many_rows,
    ("C2",): quant_cases.few_rows,
    ("C3",): moe_cases.routing,
    ("C4",): moe_cases.moving,
    ("D1", "D2", "D3"): mla_cases.attention,
    ("F1",): layer_cases.decode_layer,
    ("A1", "A2", "A3"): dense_cases.large,
    ("E2",): all_to_all_cases.few_tokens,
    ("E1",): all_to_all_cases.many_tokens,
    ("B3", "B4"): grouped_cases.flat,
    ("E3",): process_cases.processes,
}
# B5 is measured with these.
_BESIDE = {"B5": ("B1", "B2")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 0 if every gate that ran passed, 1 if not, 2 without a GPU."""
    options = _parsed(arguments)
    reason = why_not_here()
    if reason:
        sys.stderr.write(f"bench-gpu: {reason}; nothing was measured and nothing written\n")
        return NO_DEVICE
    report = run(only=options.only, budget_s=options.budget_s)
    out = options.out or Path("benchmarks") / f"{report['device']}_{report['date'][:10]}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(f"{as_text(report)}\nwritten to {out}\n")
    return int(not has_passed(report))


def why_not_here() -> str | None:
    """Return why this machine cannot run the benchmark, or None."""
    if is_interpreting():
        return "TRITON_INTERPRET is set: unset it"
    if not torch.cuda.is_available():
        return "there is no CUDA GPU here: run it on a machine with an H200 (or another Hopper GPU)"
    if torch.cuda.get_device_capability() != HOPPER:
        return f"{torch.cuda.get_device_name()} is not a Hopper GPU, which the kernels require"
    return None if triton_version() else "triton is not installed: install the extra `kernels`"


def run(*, only: Sequence[str], budget_s: float) -> dict[str, Any]:
    """Measure on the current GPU, gate by gate until the budget is spent."""
    start = time.monotonic()
    selection = start_process()
    seed = int.from_bytes(os.urandom(4))
    timer = GraphTimer()
    bench = Bench(
        timer=timer,
        generator=torch.Generator(device="cuda").manual_seed(seed),
        rng=random.Random(seed),  # noqa: S311  shapes, not secrets
        machine=measured_machine(timer, torch.device("cuda")),
    )
    wanted = {gate for name in only for gate in _BESIDE.get(name, (name,))}
    samples, skipped = collected(
        bench, wanted=wanted, has_time=lambda: time.monotonic() - start < budget_s
    )
    context = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": configurations.device_name(),
        "seed": seed,
        "seconds": round(time.monotonic() - start, 1),
        "out_of_time": skipped,
        "selection": dict(selection.backends),
        "obstacles": dict(selection.obstacles),
        "versions": versions(),
    }
    judgements = [
        judge(gate, [s for s in samples if s.gate == gate.name]) for gate in GATES.values()
    ]
    return as_json(judgements, machine=bench.machine, context=context)


def collected(
    bench: Bench,
    *,
    wanted: set[str],
    has_time: Callable[[], bool],
    cases: Mapping[tuple[str, ...], Cases] = CASES,
) -> tuple[list[Sample], list[str]]:
    """Return samples of the wanted gates (default: all), and the gates that time ran out for."""
    samples: list[Sample] = []
    skipped: list[str] = []
    for names, measure in cases.items():
        if wanted and not wanted.intersection(names):
            continue
        if not has_time():
            skipped += names
            continue
        try:
            samples += measure(bench)
        except Exception as error:  # noqa: BLE001  one broken case must not hide the others
            fault = f"{type(error).__name__}: {error}"
            samples += [
                Sample(gate=name, shape="all", value=float("nan"), faults=[fault]) for name in names
            ]
    return samples, skipped


def versions() -> dict[str, str | None]:
    """Versions of everything that affects the figures."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version(),
    }


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-gpu", description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write the report (JSON)")
    parser.add_argument("--only", nargs="+", choices=sorted(GATES), default=[], help="gates to run")
    parser.add_argument("--budget-s", type=float, default=460.0, help="start no case after this")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
