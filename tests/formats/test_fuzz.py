"""Reading any file ends with a value or `FormatError`."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from equipoise.formats import safetensors_file
from equipoise.formats.errors import FormatError
from equipoise.formats.files import read_placement, read_recording
from equipoise.formats.format import Format

# A fixture's folder is shared by examples on purpose, and a busy machine is no fault.
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=QUIET)
KEYS = st.sampled_from(
    ["logical_count", "physical_to_logical_map", "records", "domains", "windows", "expert_of_slot",
     "num_experts", "num_ranks", "first_moe_layer", "top_k", "layer_list", "moe_layer_count",
     "layer_id", "device_list", "device_id", "device_expert", "device_count", "num_slots",
     "initial_global_assignments", "0", "1"]
)  # fmt: skip
DOCUMENTS = st.recursive(
    st.one_of(st.integers(-2, 5), st.integers(), st.floats(), st.text(max_size=3), st.none(),
              st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=30,
)  # fmt: skip


def read_every_way(path):
    for form in (None, *Format):
        with contextlib.suppress(FormatError):
            assert read_recording(path, form=form).windows.any()
        with contextlib.suppress(FormatError):
            assert read_placement(path, form=form).num_slots > 0


def pt_file():
    file = io.BytesIO()
    torch.save({"rank": 0, "logical_count": torch.arange(12).reshape(3, 4)}, file)
    return file.getvalue()


def npz_file():
    file = io.BytesIO()
    np.savez(file, weight=np.arange(12).reshape(3, 4), phy2log=np.array([[0, 1]]))
    return file.getvalue()


@FUZZ
@given(document=DOCUMENTS)
def test_any_json(tmp_path, document):
    path = tmp_path / "file"
    path.write_text(json.dumps(document))
    read_every_way(path)


@FUZZ
@given(
    data=st.one_of(
        st.binary(max_size=200), st.text(alphabet="[]{}:-?&*!|>'\"#,01a \n").map(str.encode)
    )
)
@example(data=b"!!python/object/apply:os.system ['true']")
@example(data=b"num_slots: 2\ninitial_global_assignments: {3: [0, 1]}\n---\na: 1")
@example(data=b"[" + b"9" * 5000 + b"]")
def test_any_bytes(tmp_path, data):
    path = tmp_path / "file"
    path.write_bytes(data)
    read_every_way(path)


@pytest.mark.parametrize("whole", [pt_file(), npz_file()], ids=["pt", "npz"])
@FUZZ
@given(data=st.data())
def test_archives_with_wrong_bytes(tmp_path, whole, data):
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "file"
    path.write_bytes(damaged[: data.draw(st.integers(4, len(whole)))])
    read_every_way(path)


@FUZZ
@given(data=st.data())
def test_pickles_with_wrong_opcodes(tmp_path, data):
    # Rewritten around the damage, so that no checksum of the zip file stops it first.
    from equipoise.formats import archive

    members = archive.unpacked(pt_file())
    (name,) = [name for name in members if name.endswith("data.pkl")]
    pickled = bytearray(members[name])
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(pickled) - 1))
        pickled[position : position + data.draw(st.integers(0, 2))] = data.draw(
            st.binary(max_size=2)
        )
    path = tmp_path / "file"
    path.write_bytes(archive.packed({**members, name: bytes(pickled)}))
    read_every_way(path)


@FUZZ
@given(data=st.data())
def test_statistics_with_wrong_bytes(tmp_path, data):
    folder = tmp_path / "statistics"
    folder.mkdir(exist_ok=True)
    (folder / "meta_info.json").write_text('{"num_experts": 2, "num_experts_per_token": 1}')
    damaged = bytearray(safetensors_file.dump({"0_3": np.array([1.0, 2.0])}))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    (folder / "rank0.safetensors").write_bytes(damaged)
    read_every_way(folder)
