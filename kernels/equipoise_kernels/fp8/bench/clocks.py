"""Clocks, power and throttling of the GPU, as nvidia-smi reports them."""

from __future__ import annotations

import subprocess
from typing import Any

_TIMEOUT_S = 10
_FIGURES = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}
_REASONS = "clocks_throttle_reasons.active"
# NVML's nvmlClocksThrottleReason*. An idle GPU lowers its clocks too, which is no reason to worry.
_THROTTLED = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def read_clocks() -> dict[str, Any]:
    """Return figures of the first GPU, and why it is slowed down; only `throttled` if unknown."""
    query = ",".join([*_FIGURES, _REASONS])
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return {"throttled": []}
    return parsed_clocks(done.stdout)


def parsed_clocks(line: str) -> dict[str, Any]:
    """Return the figures of one line of nvidia-smi's; those that it does not know are absent."""
    *values, reasons = [value.strip() for value in line.strip().split(",")]
    figures = {
        name: float(value)
        for name, value in zip(_FIGURES.values(), values, strict=False)
        if value.replace(".", "", 1).isdigit()
    }
    try:
        active = int(reasons, 16)
    except ValueError:
        active = 0
    return {**figures, "throttled": [name for bit, name in _THROTTLED.items() if active & bit]}
