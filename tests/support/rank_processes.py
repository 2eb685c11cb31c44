"""Ranks of the model in processes of their own, forked from one that has imported everything."""

import json
import os
import runpy
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

TIMEOUT_S = 120

_ROOT = Path(__file__).parents[2]
_FOLDERS = [_ROOT / folder for folder in ("model", "kernels", ".")]


def run_ranks(program, arguments_of_ranks, *, timeout_s=TIMEOUT_S, **settings):
    """Run `main` of `program` once for each rank, all at the same time; each must end well in time.

    It gets the rank's arguments as strings. One process imports torch and the program, which takes
    more CPU than most ranks do, and forks one for each rank. `settings` are environment variables.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, _FOLDERS)),
        "OMP_NUM_THREADS": "1",
        **settings,
    }
    ranks = json.dumps([list(map(str, arguments)) for arguments in arguments_of_ranks])
    process = subprocess.Popen(
        [sys.executable, __file__, program, ranks],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        _, errors = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, errors
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _fork_ranks(program, arguments_of_ranks):
    main = runpy.run_path(program)["main"]
    running = set()
    for arguments in arguments_of_ranks:
        if (pid := os.fork()) == 0:
            main(*arguments)
            sys.exit()
        running.add(pid)
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status != 0:
            for other in running:  # They may wait for it.
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with status {status}")


if __name__ == "__main__":
    _fork_ranks(sys.argv[1], json.loads(sys.argv[2]))
