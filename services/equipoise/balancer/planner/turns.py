"""How many plans are computed at once, of all pools.

Hundreds of pools end their windows together. As many plans at once would take the CPUs from
the event loop, which serves the workers.
"""

import os
from contextlib import suppress
from pathlib import Path

_MAX_AT_ONCE = 4
"""However many CPUs there are: a container with a request but no limit sees the whole
machine."""


def num_at_once(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many plans may be in progress; one CPU is left to the event loop.

    A lower priority for planning processes is not enough: with one on each of two CPUs,
    reports took three times as long. Processors are those that this process may use, at most the
    quota of its control group in `cpu_max` (cgroup v2), if that can be read.
    """
    num_cpus = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):
        quota, period = cpu_max.read_text().split()
        if quota != "max":
            num_cpus = min(num_cpus, int(quota) / int(period))
    return min(_MAX_AT_ONCE, max(1, int(num_cpus) - 1))


MAX_AT_ONCE = num_at_once()

TURN_S = 5.0
"""Longest turn, seconds. A plan that takes longer continues, but others no longer wait for it."""
