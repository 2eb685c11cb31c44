"""The model in FP8 on a real GPU, where there is one: kernels against twins, graphs against eager.

Kernels are interpreted in this process, so another one runs them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="there is no Hopper GPU",
    ),
]

SCRIPT = Path(__file__).parents[2] / "support" / "fp8_on_gpu.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folder = tmp_path_factory.mktemp("fp8")
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_kernels_step_as_the_twins_do(found):
    # Rounding moves codes next to an edge by a sixteenth: rows with equal routes agree to 3e-2, and
    # few routes differ. A product with a column of zeros is 7e-2 away, and loses half of them.
    assert max(found["from_twins"]) < 3e-2
    assert len(found["from_twins"]) >= 0.7 * found["num_rows"]


def test_captured_steps_are_the_eager_ones_to_the_last_bit_across_switches(found):
    # Of three rows by even shares and by uneven ones, and of one row.
    assert found["num_graphs"] == 3
    assert found["captured_is_eager"] == [True] * found["num_steps"]


def test_a_switch_leaves_tokens_as_they_are(found):
    assert found["switched_is_unswitched"] is True


def test_captured_steps_count_the_loads_that_eager_ones_do(found):
    assert found["loads_agree"] is True
