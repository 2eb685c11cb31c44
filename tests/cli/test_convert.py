import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from equipoise.cli.main import app
from equipoise.formats.errors import FormatError
from equipoise.formats.files import read_placement, read_recording
from equipoise.formats.format import Format
from equipoise.settings.errors import InvalidSettingsError

LOADS = (
    Path(__file__).parents[2] / "model" / "equipoise_model" / "checkpoints" / "tiny" / "loads.json"
)


def equipoise(*arguments):
    """What a command prints; its faults are raised as they are."""
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    ("form", "name"),
    [("sglang", "x.pt"), ("sglang", "x.json"), ("tensorrt-llm", "x"), ("deepseek", "x.npz")],
)
def test_loads_go_into_a_peers_format_and_come_back(tmp_path, form, name):
    equipoise("--file", LOADS, "--out", tmp_path / name, "--format", form, "--first-moe-layer", 1)
    equipoise("--file", tmp_path / name, "--out", tmp_path / "back.json")
    back = read_recording(tmp_path / "back.json")
    assert np.array_equal(back.windows, read_recording(LOADS).windows)
    assert back.first_moe_layer == (None if form == "deepseek" else 1)


@pytest.mark.parametrize("form", Format)
def test_a_layout_can_be_written_in_every_format(tmp_path, form):
    (tmp_path / "map.json").write_text("[[0, 1, 2, 0], [2, 1, 1, 0]]")
    result = json.loads(
        equipoise("--file", tmp_path / "map.json", "--out", tmp_path / "out", "--format", form,
                  "--ranks", 2, "--first-moe-layer", 3, "--json")
    )  # fmt: skip
    assert result == {
        "kind": "layout",
        "layers": 2,
        "experts": 3,
        "first_moe_layer": 3,
        "slots": 4,
        "ranks": 2,
        "out": str(tmp_path / "out"),
        "format": form,
    }
    assert read_placement(tmp_path / "out").num_experts == 3


def test_the_output_describes_the_converted_file(tmp_path):
    text = equipoise("--file", LOADS, "--out", tmp_path / "x.npz", "--format", "deepseek")
    assert "(deepseek format): kind loads, layers 4, experts 32, windows 12" in text


def test_missing_facts_for_the_target_format_are_named(tmp_path):
    (tmp_path / "map.json").write_text("[[0, 1]]")
    for form, words in (("vllm-ascend", "--ranks"), ("tensorrt-llm", "--first-moe-layer")):
        with pytest.raises(FormatError, match=f"set {words}"):
            equipoise("--file", tmp_path / "map.json", "--out", tmp_path / "x", "--format", form)
    (tmp_path / "rec.json").write_text('{"logical_count": [[0, 0], [1, 2]]}')
    statistics = ["--file", tmp_path / "rec.json", "--out", tmp_path / "y", "--format",
                  "tensorrt-llm"]  # fmt: skip
    with pytest.raises(FormatError, match="set --top-k"):
        equipoise(*statistics)
    equipoise(*statistics, "--top-k", 1)
    assert read_recording(tmp_path / "y").top_k == 1


@pytest.mark.parametrize(
    ("arguments", "fault", "words"),
    [
        (["--top-k", "0"], InvalidSettingsError, "--top-k must be at least 1, not 0"),
        (["--experts", "8"], FormatError, r"loads\.json: it has 32 experts, expected 8"),
        (["--format", "vllm"], FormatError, "vllm has no format for loads; use equipoise"),
    ],
)
def test_files_that_cannot_be_converted_are_rejected(tmp_path, arguments, fault, words):
    files = ["--file", LOADS, "--out", tmp_path / "x"]
    with pytest.raises(fault, match=words):
        equipoise(*files, *arguments)
