"""The plugin installs beside an engine and changes none of its packages: `make test-engines`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.wheels import NEEDS_WHEELS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), NEEDS_WHEELS]

ROOT = Path(__file__).parents[2]
OVERRIDES = "certifi"
"""Packages whose versions engines bound more tightly than a mirror of PyPI may have them; the
plugin requires none of them."""


def resolved(folder, *requirements):
    """What `uv` would install for these requirements on Linux, as {name: version}."""
    (folder / "overrides.txt").write_text(OVERRIDES)
    (folder / "requirements.in").write_text("\n".join(requirements))
    done = subprocess.run(
        [
            *(Path(sys.executable).parent / "uv", "pip", "compile", "--quiet", "--no-annotate"),
            *("--no-header", "--python-version", "3.12"),
            *("--python-platform", "x86_64-manylinux_2_34"),
            *("--override", folder / "overrides.txt", folder / "requirements.in"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [re.split(r"==| @ ", line, maxsplit=1) for line in done.stdout.splitlines()]
    return dict(lines)


@pytest.mark.parametrize(
    "release",
    [
        "vllm==0.33.0",
        "vllm==0.28.0",  # It cannot have protobuf 7.
        "vllm==0.20.0",
        "sglang==0.5.23",
        "sglang==0.5.16",  # Nor can it.
        "sglang==0.5.11",
    ],
)
def test_the_plugin_changes_no_package_of_an_engine(tmp_path, release):
    engine = resolved(tmp_path, release)
    both = resolved(tmp_path, release, f"equipoise-engine @ file://{ROOT}/engine")
    assert len(engine) > 100
    assert {name: both.get(name) for name in engine} == engine
    assert both.keys() - engine.keys() == {"equipoise-engine"}
    print(release, {name: engine[name] for name in ("protobuf", "grpcio", "numpy", "torch")})
