"""`equipoise overlap` on large traces, and on DeepSeek's published one: see docs/overlap.md."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(900)]

PUBLISHED = os.environ.get("EQUIPOISE_TRACE")
"""train.json of github.com/deepseek-ai/profile-data."""

SIZE_BYTES = 300_000_000
STEP_US = 10_000
KERNELS = ("ncclDevKernel_AllToAll", "fused_moe_kernel", "flash_fwd_kernel", "elementwise_kernel")


def measured(path):
    """The command's document, and its peak memory in bytes."""
    command = [sys.executable, "-m", "equipoise.cli.main", "overlap", str(path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        document = json.load(process.stdout)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    cpu_s, peak_bytes = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
    print(f"\n{path.name}: {path.stat().st_size / 1e6:,.1f} MB, {peak_bytes / 1e6:.0f} MB peak")
    print(f"memory, {cpu_s:.1f} s of CPU time")
    return document, peak_bytes


def large_trace(path):
    """Repeat a step of 1,000 kernels with long names; returns the number of steps."""
    num_steps = 0
    with path.open("w") as file:
        file.write('{"traceEvents": [{"ph": "M"}')
        while file.tell() < SIZE_BYTES:
            for number in range(1000):
                name = f"{KERNELS[number % 4]}<{'at::native::functor, ' * 8}{number}>"
                start_us = num_steps * STEP_US + 10 * number
                file.write(
                    f',\n{{"ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, '
                    f'"tid": {number % 4}, "ts": {start_us}, "dur": 15}}'
                )
            num_steps += 1
        file.write("]}")
    return num_steps


def test_a_large_trace_is_read_in_300_mb(tmp_path):
    path = tmp_path / "large.json"
    num_steps = large_trace(path)
    document, peak_bytes = measured(path)
    # Each exchange of 15 µs overlaps the kernels before and after it by 5 µs; none is before the
    # first.
    assert document["communication_us"] == 250 * 15 * num_steps
    assert document["exposed_us"] == 250 * 5 * num_steps + 5
    assert peak_bytes < 300e6


@pytest.mark.skipif(PUBLISHED is None, reason="EQUIPOISE_TRACE names no trace")
def test_deepseeks_published_trace_hides_96_percent():
    document, _ = measured(Path(PUBLISHED))
    assert round(document["communication_us"]) == 113_030
    assert round(document["hidden_us"]) == 108_868
    assert round(document["hidden_share"], 3) == 0.963
