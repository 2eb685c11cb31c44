"""Output tensors that reveal out-of-bounds writes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_GUARD = 4
_UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedTensor:
    """A poisoned tensor inside a larger poisoned one.

    Poison is the byte 0xFF: NaN in every floating-point format used here.
    """

    view: Tensor
    storage: Tensor

    def unwritten(self):
        """Which elements of the view are still poison, bool of its shape."""
        return _is_poison(self.view)

    def guard_is_intact(self):
        """Whether every byte outside the view is still poison."""
        before = self.storage.clone()
        inside = self.view.clone()
        _poison(self.view)
        intact = bool((_bytes(self.storage) == 0xFF).all())
        self.storage.copy_(before)
        assert torch.equal(_bytes(inside), _bytes(self.view.clone()))
        return intact


def guarded(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    column_guard: int = 16,
):
    """A poisoned tensor with poisoned rows around it and poisoned columns after each row."""
    *outer, num_rows, num_columns = shape
    storage = torch.empty(
        (*outer, num_rows + 2 * _GUARD, num_columns + column_guard), dtype=dtype, device=device
    )
    _poison(storage)
    view = storage[..., _GUARD : _GUARD + num_rows, :num_columns]
    return GuardedTensor(view=view, storage=storage)


def _poison(tensor: Tensor):
    unsigned = _UNSIGNED[tensor.element_size()]
    tensor.view(unsigned).fill_(0xFF if unsigned is torch.uint8 else -1)


def _is_poison(tensor: Tensor):
    unsigned = _UNSIGNED[tensor.element_size()]
    return tensor.view(unsigned) == (0xFF if unsigned is torch.uint8 else -1)


def _bytes(tensor: Tensor):
    return tensor.contiguous().view(torch.uint8)
