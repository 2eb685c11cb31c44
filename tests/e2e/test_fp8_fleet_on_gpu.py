"""A rollout to FP8 workers that share a real GPU, where there is one.

Kernels are interpreted in this process, so another one starts the fleet.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="there is no Hopper GPU",
    ),
]

SCRIPT = Path(__file__).parents[1] / "support" / "fp8_fleet.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        # Torch maps windows of the same device into each other only if this is set.
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("fleet"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ranks_of_one_gpu_switch_to_the_pinned_layout_in_one_epoch(seen):
    assert seen["is_pinned_layout"]
    first, last = seen["generations"]
    assert last > first
    assert len(set(seen["epochs"])) == 1, "no rank was lost"


def test_a_switch_on_a_gpu_changes_no_token(seen):
    assert seen["during"] == seen["before"]
    assert seen["after"] == seen["before"]


def test_ranks_run_kernels_in_captured_steps(seen):
    for rank in seen["ranks"]:
        assert rank["device"].startswith("cuda")
        assert "triton" in rank["kernels"]
        assert not rank["steps"].startswith("launched one by one")
