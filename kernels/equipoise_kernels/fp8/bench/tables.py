"""The table of kernels/README.md, from the reports under results/gpu.

python -m equipoise_kernels.fp8.bench.tables
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise_kernels.fp8.bench.report import GATES, Gate

NOTHING = "No run on a GPU is recorded yet."


def table(folder: Path) -> str:
    """Return Markdown: a row per gate, with the mean and the bar that it reached on each machine.

    Runs of a day on machines of a kind with the same versions share a column; the first that ran a
    gate has the word.
    """
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        if "gates" in report:
            head = f"{report['device']}, {report['date'][:10]}, {_versions(report['versions'])}"
            runs.setdefault(head, []).append(report)
    if not runs:
        return NOTHING
    lines = [
        "| " + " | ".join(["gate", "metric", "must", "target", *runs]) + " |",
        "|---" * (4 + len(runs)) + "|",
    ]
    lines += [_line(gate, list(runs.values())) for gate in GATES.values()]
    return "\n".join(lines)


def _line(gate: Gate, runs: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    target = "-" if gate.target is None else f"{gate.target:g}"
    cells = [_cell(gate, reports) for reports in runs]
    return "| " + " | ".join([gate.name, gate.metric, f"{gate.must:g}", target, *cells]) + " |"


def _cell(gate: Gate, reports: Sequence[Mapping[str, Any]]) -> str:
    """The gate's mean in the first report that ran it."""
    for report in reports:
        # A report has no gates that came after it.
        found = next((one for one in report["gates"] if one["name"] == gate.name), None)
        if found is not None and found["mean"] is not None:
            mean, is_valid = found["mean"], report["void_because"] is None
            return f"{mean:.3g} ({found['verdict']})" if is_valid else "void"
    return "- (not run)"


def _versions(versions: Mapping[str, str | None]) -> str:
    return f"torch {versions['torch']}, triton {versions['triton']}"


if __name__ == "__main__":
    sys.stdout.write(table(Path("results") / "gpu") + "\n")
