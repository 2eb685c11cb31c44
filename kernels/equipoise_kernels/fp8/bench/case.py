"""One case of the benchmark, in a process of its own: a case that hangs or fails ends no other.

    python -m equipoise_kernels.fp8.bench.case OUTPUT

It reads a `CaseInput` as JSON from standard input, and writes a `CaseOutput` to the file OUTPUT.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from equipoise_kernels.fp8 import selection
from equipoise_kernels.fp8.bench import (
    all_to_all_cases,
    dense_cases,
    grouped_cases,
    layer_cases,
    mla_cases,
    moe_cases,
    prefill_cases,
    process_cases,
    quant_cases,
)
from equipoise_kernels.fp8.bench.bench import Bench, measured_machine
from equipoise_kernels.fp8.bench.report import Machine, Sample
from equipoise_kernels.fp8.bench.timing import GraphTimer
from equipoise_kernels.fp8.self_test import start_process

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
    ("C5",): moe_cases.balancing,
    ("D1", "D2", "D3"): mla_cases.attention,
    ("D4",): prefill_cases.attention,
    ("F1",): layer_cases.decode_layer,
    ("A1", "A2", "A3"): dense_cases.large,
    ("E2",): all_to_all_cases.few_tokens,
    ("E1",): all_to_all_cases.many_tokens,
    ("B3", "B4"): grouped_cases.flat,
    ("E3",): process_cases.processes,
}
"""What measures which gates, in the order of a run."""

_MODULE = "equipoise_kernels.fp8.bench.case"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseInput:
    """The input of a case's process."""

    gates: tuple[str, ...] = ()
    """A key of CASES; empty to measure the machine and select backends."""
    seed: int = 0
    """Seed of values and drawn shapes."""
    within_s: float = 60.0
    """Seconds after which the process is ended."""
    machine: Mapping[str, float] = field(default_factory=dict)
    """The machine's figures."""
    backends: Mapping[str, str] = field(default_factory=dict)
    """The backends that the first process selected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutput:
    """What it found."""

    samples: Sequence[Mapping[str, Any]] = ()
    """Samples of the case."""
    machine: Mapping[str, float] = field(default_factory=dict)
    """The machine's figures, if there was no case."""
    backends: Mapping[str, str] = field(default_factory=dict)
    """The selected backends, if there was no case."""
    obstacles: Mapping[str, str] = field(default_factory=dict)
    """Why others were not."""
    fault: str = ""
    """Why there is no result; empty if there is one."""


class CaseRunner:
    """Runs each case in a process of its own, and ends it and its children at its bound.

    The next case's process starts while one runs, and waits for its input: importing torch takes
    seconds. It touches no GPU before its input is there.
    """

    def __init__(self, command: Sequence[str] = ()) -> None:
        self._command = command or (sys.executable, "-m", _MODULE)
        self._folder = tempfile.TemporaryDirectory(prefix="equipoise-")
        self._number = 0
        self._process = self._started()

    def __enter__(self) -> Self:
        """Nothing is left to do: the first process has started."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process that waits, and remove the outputs."""
        _end(self._process)
        self._folder.cleanup()

    def __call__(self, case: CaseInput) -> CaseOutput:
        """Run a case; whatever happens to its process becomes a fault."""
        process, target = self._process, self._target()
        self._number += 1
        self._process = self._started()
        try:
            _, errors = process.communicate(json.dumps(asdict(case)), timeout=case.within_s)
        except subprocess.TimeoutExpired:
            return CaseOutput(fault=f"was ended after {case.within_s:.0f} s")
        finally:
            _end(process)
        if target.exists():
            return CaseOutput(**json.loads(target.read_text()))
        sys.stderr.write(errors)
        words = (errors.strip().splitlines() or ["without a message"])[-1]
        return CaseOutput(fault=f"ended with status {process.returncode}: {words}")

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, str(self._target())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _target(self) -> Path:
        return Path(self._folder.name) / f"output_{self._number}.json"


def main() -> None:
    """Run the case that standard input names."""
    case = CaseInput(**json.loads(sys.stdin.read()))
    output = measured(case) if case.gates else prepared()
    # Complete or absent, even if the process is ended at this moment.
    part = Path(sys.argv[1] + ".part")
    part.write_text(json.dumps(asdict(output)))
    part.replace(sys.argv[1])


def prepared() -> CaseOutput:
    """Select backends, with their self-tests, and measure the machine."""
    chosen = start_process()
    machine = measured_machine(GraphTimer(), torch.device("cuda"))
    return CaseOutput(
        machine=asdict(machine), backends=dict(chosen.backends), obstacles=dict(chosen.obstacles)
    )


def measured(case: CaseInput) -> CaseOutput:
    """Measure a case with the backends and figures that the first process found."""
    possible = {operation: (name,) for operation, name in case.backends.items()}
    selection.start(selection.Selection(backends=case.backends, possible=possible, obstacles={}))
    bench = Bench(
        timer=GraphTimer(),
        generator=torch.Generator(device="cuda").manual_seed(case.seed),
        rng=random.Random(case.seed),  # noqa: S311  shapes, not secrets
        machine=Machine(**case.machine),
        within_s=case.within_s,
    )
    samples = CASES[tuple(case.gates)](bench)
    return CaseOutput(samples=[asdict(sample) for sample in samples])


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and what it started, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(BrokenPipeError):  # It read no input.
        process.communicate()


if __name__ == "__main__":
    main()
