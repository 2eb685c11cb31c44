"""What of an engine's weights can be moved, and what is rejected in words."""

import ctypes
import mmap

import pytest
import torch
from torch import nn

from equipoise.engines.errors import UnsupportedEngineError
from equipoise.engines.slots import EngineSlots, while_in_use
from equipoise.rank.errors import NotHeldError, StageRejectedError
from tests.engines.seats import Ranks

NO_ACCESS, READ_AND_WRITE = 0, 3
TABLE = [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, 0]]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 8, 4).transpose(1, 2),
        torch.zeros(1, 8).expand(2, 8),
        torch.zeros(4)[::2],
        torch.zeros(2, 8)[:, ::2],
    ],
    ids=["transposed", "shared", "scales with gaps", "elements with gaps"],
)
def test_rows_that_cannot_be_copied_as_bytes_are_rejected_before_anything_is_staged(tensor):
    with pytest.raises(UnsupportedEngineError, match="rows cannot be copied as bytes"):
        EngineSlots([torch.zeros(2, 4), tensor])


def test_rows_with_room_between_them_are_copied():
    slots = EngineSlots([torch.zeros(2, 8)[:, :4]])
    slots.stage({1: torch.full((16,), 7, dtype=torch.uint8)})(lambda *_tensors: None)
    assert slots.read(1).tolist() == [7] * 16
    assert slots.read(0).tolist() == [0] * 16


def test_tensors_of_different_lengths_are_rejected():
    with pytest.raises(UnsupportedEngineError, match=r"lengths \(\(2, 4\), \(4, 4\)\)"):
        EngineSlots([torch.zeros(2, 4), torch.zeros(4, 4)])


def test_tables_of_other_numbers_of_slots_are_rejected(monkeypatch):
    tensors = Ranks._tensors
    monkeypatch.setattr(
        Ranks,
        "_tensors",
        lambda self, rank, seed_of: [
            [one[:2] for one in layer] for layer in tensors(self, rank, seed_of)
        ][:1],
    )
    with pytest.raises(
        UnsupportedEngineError, match=r"2 layers of 6 .* of \[2\] slots in 1 layers"
    ):
        Ranks(TABLE, num_experts=4)


def test_nobody_reads_slots_whose_memory_is_released():
    """Here the memory really is gone: a read would end this process."""
    pages = mmap.mmap(-1, 1 << 20)
    tensor = torch.frombuffer(pages, dtype=torch.uint8).view(4, -1)
    slots = EngineSlots([tensor])
    slots.read(0)
    slots.close()
    _protect(tensor, NO_ACCESS)
    try:
        with pytest.raises(NotHeldError, match="the engine sleeps"):
            slots.read(0)
    finally:
        _protect(tensor, READ_AND_WRITE)
    slots.open()
    assert not slots.read(0).any()


def _protect(tensor, access):
    size = ctypes.c_size_t(tensor.numel())
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(tensor.data_ptr()), size, access) == 0


def test_layers_whose_experts_differ_in_size_are_rejected(monkeypatch):
    tensors = Ranks._tensors

    def uneven(self, rank, seed_of):
        first, second = tensors(self, rank, seed_of)
        return [first, second[:1]]

    monkeypatch.setattr(Ranks, "_tensors", uneven)
    with pytest.raises(UnsupportedEngineError, match="6 bytes in one layer and 10 in another"):
        Ranks(TABLE, num_experts=4)


def test_no_tables_are_made_once_the_engine_computes_with_other_memory():
    model = nn.Module()
    model.w13 = nn.Parameter(torch.ones(2, 4), requires_grad=False)
    scales = torch.ones(2)  # Not a parameter: nothing is known of it.
    make = while_in_use(str, [EngineSlots([model.w13.data, scales])], model)
    model.w13.data.add_(1)
    assert make("layout") == "layout"
    model.w13 = nn.Parameter(model.w13.data.clone(), requires_grad=False)
    with pytest.raises(StageRejectedError, match="other memory: restart it"):
        make("layout")
