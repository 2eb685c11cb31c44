import json

import pytest

from equipoise.formats.errors import FormatError
from equipoise.formats.files import read_placement, write_placement
from equipoise.formats.format import Format


def layer(number, *devices):
    return {
        "layer_id": number,
        "device_count": len(devices),
        "device_list": [
            {"device_id": rank, "device_expert": experts} for rank, experts in enumerate(devices)
        ],
    }


def expert_map(*layers):
    return json.dumps({"moe_layer_count": len(layers), "layer_list": layers})


def test_a_layout_lists_the_experts_of_each_device(tmp_path, placement):
    write_placement(placement, tmp_path / "expert_map.json", form=Format.VLLM_ASCEND)
    assert json.loads((tmp_path / "expert_map.json").read_text()) == {
        "moe_layer_count": 2,
        "layer_list": [layer(0, [0, 1], [2, 3], [0, 2]), layer(1, [3, 0], [1, 2], [1, 3])],
    }


def test_layers_and_devices_may_come_in_any_order(write):
    second = layer(1, [0, 1], [1, 0])
    second["device_list"].reverse()
    read = read_placement(write(expert_map(second, layer(0, [1, 0], [0, 1]))))
    assert read.expert_of_slot.tolist() == [[1, 0, 0, 1], [0, 1, 1, 0]]
    assert read.num_ranks == 2


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([layer(1, [0, 1])], "layer_list: layer_id 0 is missing; they must count from 0"),
        ([layer(0, [0]), layer(0, [0])], "layer_list: layer_id 0 is duplicated"),
        ([layer(0, [0, 0, 1])], "layer 0: device 0 holds expert 0 twice"),
        ([layer(0, [0, 1], [1])], "layer 0: device 1 has 1 slots, but those before have 2 each"),
        ([layer(0, [0]), layer(1, [0], [0])], "layer 1 has 2 devices, layer 0 has 1"),
        ([layer(0, [])], "layer 0, device 0: device_expert must be a list of experts"),
        ([layer(0)], "layer 0: device_list must be a list of objects, not a list of 0"),
        ([{"layer_id": 0}], "'device_list' is missing"),
        ([{**layer(0, [0]), "device_count": 2}], "layer 0: device_count is not the 1 devices"),
        ([3], "layer_list must hold objects, not 3"),
        ([layer("x", [0])], "layer_id must be a whole number of 0 or more, not 'x'"),
        ([layer(0, ["a", "b"])], "layer 0, slot 0: the expert must be a whole number, not 'a'"),
    ],
)
def test_a_faulty_map_is_rejected_with_the_layer_and_the_value(write, layers, words):
    with pytest.raises(FormatError, match=words):
        read_placement(write(expert_map(*layers)))


def test_a_wrong_count_of_layers_is_rejected(write):
    document = {"moe_layer_count": 2, "layer_list": [layer(0, [0])]}
    with pytest.raises(FormatError, match="moe_layer_count is 2, but 1 layers are listed"):
        read_placement(write(json.dumps(document)))


def test_without_the_number_of_ranks_nothing_is_written(tmp_path, write):
    flat = read_placement(write("[[0, 1]]"))
    with pytest.raises(FormatError, match="lists experts by device: set --ranks"):
        write_placement(flat, tmp_path / "map", form=Format.VLLM_ASCEND)
