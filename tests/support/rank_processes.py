"""Ranks of the model in processes of their own, each a script that saves what it saw."""

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 120

_ROOT = Path(__file__).parents[2]
_FOLDERS = [_ROOT / folder for folder in ("model", "kernels", ".")]


def run_ranks(program, arguments_of_ranks, *, timeout_s=TIMEOUT_S, **settings):
    """Run `program` once for each rank, all at the same time; each must end well in time.

    `settings` are environment variables.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, _FOLDERS)),
        "OMP_NUM_THREADS": "1",
        **settings,
    }
    processes = [
        subprocess.Popen(
            [sys.executable, program, *map(str, arguments)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments in arguments_of_ranks
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=timeout_s)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
