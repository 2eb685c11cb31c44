import json

import numpy as np
import pytest
import torch

from equipoise.formats.errors import FormatError
from equipoise.formats.expected import Expected
from equipoise.formats.files import (
    read_placement,
    read_recording,
    write_placement,
    write_recording,
)
from equipoise.formats.format import Format


def stat_file(path, counts):
    """What the recorder dumps in mode `stat`."""
    torch.save(
        {
            "rank": 0,
            "logical_count": torch.tensor(counts, dtype=torch.int32),
            "average_utilization_rate_over_window": None,
        },
        path,
    )
    return path


def test_a_recorders_file_is_read_without_its_dense_layers_and_unused_windows(tmp_path):
    # A circular buffer of three steps of which two were used; three dense layers.
    counts = np.zeros((3, 5, 4), dtype=np.int64)
    counts[0, 3:] = [[1, 2, 3, 4], [5, 6, 7, 8]]
    counts[1, 3:] = [[9, 8, 7, 6], [5, 4, 3, 2]]
    recording = read_recording(stat_file(tmp_path / "expert_distribution_recorder_1.pt", counts))
    assert recording.first_moe_layer == 3
    assert recording.windows.tolist() == counts[:2, 3:].tolist()


def test_dense_layers_can_be_said_instead_of_guessed(write):
    # Layer 1 is a MoE layer that had no traffic.
    path = write('{"logical_count": [[0, 0], [0, 0], [1, 2]], "model": "any other key"}')
    assert read_recording(path).num_layers == 1
    assert read_recording(path, first_moe_layer=1).num_layers == 2
    with pytest.raises(FormatError, match="layer 2, expert 0 has load, so the first MoE layer is"):
        read_recording(write('{"logical_count": [[0, 0], [0, 0], [1, 2], [3, 4]]}'),
                       first_moe_layer=3)  # fmt: skip


def test_a_recording_of_zeros_is_rejected(tmp_path):
    with pytest.raises(
        FormatError, match=r"rec\.pt: all loads are 0 in 1 window\(s\) of 61 layers"
    ):
        read_recording(stat_file(tmp_path / "rec.pt", np.zeros((61, 256))))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"logical_count": [[1, 2], [3]]}', "layer 1 has 1 experts, layer 0 has 2"),
        ('{"logical_count": [[1, 2], 3]}', "layer 1 must be a row of loads, not 3"),
        ('{"logical_count": [[1, NaN]]}', "layer 0, expert 1 has load nan"),
        ('{"logical_count": [[0, 0], [1, -2]]}', "layer 1, expert 1 has load -2"),
        ('{"logical_count": [[1, "2"]]}', "layer 0, expert 1: the load must be a number .* '2'"),
        ('{"logical_count": [[1, true]]}', "layer 0, expert 1: the load must be a number .* True"),
        ('{"logical_count": [[1, 1' + "0" * 400 + "]]}", "not a number of more than 20 digits"),
        ('{"logical_count": [[[1]], [[1], [2]]]}', "window 1 has 2 layers x 1 experts, window 0"),
        ('{"records": []}', "recordings of single passes are not supported: record in mode stat"),
    ],
)
def test_a_faulty_recording_is_rejected_with_the_layer_and_the_value(write, text, words):
    path = write(text, "rec.json")
    with pytest.raises(FormatError, match=rf"rec\.json: .*{words}"):
        read_recording(path)


def test_the_file_for_init_expert_location_has_one_key_and_rows_for_dense_layers(
    tmp_path, placement
):
    write_placement(placement, tmp_path / "map.json", form=Format.SGLANG)
    document = json.loads((tmp_path / "map.json").read_text())
    assert document == {
        "physical_to_logical_map": [
            *[[0, 1, 2, 3, 0, 1]] * 3,
            *placement.expert_of_slot.tolist(),
        ]
    }


def test_rows_of_dense_layers_are_not_judged(write):
    path = write('{"physical_to_logical_map": [[0, 0, 0], [0, 1, 2]]}')
    with pytest.raises(FormatError, match="layer 0 has no slot for expert 1"):
        read_placement(path)
    read = read_placement(path, expected=Expected(first_moe_layer=1))
    assert (read.num_layers, read.first_moe_layer) == (1, 1)
    with pytest.raises(FormatError, match="it has 2 layers, so the first MoE layer cannot be 2"):
        read_placement(path, expected=Expected(first_moe_layer=2))


def test_without_the_number_of_dense_layers_nothing_is_written(tmp_path, write):
    relative = read_placement(write("[[0, 1]]"))
    with pytest.raises(FormatError, match=r"map: SGLang counts dense layers .* --first-moe-layer"):
        write_placement(relative, tmp_path / "map", form=Format.SGLANG)
    counted = read_recording(write('{"domains": {"a": [[[1, 2]]]}}'))
    with pytest.raises(FormatError, match="SGLang counts dense layers"):
        write_recording(counted, tmp_path / "rec.pt", form=Format.SGLANG)
    assert not (tmp_path / "map").exists()


def test_torch_reads_the_recorders_file_that_is_written(tmp_path, recording):
    write_recording(recording, tmp_path / "rec.pt", form=Format.SGLANG)
    document = torch.load(tmp_path / "rec.pt", weights_only=True)
    assert document["logical_count"].shape == (3, 3, 4)
    assert document["logical_count"][:, 1:].tolist() == recording.windows.tolist()
    assert not document["logical_count"][:, 0].any()
