import numpy as np
import pytest

from equipoise.formats.errors import FormatError
from equipoise.formats.files import (
    read_placement,
    read_recording,
    write_placement,
    write_recording,
)
from equipoise.formats.format import Format


@pytest.fixture
def save(tmp_path):
    def _save(**tensors):
        np.savez(tmp_path / "x.npz", **tensors)
        return tmp_path / "x.npz"

    return _save


def test_a_layout_is_eplbs_three_tensors(tmp_path, placement):
    write_placement(placement, tmp_path / "eplb.npz", form=Format.DEEPSEEK)
    with np.load(tmp_path / "eplb.npz") as tensors:
        assert tensors["phy2log"].tolist() == placement.expert_of_slot.tolist()
        assert tensors["logcnt"].tolist() == [[2, 1, 2, 1], [1, 2, 1, 2]]
        assert tensors["log2phy"].tolist() == [
            [[0, 4], [1, -1], [2, 5], [3, -1]],
            [[1, -1], [2, 4], [3, -1], [0, 5]],
        ]
        assert tensors["num_gpus"] == 3


def test_the_order_of_an_experts_slots_and_the_width_of_the_padding_are_free(save):
    read = read_placement(
        save(phy2log=[[0, 1, 0]], log2phy=[[[2, 0, -1], [1, -1, -1]]], logcnt=[[2, 1]])
    )
    assert read.expert_of_slot.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"phy2log": [[0, 1, 0]], "logcnt": [[1, 2]]}, "layer 0: logcnt says 1 replicas of exp"),
        ({"phy2log": [[0, 1]], "logcnt": [[1, 1], [1, 1]]}, r"logcnt has the shape \[2, 2\], not"),
        ({"phy2log": [[0, 1]], "log2phy": [[[1], [0]]]}, "layer 0: log2phy does not name the sl"),
        ({"phy2log": [[0, 1]], "log2phy": [[[0, 5], [1, -1]]]}, "log2phy does not name"),
        ({"phy2log": [[0, 1]], "log2phy": [[0, 1]]}, r"log2phy must be .* shape \[1, 2, 1\]"),
        ({"phy2log": [[0.5, 1]]}, "expert ids must be whole numbers"),
        ({"phy2log": [[0, 2**40]]}, "layer 0, slot 1 holds expert 1099511627776"),
        ({"phy2log": [[0, 1]], "num_gpus": 0}, "num_gpus must be a whole number of 1 or more"),
        ({"weight": [[1, 2]]}, "It is loads of deepseek"),
    ],
)
def test_a_faulty_layout_is_rejected(save, tensors, words):
    with pytest.raises(FormatError, match=words):
        read_placement(save(**{name: np.array(value) for name, value in tensors.items()}))


def test_loads_are_its_argument(tmp_path, recording, save):
    write_recording(recording, tmp_path / "loads.npz", form=Format.DEEPSEEK)
    with np.load(tmp_path / "loads.npz") as tensors:
        assert np.array_equal(tensors["weight"], recording.windows)
    assert read_recording(save(weight=np.array([[1, 2], [3, 4]]))).num_layers == 2


@pytest.mark.parametrize(
    "value", [np.array(["a"]), np.array([[1j]]), np.array([[None]], dtype=object), np.ones(3)]
)
def test_values_that_are_not_a_matrix_are_rejected(save, value):
    with pytest.raises(FormatError, match="numbers"):
        read_recording(save(weight=value))
