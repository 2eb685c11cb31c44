import math

import numpy as np
import pytest

from equipoise.formats.errors import FormatError
from equipoise.formats.recording import Recording, joined


def recorded(windows, **facts):
    windows = np.array(windows, dtype=np.float64)
    names = facts.pop("names", tuple(str(i) for i in range(len(windows))))
    return Recording(windows=windows, names=names, **facts)


@pytest.mark.parametrize(
    ("value", "words"), [(math.nan, "nan"), (-1.0, "-1"), (math.inf, "inf"), (1e17, "1e\\+17")]
)
def test_a_load_that_is_none_is_named_with_its_layer_of_the_model(value, words):
    windows = np.ones((2, 3, 4))
    windows[1, 2, 3] = value
    with pytest.raises(FormatError, match=f"window 1, layer 7, expert 3 has load {words},"):
        recorded(windows, first_moe_layer=5)
    with pytest.raises(FormatError, match=f"^layer 2, expert 3 has load {words},"):
        recorded(windows[1:])


def test_a_recording_of_nothing_is_rejected():
    with pytest.raises(FormatError, match=r"all loads are 0 in 2 window\(s\) of 3 layers x 4"):
        recorded(np.zeros((2, 3, 4)))
    with pytest.raises(FormatError, match=r"nothing was recorded: .* \[0, 3, 4\]"):
        recorded(np.zeros((0, 3, 4)))


def test_dense_layers_are_taken_out_by_number():
    recording = recorded([[[0, 0], [0, 0], [1, 2]]], first_moe_layer=0)
    assert recording.num_leading_idle() == 2
    moe = recording.from_layer(2)
    assert (moe.windows.tolist(), moe.first_moe_layer) == ([[[1.0, 2.0]]], 2)
    # A layer without traffic is not a dense one if the caller says so.
    assert recording.from_layer(1).num_layers == 2


def test_a_layer_with_load_is_not_dense():
    recording = recorded([[[0, 3], [1, 2]]], first_moe_layer=3)
    with pytest.raises(FormatError, match=r"layer 3, expert 1 has load, so .* is not 4"):
        recording.from_layer(4)
    with pytest.raises(FormatError, match=r"the first layer is 3, so .* cannot be 1"):
        recording.from_layer(1)
    with pytest.raises(FormatError, match=r"the last layer is 4, so .* cannot be 5"):
        recording.from_layer(5)


def test_windows_are_chosen_by_name_or_by_domain():
    recording = recorded([[[1]], [[2]], [[3]]], names=("code/0", "code/1", "prose/0"))
    assert recording.only(["code"]).names == ("code/0", "code/1")
    assert recording.only(["prose/0", "code/0"]).total().tolist() == [[4.0]]
    with pytest.raises(
        FormatError, match="no window is named 'music'; the windows are code/0, code/1"
    ):
        recording.only(["music"])


def test_recordings_of_one_model_are_joined_under_their_labels():
    one = recorded([[[1, 2]]])
    two = recorded([[[3, 4]], [[5, 6]]])
    both = joined({"one": one, "two": two})
    assert both.names == ("one", "two/0", "two/1")
    assert both.windows.tolist() == [[[1, 2]], [[3, 4]], [[5, 6]]]


def test_recordings_of_two_models_are_not_joined():
    with pytest.raises(
        FormatError,
        match="one and two describe different models: 1 layers x 2 experts against 1 layers",
    ):
        joined({"one": recorded([[[1, 2]]]), "two": recorded([[[1, 2, 3]]])})
