import io
import os
import pickle
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch

from equipoise.formats import archive, torch_file
from equipoise.formats.errors import FormatError
from equipoise.formats.files import read_recording


def saved(document):
    file = io.BytesIO()
    torch.save(document, file)
    return file.getvalue()


def with_pickle(pickled):
    return archive.packed({"archive/data.pkl": pickled, "archive/data/0": bytes(32)})


class Call:
    """Pickles to a call of any function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16,
              torch.float32, torch.float64]
)  # fmt: skip
def test_what_torch_saves_is_read(dtype):
    tensor = torch.arange(24).to(dtype).reshape(2, 3, 4)
    document = {"rank": 0, "t": tensor, "more": OrderedDict(a=[1.5, None, "x", (True,)])}
    read = torch_file.load(saved(document))
    assert np.array_equal(read["t"], tensor.numpy())
    assert read["t"].dtype == tensor.numpy().dtype
    assert (read["rank"], read["more"]) == (0, {"a": [1.5, None, "x", (True,)]})


def test_views_and_empty_tensors_keep_their_values():
    whole = torch.arange(24).reshape(4, 6)
    views = {
        "t": whole.T,
        "part": whole[1:, 2::2],
        "wide": whole[0, :1].expand(3),
        "none": whole[:0],
    }
    read = torch_file.load(saved({key: view for key, view in views.items() if key != "wide"}))
    for key, array in read.items():
        assert np.array_equal(array, views[key].numpy())


def test_a_view_that_is_larger_than_its_memory_is_rejected():
    with pytest.raises(FormatError, match=r"a tensor of shape \[1000\] has only 1 numbers"):
        torch_file.load(saved(torch.zeros(1).expand(1000)))


def test_torch_reads_what_is_written():
    counts = np.arange(12).reshape(3, 4)
    data = torch_file.dump({"rank": 0, "counts": counts, "half": 0.5, "none": None, "yes": True})
    read = torch.load(io.BytesIO(data), weights_only=True)
    assert torch.equal(read.pop("counts"), torch.from_numpy(counts))
    assert read == {"rank": 0, "half": 0.5, "none": None, "yes": True}


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize(
    "function", [os.system, eval, getattr, bytearray, np.zeros, OrderedDict.fromkeys]
)
def test_no_function_is_called_whatever_a_file_names(tmp_path, function, protocol):
    ran = tmp_path / "ran"
    pickled = pickle.dumps(Call(function, f"touch {ran}"), protocol=protocol)
    with pytest.raises(FormatError, match="not part of a plain tensor"):
        torch_file.load(with_pickle(pickled))
    assert not ran.exists()


def test_a_file_cannot_change_the_parts_of_a_tensor_for_those_after_it():
    names = (b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nLongStorage\n")
    states = (b"}X\x04\x00\x00\x00dataX\x01\x00\x00\x00xs", b"N}X\x04\x00\x00\x00dataK\x01s\x86")
    for name in names:
        for state in states:
            with pytest.raises(FormatError, match="its pickle is damaged"):
                torch_file.load(with_pickle(b"\x80\x02" + name + state + b"b."))
    tensor = torch.arange(3)
    assert np.array_equal(torch_file.load(saved(tensor)), tensor.numpy())


def test_values_nested_deeper_than_python_can_print_are_rejected(write):
    tuples, frozensets = b")" + b"\x85" * 5000, b"(" * 5000 + b"\x91" * 5000
    for nested in (tuples, frozensets):
        pickled = b"\x80\x04}X\x0d\x00\x00\x00logical_count" + nested + b"s."
        with pytest.raises(FormatError, match="loads must be rows"):
            read_recording(write(with_pickle(pickled)))


def test_a_long_pickle_is_a_recording_of_single_passes():
    with pytest.raises(
        FormatError, match="single passes or tokens are not supported: record in mode"
    ):
        torch_file.load(saved(list(range(20_000))))


def test_other_tensors_are_rejected_by_their_type():
    with pytest.raises(FormatError, match=r"it names 'torch\.BFloat16Storage'"):
        torch_file.load(saved(torch.zeros(3, dtype=torch.bfloat16)))


def test_a_file_without_a_tensors_bytes_is_rejected():
    members = archive.unpacked(saved(torch.arange(3)))
    without = {name: data for name, data in members.items() if "/data/" not in name}
    with pytest.raises(FormatError, match="the bytes of tensor '0' are missing"):
        torch_file.load(archive.packed(without))


def test_a_big_endian_file_is_rejected():
    members = archive.unpacked(saved(torch.arange(3)))
    (name,) = [name for name in members if name.endswith("byteorder")]
    with pytest.raises(FormatError, match="big-endian"):
        torch_file.load(archive.packed({**members, name: b"big"}))


def test_a_zip_that_unpacks_to_too_much_is_rejected_before_it_is_unpacked(monkeypatch):
    monkeypatch.setattr(archive, "MAX_BYTES", 1000)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data.pkl", bytes(100_000))
    with pytest.raises(FormatError, match="it unpacks to 100000 bytes, more than 1000"):
        torch_file.load(file.getvalue())


def test_an_oddly_compressed_zip_is_rejected():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_BZIP2) as odd:
        odd.writestr("archive/data.pkl", b"N.")
    with pytest.raises(FormatError, match="encrypted or uses an unknown compression"):
        torch_file.load(file.getvalue())
