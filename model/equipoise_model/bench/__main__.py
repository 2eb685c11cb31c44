"""Time a MoE layer of DeepSeek-V3 in FP8 on this machine's GPU, and write a report.

python -m equipoise_model.bench [--out FILE]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.bench.__main__ import NO_DEVICE, RESULTS, versions, why_not_here
from equipoise_kernels.fp8.bench.timing import GraphTimer
from equipoise_kernels.fp8.self_test import start_process
from equipoise_model.bench.layer import DECODE_ROWS, PREFILL_ROWS, LayerTiming, time_layer
from equipoise_model.config import Fp8Config
from equipoise_model.presets import DEEPSEEK_V3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 0 after measuring, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="bench-gpu (model)", description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write the report (JSON)")
    options = parser.parse_args(arguments)
    reason = why_not_here()
    if reason:
        sys.stderr.write(f"bench-gpu: {reason}; no layer was measured and nothing written\n")
        return NO_DEVICE
    report = run()
    out = options.out or RESULTS / f"{report['device']}_model_{report['date'][:10]}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(f"{as_text(report)}\nwritten to {out}\n")
    return 0


def run() -> dict[str, Any]:
    """Measure on the current GPU."""
    selection = start_process()
    timings = time_layer(
        replace(DEEPSEEK_V3, quantization_config=Fp8Config()),
        timer=GraphTimer(),
        generator=torch.Generator(device="cuda").manual_seed(0),
        rows={"decode": DECODE_ROWS, "prefill": PREFILL_ROWS},
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": configurations.device_name(),
        "layer": "DeepSeek-V3 MoE, 256 experts of 7168 x 2048, top 8, FP8, all on one device",
        "selection": dict(selection.backends),
        "versions": versions(),
        "timings": [_row(timing) for timing in timings],
    }


def as_text(report: dict[str, Any]) -> str:
    """Format the report as a table."""
    lines = [f"{report['layer']}, on {report['device']}"]
    lines += [
        f"  {row['phase']:8} {row['rows']:5} rows {row['median_us']:10.1f} us "
        f"{row['tokens_per_s']:12.0f} tokens/s"
        for row in report["timings"]
    ]
    return "\n".join(lines)


def _row(timing: LayerTiming) -> dict[str, Any]:
    return asdict(timing) | {"tokens_per_s": round(timing.tokens_per_s)}


if __name__ == "__main__":
    sys.exit(main())
