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
    """Return Markdown: a row per gate, a column per report with the mean and the bar it reached."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    reports = [report for report in reports if "gates" in report]
    if not reports:
        return NOTHING
    heads = [f"{r['device']}, {r['date'][:10]}, {_versions(r['versions'])}" for r in reports]
    lines = [
        "| " + " | ".join(["gate", "metric", "must", "target", *heads]) + " |",
        "|---" * (4 + len(reports)) + "|",
    ]
    lines += [_line(gate, reports) for gate in GATES.values()]
    return "\n".join(lines)


def _line(gate: Gate, reports: Sequence[Mapping[str, Any]]) -> str:
    cells = [gate.name, gate.metric, f"{gate.must:g}", f"{gate.target:g}" if gate.target else "-"]
    for report in reports:
        (found,) = [one for one in report["gates"] if one["name"] == gate.name]
        mean = "-" if found["mean"] is None else f"{found['mean']:.3g}"
        cells.append(f"{mean} ({found['verdict']})" if report["void_because"] is None else "void")
    return "| " + " | ".join(cells) + " |"


def _versions(versions: Mapping[str, str | None]) -> str:
    return f"torch {versions['torch']}, triton {versions['triton']}"


if __name__ == "__main__":
    sys.stdout.write(table(Path("results") / "gpu") + "\n")
