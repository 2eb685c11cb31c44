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


SHARED = {"num_experts": 2, "num_ranks": 3, "expert_of_slot": [[0, 1, 0], [1, 0, 1]]}


def test_shares_survive_a_round_trip(write, tmp_path):
    document = {**SHARED, "share_of_slot": [[1, 32768, 32767], [0, 32768, 32768]]}
    placement = read_placement(write(json.dumps(document)))
    assert placement.share_of_slot.tolist() == document["share_of_slot"]
    write_placement(placement, tmp_path / "again.json", form=Format.EQUIPOISE)
    again = json.loads((tmp_path / "again.json").read_text())
    assert again == {**document, "first_moe_layer": None}


@pytest.mark.parametrize("form", [form for form in Format if form is not Format.EQUIPOISE])
def test_a_format_without_shares_does_not_drop_them(write, tmp_path, form):
    document = {**SHARED, "share_of_slot": [[1, 32768, 32767], [0, 32768, 32768]]}
    placement = read_placement(write(json.dumps(document)))
    with pytest.raises(FormatError, match=f"{form} cannot express shares"):
        write_placement(placement, tmp_path / "theirs", form=form)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([[1, 32768, 32767], [0, 32768, 32767]], "layer 1: the shares of expert 1 sum to 32767"),
        ([[1, 32768, 32767]], r"shares have the shape \(1, 3\), slots \(2, 3\)"),
        ([[0.5, 1, 0.5], [1, 1, 0]], "share_of_slot: layer 0, slot 0"),
        ("even", "share_of_slot: "),
    ],
)
def test_faulty_shares_are_rejected(write, shares, words):
    with pytest.raises(FormatError, match=words):
        read_placement(write(json.dumps({**SHARED, "share_of_slot": shares})))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"expert_of_slot": [[0]]}, "'num_experts' is missing"),
        ({"expert_of_slot": [[0]], "num_experts": "x"}, "num_experts must be a whole number"),
        ({"expert_of_slot": [[0]], "num_experts": True}, "num_experts must be a whole number"),
        ({"expert_of_slot": 3, "num_experts": 1}, r"must be rows \[layers\]\[slots\], not 3"),
        ({"expert_of_slot": [[0], [1]], "num_experts": 1, "first_moe_layer": 3},
         "layer 4, slot 0 holds expert 1, but experts are numbered 0 to 0"),
        ({"expert_of_slot": [[0, 0]], "num_experts": 1, "num_ranks": 0}, "num_ranks must be"),
    ],
)  # fmt: skip
def test_a_faulty_layout_is_rejected(write, document, words):
    with pytest.raises(FormatError, match=words):
        read_placement(write(json.dumps(document)))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"domains": []}, "domains must be an object of recordings, not a list of 0"),
        ({"domains": {"a": [[[1]]], "b": [[[1, 2]]]}}, "'b' has 1 layers x 2 experts, but those"),
        ({"domains": {"a": [[[1]], [["x"]]]}}, "domains, 'a': window 1, layer 0, expert 0: the lo"),
        ({"windows": {"a": [[[1]], [[2]]]}}, "windows, 'a' must be a single window, not 2"),
        ({"domains": {"a": [[[1]]]}, "top_k": 0}, "top_k must be a whole number of 1 or more"),
    ],
)
def test_faulty_loads_are_rejected(write, document, words):
    with pytest.raises(FormatError, match=words):
        read_recording(write(json.dumps(document)))
