"""Which releases of the engines are tested, and where their wheels are."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FOLDER = ROOT / ".cache/engines"
"""What tests/engines/install.sh makes."""

WANTED = os.environ.get("EQUIPOISE_ENGINES", "").split()
"""Releases to test, as vllm==0.33.0; `make test-engines ENGINES=...` names them."""

NEEDS_WHEELS = pytest.mark.skipif(
    not WANTED, reason="the engines' wheels are not installed: make test-engines"
)


def _release(name):
    is_missing = not (FOLDER / name).is_dir()
    reason = f"{name} is not installed: make test-engines ENGINES={name}"
    return pytest.param(name, marks=pytest.mark.skipif(is_missing, reason=reason), id=name)


RELEASES = [_release(name) for name in WANTED or ("vllm==0.33.0", "sglang==0.5.23")]
"""The parameters of tests that run with each release."""


def run(release, module, *arguments):
    """Run a module of these tests with a release and the plugin; it must succeed."""
    path = [FOLDER / release, FOLDER / "plugin", ROOT]
    done = subprocess.run(
        [FOLDER / "bin/python", "-m", module, *arguments],
        env={"PYTHONPATH": ":".join(map(str, path)), "HOME": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
