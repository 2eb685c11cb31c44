import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from equipoise.formats import archive
from equipoise.formats.errors import FormatError
from equipoise.formats.expected import Expected
from equipoise.formats.files import (
    read_placement,
    read_recording,
    write_placement,
    write_recording,
)
from equipoise.formats.format import Format
from equipoise.formats.placement import ExpertPlacement
from equipoise.formats.recording import Recording

# A fixture's folder is shared by examples on purpose, and a busy machine is no fault.
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

LOADS_FILES = [
    (Format.EQUIPOISE, "loads.json"),
    (Format.SGLANG, "recorder.json"),
    (Format.SGLANG, "recorder.pt"),
    (Format.TENSORRT_LLM, "statistics"),
    (Format.DEEPSEEK, "weight.npz"),
]
OWN_LOADS = (
    Path(__file__).parents[2] / "model" / "equipoise_model" / "checkpoints" / "tiny" / "loads.json"
)

loads = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5)),
    elements=st.one_of(st.integers(0, 2**53).map(float), st.floats(0, 1e15, allow_subnormal=False)),
).filter(lambda windows: windows.any(axis=2).all())


@st.composite
def placements(draw):
    num_experts = draw(st.integers(1, 5))
    num_ranks = draw(st.integers(1, 4))
    slots_per_rank = -(-num_experts // num_ranks) + draw(st.integers(0, 2))
    rows = [
        draw(st.permutations([i % num_experts for i in range(num_ranks * slots_per_rank)]))
        for _ in range(draw(st.integers(1, 3)))
    ]
    return ExpertPlacement(
        expert_of_slot=np.array(rows, dtype=np.int32),
        num_experts=num_experts,
        num_ranks=num_ranks,
        first_moe_layer=draw(st.integers(0, 3)),
    )


@pytest.mark.parametrize(("form", "name"), LOADS_FILES)
@settings(max_examples=25, deadline=None, suppress_health_check=QUIET)
@given(windows=loads, first=st.integers(0, 3))
def test_loads_survive_every_format_to_the_last_bit(tmp_path, form, name, windows, first):
    written = Recording(
        windows=windows,
        names=tuple(f"w/{i}" for i in range(len(windows))),
        first_moe_layer=first,
        top_k=1,
    )
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    write_recording(written, folder / name, form=form)
    read = read_recording(folder / name, first_moe_layer=first)
    assert np.array_equal(read.windows, windows)
    assert read.first_moe_layer == first


@pytest.mark.parametrize("form", Format)
@settings(max_examples=25, deadline=None, suppress_health_check=QUIET)
@given(placement=placements())
def test_layouts_survive_every_format(tmp_path, form, placement):
    by_rank = placement.expert_of_slot.reshape(placement.num_layers, placement.num_ranks, -1)
    if form is Format.VLLM_ASCEND and any(
        len(set(rank)) < len(rank) for layer in by_rank.tolist() for rank in layer
    ):
        with pytest.raises(FormatError, match="twice"):
            write_placement(placement, tmp_path / "map", form=form)
        return
    write_placement(placement, tmp_path / "map", form=form)
    read = read_placement(
        tmp_path / "map",
        expected=Expected(num_ranks=placement.num_ranks, first_moe_layer=placement.first_moe_layer),
    )
    assert np.array_equal(read.expert_of_slot, placement.expert_of_slot)
    assert read.num_experts == placement.num_experts
    assert read.num_ranks == placement.num_ranks
    assert read.first_moe_layer == placement.first_moe_layer


@pytest.mark.parametrize("form", Format)
def test_writing_what_was_read_gives_the_same_bytes(tmp_path, form, placement):
    write_placement(placement, tmp_path / "one", form=form)
    known = Expected(num_ranks=3, first_moe_layer=3)
    write_placement(read_placement(tmp_path / "one", expected=known), tmp_path / "two", form=form)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_the_models_own_recording_is_read(tmp_path):
    recording = read_recording(OWN_LOADS)
    values = json.loads(OWN_LOADS.read_text())
    assert recording.top_k == values["top_k"]
    assert recording.names[0] == "code/0"
    assert recording.windows[0].tolist() == values["domains"]["code"][0]
    write_recording(recording, tmp_path / "again.json", form=Format.EQUIPOISE)
    again = read_recording(tmp_path / "again.json")
    assert again.names == recording.names
    assert np.array_equal(again.windows, recording.windows)


def test_windows_without_domains_keep_their_names_and_order(tmp_path, recording):
    write_recording(recording, tmp_path / "loads.json", form=Format.EQUIPOISE)
    assert read_recording(tmp_path / "loads.json").names == ("a", "b", "c")


@pytest.mark.parametrize("form", [Format.VLLM, Format.VLLM_ASCEND])
def test_a_format_without_loads_says_which_have_some(tmp_path, recording, form):
    with pytest.raises(FormatError, match=f"{form} has no format for loads; use equipoise"):
        write_recording(recording, tmp_path / "x", form=form)
    with pytest.raises(FormatError, match=f"{form} has no format for loads; use equipoise"):
        read_recording(OWN_LOADS, form=form)


def test_a_layout_given_for_loads_is_named(tmp_path, placement):
    write_placement(placement, tmp_path / "map", form=Format.TENSORRT_LLM)
    with pytest.raises(FormatError, match=r"map: it is not .* It is a layout of tensorrt-llm$"):
        read_recording(tmp_path / "map")


def test_loads_given_for_a_layout_are_named():
    with pytest.raises(FormatError, match=r"It is loads of equipoise$"):
        read_placement(OWN_LOADS)


def test_a_forced_format_is_not_guessed(write):
    path = write('{"domains": {"a": [[[1]]]}, "logical_count": [[2]]}')
    assert read_recording(path).windows.tolist() == [[[1.0]]]
    assert read_recording(path, form=Format.SGLANG).windows.tolist() == [[[2.0]]]
    with pytest.raises(FormatError, match="'weight' is missing"):
        read_recording(path, form=Format.DEEPSEEK)
    with pytest.raises(FormatError, match="statistics are a folder"):
        read_recording(path, form=Format.TENSORRT_LLM)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not recognised as loads"),
        ("{", "it is not valid JSON: Expecting property name"),
        ('{"logical_count": 1}', r"loads must be rows \[layers\]\[experts\], not 1"),
        ('{"logical_count": []}', "loads must be rows"),
        ("[" * 100_000, "its JSON is nested too deep"),
        ("- " * 100_000, "YAML is nested deeper than 8"),
        ("a: &x [1]\nb: *x", "YAML aliases are not supported"),
        ("a: [1", "it is not valid YAML: "),
        ('{"domains": {"a": [[[1]]], "a": [[[2]]]}}', "the JSON key 'a' is duplicated"),
        ("a: 1\na: 2", "the YAML key 'a' is duplicated"),
        ("? [a]\n: 1", "a YAML key must be a scalar, not a list of 1"),
        (b"\xff\xfe\x00", "it is neither text nor a .pt or .npz file"),
        (b"PK\x03\x04", "it is a damaged zip file"),
    ],
)
def test_other_files_are_rejected_by_name(write, content, words):
    path = write(content)
    with pytest.raises(FormatError, match=f"^{path}: .*{words}"):
        read_recording(path)


def test_a_file_without_an_end_is_rejected(monkeypatch):
    monkeypatch.setattr(archive, "MAX_BYTES", 1000)
    with pytest.raises(FormatError, match="/dev/zero: it has more than 1000 bytes"):
        read_recording(Path("/dev/zero"))


def test_a_file_that_is_not_there_is_a_fault_of_the_file(tmp_path, recording):
    with pytest.raises(FormatError, match="nowhere: No such file"):
        read_recording(tmp_path / "nowhere")
    with pytest.raises(FormatError, match="No such file"):
        write_recording(recording, tmp_path / "no" / "loads.json", form=Format.EQUIPOISE)
    with pytest.raises(FormatError, match=r"the folder has no meta_info\.json"):
        read_recording(tmp_path)


def test_statistics_are_not_mixed_with_older_ones(tmp_path, recording):
    write_recording(recording, tmp_path / "statistics", form=Format.TENSORRT_LLM)
    with pytest.raises(FormatError, match="statistics: the folder is not empty"):
        write_recording(recording, tmp_path / "statistics", form=Format.TENSORRT_LLM)


def test_a_wrong_number_of_experts_is_rejected():
    with pytest.raises(FormatError, match="it has 32 experts, expected 256"):
        read_recording(OWN_LOADS, num_experts=256)


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path, recording):
    (tmp_path / "loads.json").mkdir()
    with pytest.raises(FormatError):
        write_recording(recording, tmp_path / "loads.json", form=Format.EQUIPOISE)
    assert [path.name for path in tmp_path.iterdir()] == ["loads.json"]
