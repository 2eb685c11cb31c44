import numpy as np
import pytest

from equipoise.formats.placement import ExpertPlacement
from equipoise.formats.recording import Recording


@pytest.fixture
def recording():
    """Three windows, two MoE layers behind one dense layer, four experts."""
    windows = np.arange(24, dtype=np.float64).reshape(3, 2, 4)
    return Recording(windows=windows, names=("a", "b", "c"), first_moe_layer=1, top_k=2)


@pytest.fixture
def placement():
    """Two layers behind three dense ones, four experts in six slots of three ranks."""
    return ExpertPlacement(
        expert_of_slot=np.array([[0, 1, 2, 3, 0, 2], [3, 0, 1, 2, 1, 3]], dtype=np.int32),
        num_experts=4,
        num_ranks=3,
        first_moe_layer=3,
    )


@pytest.fixture
def write(tmp_path):
    """Writes text or bytes to a file and names it."""

    def _write(content, name="file"):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return _write
