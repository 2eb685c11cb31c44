import json
import os
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from equipoise_model.checkpoint_shard import CheckpointError, Shard

TENSORS = {
    "a": torch.arange(40, dtype=torch.float32).view(10, 4),
    "b": torch.arange(6, dtype=torch.bfloat16),
    "c": torch.arange(9, dtype=torch.float32).to(torch.float8_e4m3fn).view(3, 3),
}


@pytest.fixture
def file(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def written(file, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def rejected(file, complaint):
    with pytest.raises(CheckpointError, match=complaint) as caught:
        Shard.open(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("max_bytes", [1, 33, 1000])
def test_pieces_of_a_tensor_are_its_rows(file, name, max_bytes):
    shard = Shard.open(file)
    pieces = [(rows, part.clone()) for rows, part in shard.pieces(name, max_bytes=max_bytes)]
    whole = torch.cat([part.view(torch.uint8) for _, part in pieces])
    assert torch.equal(whole, TENSORS[name].view(torch.uint8))
    assert [row for rows, _ in pieces for row in range(rows.start, rows.stop)] == list(
        range(len(TENSORS[name]))
    )


def test_pieces_keep_to_a_multiple_of_rows(file):
    rows = [rows for rows, _ in Shard.open(file).pieces("a", max_bytes=20, multiple=4)]
    assert rows == [slice(0, 4), slice(4, 8), slice(8, 10)]


def test_a_tensor_can_be_read_again(file):
    shard = Shard.open(file)
    for _ in range(3):
        (piece,) = [part.clone() for _, part in shard.pieces("a", max_bytes=1000)]
        assert torch.equal(piece, load_file(file)["a"])


def test_a_missing_file_is_named(tmp_path):
    rejected(tmp_path / "none.safetensors", "is missing")


def test_a_folder_is_not_a_file(tmp_path):
    rejected(tmp_path, "cannot be read")


def test_a_file_that_shrinks_while_it_is_open_is_named(file):
    shard = Shard.open(file)
    os.truncate(file, 10)
    words = r"x\.safetensors: a cannot be read: .*truncated to 10 bytes.*copy the file again"
    with pytest.raises(CheckpointError, match=words):
        next(shard.pieces("a", max_bytes=1000))


TRUNCATES = """
import os, sys
from pathlib import Path
from equipoise_model.checkpoint_shard import CheckpointError, Shard

file = Path(sys.argv[1])
pieces = Shard.open(file).pieces("a", max_bytes=16)
_, piece = next(pieces)
os.truncate(file, 0)
print(piece.sum().item())
try:
    next(pieces)
except CheckpointError as error:
    print(error)
"""


def test_a_file_that_is_truncated_while_it_is_read_kills_no_process(file):
    # A process of its own: a mapped page that is gone ends it with SIGBUS.
    done = subprocess.run(
        [sys.executable, "-c", TRUNCATES, file],
        stdout=subprocess.PIPE,
        timeout=120,
        check=False,
        text=True,
    )
    assert done.returncode == 0
    row, fault = done.stdout.splitlines()
    assert float(row) == TENSORS["a"][0].sum()
    assert f"{file}: a cannot be read" in fault


def test_a_file_may_be_larger_than_memory(tmp_path):
    file = tmp_path / "x.safetensors"
    rows, columns = 1 << 20, 1 << 19  # a TiB, all of it a hole
    header = {"a": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, 1 << 40]}}
    written(file, header)
    os.truncate(file, file.stat().st_size + (1 << 40))
    with file.open("r+b") as stream:
        stream.seek(-2, os.SEEK_END)
        stream.write(b"\x80\x3f")
    shard = Shard.open(file)
    pieces = shard.pieces("a", max_bytes=1 << 20)
    assert next(pieces)[1].sum() == 0
    last = torch.empty(2, dtype=torch.uint8)
    shard._read("a", shard.tensors["a"].end - 2, last)
    assert last.view(torch.bfloat16).item() == 1.0


@pytest.mark.parametrize("keep", [0, 4, 100])
def test_a_file_without_its_whole_header_is_damaged(file, keep):
    file.write_bytes(file.read_bytes()[:keep])
    rejected(file, "is damaged.*header")


def test_a_truncated_file_names_the_tensor_that_is_cut(file):
    last = max(Shard.open(file).tensors.items(), key=lambda item: item[1].end)[0]
    file.write_bytes(file.read_bytes()[:-1])
    rejected(file, f"is damaged.*{last} ends at byte")


def test_bytes_after_the_last_tensor_are_rejected(file):
    file.write_bytes(file.read_bytes() + b"x")
    rejected(file, "is damaged.*its tensors end")


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (b"not json", "not safetensors"),
        (b"[]", "not safetensors"),
        (b"[" * 20_000, "not safetensors"),
        (b'{"a": 1, "a": 2}', "not safetensors.*twice"),
        ({"a": {}}, "not safetensors"),
        ({"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}, "not safetensors"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "not safetensors"),
        ({"a": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}, "a has the unknown"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "a has 4 bytes"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, "a has sizes"),
        ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, "a has sizes"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "a starts at byte"),
    ],
)
def test_a_header_that_makes_no_sense_is_rejected(file, header, complaint):
    written(file, header, b"0000")
    rejected(file, complaint)


def test_tensors_that_overlap_are_rejected(file):
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    written(file, {"a": one, "b": one}, b"0000")
    rejected(file, "b starts at byte")
