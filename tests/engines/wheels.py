"""Where the engines' wheels are."""

import os

import pytest

ENGINES_PYTHON = os.environ.get("EQUIPOISE_ENGINES_PYTHON", "")
"""An interpreter that has the engines' wheels, as tests/engines/install.sh makes one."""

NEEDS_WHEELS = pytest.mark.skipif(
    not ENGINES_PYTHON, reason="the engines' wheels are not installed: make test-engines"
)
