import json

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from equipoise.formats.errors import FormatError
from equipoise.formats.files import (
    read_placement,
    read_recording,
    write_placement,
    write_recording,
)
from equipoise.formats.format import Format


def statistics(folder, *ranks, num_experts=2):
    """A folder as its calibration leaves it."""
    folder.mkdir(exist_ok=True)
    meta = {"num_experts": num_experts, "num_experts_per_token": 1}
    (folder / "meta_info.json").write_text(json.dumps(meta))
    for rank, tensors in enumerate(ranks):
        save_file(
            {key: np.array(counts, dtype=np.int32) for key, counts in tensors.items()},
            folder / f"rank{rank}.safetensors",
        )
    return folder


def test_a_layout_is_its_load_balancers_yaml(tmp_path, placement):
    write_placement(placement, tmp_path / "eplb.yaml", form=Format.TENSORRT_LLM)
    assert yaml.safe_load((tmp_path / "eplb.yaml").read_text()) == {
        "num_slots": 6,
        "layer_updates_per_iter": 0,
        "initial_global_assignments": {3: [0, 1, 2, 3, 0, 2], 4: [3, 0, 1, 2, 1, 3]},
    }


@pytest.mark.parametrize("flow", [True, False])
def test_yaml_is_read_however_it_is_laid_out(write, flow):
    document = {
        "initial_global_assignments": {4: [1, 0, 1], 3: [0, 1, 0]},
        "layer_updates_per_iter": 0,
        "num_slots": 3,
    }
    read = read_placement(write(yaml.dump(document, default_flow_style=flow or None)
                                if flow is False else yaml.dump(document)))  # fmt: skip
    assert read.expert_of_slot.tolist() == [[0, 1, 0], [1, 0, 1]]
    assert read.first_moe_layer == 3


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"num_slots": 2}, "is not recognised as a layout"),
        ({"initial_global_assignments": {3: [0, 1]}}, "'num_slots' is missing"),
        ({"initial_global_assignments": {}, "num_slots": 2}, "must be a mapping of layers"),
        ({"initial_global_assignments": {3: [0, 1], 5: [0, 1]}, "num_slots": 2},
         "layer 4 is missing between 3 and 5"),
        ({"initial_global_assignments": {3: [0, 1], 4: [0]}, "num_slots": 2},
         "layer 4 has 1 slots, layer 3 has 2"),
        ({"initial_global_assignments": {3: [0, 1]}, "num_slots": 3},
         "num_slots is 3, but layer 3 has 2 slots"),
        ({"initial_global_assignments": {3: [0, 1], 4: [0, "x"]}, "num_slots": 2},
         "layer 4, slot 1: the expert must be a whole number, not 'x'"),
        ({"initial_global_assignments": {3: [0, 2]}, "num_slots": 2}, "2 slots cannot hold 3"),
        ({"initial_global_assignments": {3: [0, 1], "04": [0, 1], 4: [1, 0]}, "num_slots": 2},
         "names a layer twice"),
    ],
)  # fmt: skip
def test_a_faulty_layout_is_rejected_with_the_layer_and_the_value(write, document, words):
    with pytest.raises(FormatError, match=words):
        read_placement(write(yaml.dump(document)))


def test_statistics_are_summed_over_ranks_and_an_iteration_is_a_window(tmp_path):
    folder = statistics(
        tmp_path / "statistics",
        {"7_3": [1, 2], "7_4": [3, 4], "8_3": [5, 6], "8_4": [7, 8]},
        {"7_3": [10, 0], "7_4": [0, 10], "8_3": [0, 0], "8_4": [1, 1]},
    )
    save_file({"x": np.zeros(1)}, folder / "rank0_raw.safetensors")
    recording = read_recording(folder)
    assert recording.windows.tolist() == [[[11, 2], [3, 14]], [[5, 6], [8, 9]]]
    assert (recording.names, recording.first_moe_layer, recording.top_k) == (("7", "8"), 3, 1)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], r"rank\*\.safetensors"),
        ([{"0_3": [1, 2], "0_5": [1, 2]}], "layer 4 is missing between 3 and 5"),
        ([{"0_3": [1, 2], "0_4": [1, 2], "1_3": [1, 2]}], "layer 4 is missing in iteration 1"),
        ([{"0_3": [1, 2, 3]}], r"rank0\.safetensors: layer 3, iteration 0 has counts of shape \[3"),
        ([{"x": [1, 2]}], "tensor 'x' is not named iteration_layer"),
        ([{"0_3": [0, 0]}], "all loads are 0"),
        ([{"0_3": [1, 2]}, {"0_3": [1, -3]}], "layer 3, expert 1 has load -1"),
    ],
)
def test_faulty_statistics_are_rejected(tmp_path, ranks, words):
    with pytest.raises(FormatError, match=words):
        read_recording(statistics(tmp_path / "statistics", *ranks))


def test_the_package_safetensors_reads_the_statistics_that_are_written(tmp_path, recording):
    write_recording(recording, tmp_path / "statistics", form=Format.TENSORRT_LLM)
    tensors = load_file(tmp_path / "statistics" / "rank0.safetensors")
    assert {key: tensor.tolist() for key, tensor in tensors.items()} == {
        f"{window}_{1 + row}": recording.windows[window, row].tolist()
        for window in range(3)
        for row in range(2)
    }
    meta = json.loads((tmp_path / "statistics" / "meta_info.json").read_text())
    assert meta == {"num_experts": 4, "num_experts_per_token": 2}


def test_missing_facts_are_asked_for(tmp_path, write):
    relative = read_placement(write("[[0, 1]]"))
    with pytest.raises(FormatError, match=r"numbers layers as the model does.* --first-moe-layer"):
        write_placement(relative, tmp_path / "x", form=Format.TENSORRT_LLM)
    counted = read_recording(write('{"domains": {"a": [[[1, 2]]]}}'), first_moe_layer=1)
    with pytest.raises(FormatError, match="needs num_experts_per_token: set --top-k"):
        write_recording(counted, tmp_path / "x", form=Format.TENSORRT_LLM)
