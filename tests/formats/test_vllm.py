import json

import pytest

from equipoise.formats.errors import FormatError
from equipoise.formats.expected import Expected
from equipoise.formats.files import read_placement, write_placement
from equipoise.formats.format import Format


def test_a_layout_is_a_list_of_moe_layers(tmp_path, placement):
    write_placement(placement, tmp_path / "map.json", form=Format.VLLM)
    text = (tmp_path / "map.json").read_text()
    assert json.loads(text) == placement.expert_of_slot.tolist()
    assert read_placement(tmp_path / "map.json").first_moe_layer is None


def test_a_flat_list_holds_for_every_layer(write):
    path = write("[0, 1, 2, 0]")
    assert read_placement(path).expert_of_slot.tolist() == [[0, 1, 2, 0]]
    assert read_placement(path, expected=Expected(num_layers=3)).num_layers == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", r"a list \[layers\]\[slots\] is required, not a list of 0"),
        ("[[0, 1], [0]]", "layer 1 has 1 slots, layer 0 has 2"),
        ("[[0, 1], [0, 2, 1]]", "layer 1 has 3 slots, layer 0 has 2"),
        ("[[0, 1, 2], [1, 1, 0]]", "layer 1 has no slot for expert 2"),
        ("[[0, 1], [3, 0]]", "2 slots cannot hold 4 experts, but layer 1, slot 0 holds expert 3"),
        ("[[0, 1], [-1, 0]]", "layer 1, slot 0 holds expert -1, but experts are numbered 0 to 1"),
        ("[[0, 1.0]]", "layer 0, slot 1: the expert must be a whole number, not 1.0"),
        ("[0, null]", "layer 0, slot 1: the expert must be a whole number, not None"),
        ("[[0, 1e999]]", "layer 0, slot 1: the expert must be a whole number, not inf"),
        ("[[0, 99999999999]]", "layer 0, slot 1: the expert must be a whole number"),
        ("[[0], 1]", "layer 1 must be a row of expert ids, not 1"),
    ],
)
def test_a_faulty_map_is_rejected_with_the_layer_and_the_value(write, text, words):
    with pytest.raises(FormatError, match=words):
        read_placement(write(text), form=Format.VLLM)
