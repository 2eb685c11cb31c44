import subprocess
import sys

import pytest

from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.configurations import Entry
from equipoise_kernels.fp8.gemm.dense import GemmConfig
from equipoise_kernels.fp8.gemm.grouped import GroupedGemmConfig

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from equipoise_kernels.fp8.quant.group_quant import group_quant
from equipoise_kernels.fp8.quant.weight_quant import quantize_weight
from equipoise_kernels.fp8.gemm.dense import gemm
rows = group_quant(torch.ones(2, 128))
print(gemm(rows, quantize_weight(torch.ones(3, 128)), dtype=torch.float32)[1, 2].round().item())
"""


def test_small_launches_swap_their_operands_and_large_ones_do_not():
    def chosen(rows):
        return configurations.choose("gemm", GemmConfig, rows=rows, shape=(24576, 1536))

    assert chosen(1) == chosen(16)
    assert chosen(16).swap_ab
    assert chosen(16).block_m == 16
    assert not chosen(4096).swap_ab
    assert configurations.choose("grouped_gemm", GroupedGemmConfig, rows=16).block_m == 16


def test_weights_with_few_columns_split_k():
    def chosen(shape):
        return configurations.choose("gemm", GemmConfig, rows=1, shape=shape)

    assert chosen((576, 7168)).split_k > chosen((4096, 7168)).split_k > 1
    assert chosen((24576, 1536)).split_k == 1


def test_entries_are_tried_in_order_and_come_back_from_a_file(tmp_path):
    entries = (
        Entry(max_rows=8, shapes=((1, 2), (3, 4)), config={"a": 1}),
        Entry(max_rows=8, config={"a": 2}),
        Entry(config={"a": 3}),
    )
    path = tmp_path / "device" / "gemm.json"
    configurations.write(path, entries, origin={"measured": "never"})
    back = configurations.read(path)
    assert back == entries
    assert [e.fits(8, (3, 4)) for e in back] == [True, True, True]
    assert [e.fits(8, (1, 4)) for e in back] == [False, True, True]
    assert [e.fits(9, (1, 2)) for e in back] == [False, False, True]


@pytest.mark.parametrize("last", [Entry(max_rows=8, config={}), Entry(shapes=((1, 2),), config={})])
def test_a_file_whose_last_entry_does_not_fit_every_launch_is_a_fault(tmp_path, last):
    configurations.write(tmp_path / "x.json", [last], origin={})
    with pytest.raises(AssertionError, match="every launch"):
        configurations.read(tmp_path / "x.json")


def test_files_of_the_same_device_come_first_and_then_versions_next_to_this_one(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(configurations, "_FOLDER", tmp_path)
    default = configurations.DEFAULT_DEVICE
    for device, triton in (("h200", "3.9"), ("h200", "3.10"), (default, "3.6"), (default, "3.7")):
        path = configurations.path_of("gemm", device=device, triton=triton)
        configurations.write(path, [Entry(config={})], origin={})

    def found(device, triton):
        path = configurations.nearest("gemm", device=device, triton=triton)
        return f"{path.parent.parent.name} {path.parent.name}"

    assert found("h200", "3.9") == "h200 triton_3.9"
    assert found("h200", "3.11") == found("h200", None) == "h200 triton_3.10"
    assert found("h200", "3.7") == "h200 triton_3.9"
    assert found("h20", "3.8") == f"{default} triton_3.7"
    assert found("h20", "3.5") == f"{default} triton_3.6"


def test_every_committed_file_records_its_origin():
    for operation in configurations.operations():
        for place in configurations.committed(operation):
            device, triton = place.split("/triton_")
            text = configurations.path_of(operation, device=device, triton=triton).read_text()
            assert '"measured":' in text


def test_everything_but_the_kernels_works_without_triton():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False
    )
    assert done.stdout == "128.0\n", done.stderr
