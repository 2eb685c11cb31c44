import torch

from equipoise_kernels.expert_load import count_rows


def test_rows_are_counted_per_slot():
    slots = torch.randint(0, 9, (200,))
    naive = [sum(1 for slot in slots.tolist() if slot == wanted) for wanted in range(12)]
    assert count_rows(slots, num_slots=12).tolist() == naive


def test_no_rows_count_as_zero_for_every_slot():
    counts = count_rows(torch.empty(0, dtype=torch.int64), num_slots=3)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [0, 0, 0]
