"""Count rows per physical slot: the sensor of the control plane."""

import torch
from torch import Tensor


def count_rows(slots_N: Tensor, *, num_slots: int) -> Tensor:
    """Rows per slot, int64 [num_slots], of slots int64 [N] in [0, num_slots); N may be 0."""
    return torch.bincount(slots_N, minlength=num_slots)
