import json

import pytest

from equipoise.formats.errors import FormatError
from equipoise.formats.files import read_placement, read_recording, write_placement
from equipoise.formats.format import Format


def test_a_layout_says_all_that_is_known(tmp_path, placement):
    write_placement(placement, tmp_path / "layout.json", form=Format.EQUIPOISE)
    assert json.loads((tmp_path / "layout.json").read_text()) == {
        "num_experts": 4,
        "num_ranks": 3,
        "first_moe_layer": 3,
        "expert_of_slot": placement.expert_of_slot.tolist(),
    }


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"expert_of_slot": [[0]]}, "'num_experts' is missing"),
        ({"expert_of_slot": [[0]], "num_experts": "x"}, "num_experts must be a whole number"),
        ({"expert_of_slot": [[0]], "num_experts": True}, "num_experts must be a whole number"),
        ({"expert_of_slot": 3, "num_experts": 1}, r"must be rows \[layers\]\[slots\], not 3"),
        ({"expert_of_slot": [[0], [1]], "num_experts": 1, "first_moe_layer": 3},
         "layer 4, slot 0 holds expert 1, but experts are 0 to 0"),
        ({"expert_of_slot": [[0, 0]], "num_experts": 1, "num_ranks": 0}, "num_ranks must be"),
    ],
)  # fmt: skip
def test_a_faulty_layout_is_refused(write, document, words):
    with pytest.raises(FormatError, match=words):
        read_placement(write(json.dumps(document)))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"domains": []}, "domains must be an object of recordings, not a list of 0"),
        ({"domains": {"a": [[[1]]], "b": [[[1, 2]]]}}, "'b' has 1 layers x 2 experts, those befo"),
        ({"domains": {"a": [[[1]], [["x"]]]}}, "domains, 'a': window 1, layer 0, expert 0: the lo"),
        ({"windows": {"a": [[[1]], [[2]]]}}, "windows, 'a' must be a single window, not 2"),
        ({"domains": {"a": [[[1]]]}, "top_k": 0}, "top_k must be a whole number of 1 or more"),
    ],
)
def test_faulty_loads_are_refused(write, document, words):
    with pytest.raises(FormatError, match=words):
        read_recording(write(json.dumps(document)))
