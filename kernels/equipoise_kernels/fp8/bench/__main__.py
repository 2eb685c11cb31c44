"""Check and time the kernels on this machine's GPU, and write a report.

python -m equipoise_kernels.fp8.bench [--out FILE] [--only A4 B1 ...] [--budget-s 380]

Needs no network and nobody's attention: every case is a process with a bound, and the report is
written after each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.bench.case import CASES, CaseInput, CaseOutput, CaseRunner
from equipoise_kernels.fp8.bench.clocks import read_clocks
from equipoise_kernels.fp8.bench.report import (
    GATES,
    Machine,
    Sample,
    as_json,
    as_text,
    has_passed,
    judge,
)
from equipoise_kernels.fp8.jit import is_interpreting, triton_version
from equipoise_kernels.fp8.self_test import HOPPER

NO_DEVICE = 2
RESULTS = Path("results") / "gpu"

# B5 is measured with these.
_BESIDE = {"B5": ("B1", "B2")}
# No case is worth more of the budget, with an empty cache of compiled kernels.
_LONGEST_CASE_S = 120.0
_SHORTEST_CASE_S = 15.0
# Starting three processes and losing one take most of it.
_SHORTEST_OF: Mapping[tuple[str, ...], float] = {("E3",): 70.0}

RunCase = Callable[[CaseInput], CaseOutput]


@dataclass(slots=True, kw_only=True)
class Run:
    """A run so far; each case adds to it."""

    seed: int
    """Seed of all cases."""
    started_s: float = field(default_factory=time.monotonic)
    """When the run began, on the monotonic clock."""
    machine: Machine | None = None
    """The machine's figures; None before they are measured."""
    backends: Mapping[str, str] = field(default_factory=dict)
    """The selected backends."""
    obstacles: Mapping[str, str] = field(default_factory=dict)
    """Why others were not selected."""
    samples: list[Sample] = field(default_factory=list)
    """Of all cases so far."""
    out_of_time: list[str] = field(default_factory=list)
    """Gates that the budget did not suffice for."""
    clocks: list[dict[str, Any]] = field(default_factory=list)
    """What nvidia-smi said after each case."""

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self.started_s

    def report(self) -> dict[str, Any]:
        """Judge what was measured so far."""
        context = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": configurations.device_name(),
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "out_of_time": self.out_of_time,
            "selection": dict(self.backends),
            "obstacles": dict(self.obstacles),
            "versions": versions(),
            "clocks": self.clocks,
            "throttled": sorted({one for clock in self.clocks for one in clock["throttled"]}),
        }
        judgements = [
            judge(gate, [s for s in self.samples if s.gate == gate.name]) for gate in GATES.values()
        ]
        return as_json(judgements, machine=self.machine, context=context)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 0 if every gate that ran passed, 1 if not, 2 without a GPU."""
    options = _parsed(arguments)
    reason = why_not_here()
    if reason:
        sys.stderr.write(f"bench-gpu: {reason}; nothing was measured and nothing written\n")
        return NO_DEVICE
    date = datetime.now(UTC).date().isoformat()
    out = options.out or RESULTS / f"{configurations.device_name()}_{date}.json"
    run = Run(seed=int.from_bytes(os.urandom(4)))

    def write() -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(".part")
        part.write_text(json.dumps(run.report(), indent=1) + "\n")
        part.replace(out)

    with CaseRunner() as run_one:
        measure(
            run, only=options.only, budget_s=options.budget_s, after_case=write, run_one=run_one
        )
    report = run.report()
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


def measure(
    run: Run,
    *,
    only: Sequence[str],
    budget_s: float,
    after_case: Callable[[], None],
    run_one: RunCase,
    cases: Sequence[tuple[str, ...]] = tuple(CASES),
) -> None:
    """Measure the machine, then the wanted gates (default: all), until the budget is spent."""
    wanted = {gate for name in only for gate in _BESIDE.get(name, (name,))}
    first = run_one(CaseInput(within_s=min(_LONGEST_CASE_S, budget_s)))
    run.backends, run.obstacles = first.backends, first.obstacles
    names = [gates for gates in cases if not wanted or wanted.intersection(gates)]
    if first.fault:
        run.samples += _failed([gate for gates in names for gate in gates], first.fault)
        after_case()
        return
    run.machine = Machine(**first.machine)
    run.clocks.append({"after": "machine", **read_clocks()})
    after_case()
    for gates in names:
        within_s = min(_LONGEST_CASE_S, budget_s - run.seconds)
        if within_s < _SHORTEST_OF.get(gates, _SHORTEST_CASE_S):
            run.out_of_time += gates
            continue
        output = run_one(
            CaseInput(
                gates=gates,
                seed=run.seed,
                within_s=within_s,
                machine=first.machine,
                backends=first.backends,
            )
        )
        run.samples += [Sample(**sample) for sample in output.samples]
        if output.fault:
            run.samples += _failed(gates, output.fault)
        run.clocks.append({"after": " ".join(gates), **read_clocks()})
        after_case()


def _failed(gates: Sequence[str], fault: str) -> list[Sample]:
    return [Sample(gate=name, shape="all", value=float("nan"), faults=[fault]) for name in gates]


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
    parser.add_argument("--budget-s", type=float, default=380.0, help="end every case by then")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
