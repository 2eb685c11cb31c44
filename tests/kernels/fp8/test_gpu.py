"""Every kernel on a real GPU, where there is one: the same small problems that serving starts with.

Kernels are interpreted in this process, so another one runs them.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from equipoise_kernels.fp8.selection import OPERATIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="there is no Hopper GPU",
    ),
]

SOLVE = """
import json
from equipoise_kernels.fp8.selection import OPERATIONS
from equipoise_kernels.fp8.self_test import obstacle
operations = [name for name, backends in OPERATIONS.items() if "triton" in backends]
print(json.dumps({name: obstacle(name, "triton") for name in operations}))
"""


@pytest.fixture(scope="module")
def obstacles():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SOLVE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "operation", [name for name, backends in OPERATIONS.items() if "triton" in backends]
)
def test_a_kernel_agrees_with_its_reference_on_the_device(operation, obstacles):
    assert obstacles[operation] is None
