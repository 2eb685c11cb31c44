"""`found_apart`: runs a module in a process of its own, whose replaced names stay until it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def found_apart(module: str) -> Any:
    """What a module prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, sys.path)))},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
