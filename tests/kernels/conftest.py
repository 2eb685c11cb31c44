"""Fixtures: kernels in Triton's interpreter, with corrected casts, if Triton is installed."""

import warnings

import pytest
import torch

from tests.support.kernel_backends import use_backends


def pytest_collection_modifyitems(config, items):
    """Leave out the larger set of shapes unless `-m peers` names it."""
    if "peers" not in (config.option.markexpr or ""):
        left_out = [item for item in items if item.get_closest_marker("peers")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def interpreted():
    """Run kernels launched in this test on the CPU, with correct casts."""
    pytest.importorskip("triton", reason="kernels need the extra `kernels`")
    from equipoise_kernels.fp8.testing.interpreter import corrected_casts

    with corrected_casts(), warnings.catch_warnings():
        # How the interpreter reads the bounds of a loop.
        warnings.filterwarnings(
            "ignore", "Conversion of an array with ndim > 0", DeprecationWarning
        )
        yield


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(1729)


@pytest.fixture(autouse=True)
def reference_selected(monkeypatch):
    """Public functions use the torch twins; kernel tests launch kernels by name."""
    use_backends(monkeypatch, "reference")
