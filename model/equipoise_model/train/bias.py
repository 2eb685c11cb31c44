"""Load balancing without an auxiliary loss: the selection bias moves by the sign of its error.

After each step, the bias of an overloaded expert falls by gamma and that of an underloaded one
rises by gamma (DeepSeek-V3, section 2.1.2, arXiv 2412.19437).
"""

import torch
from torch import Tensor


def expert_load(expert_ids_TK: Tensor, *, num_experts: int) -> Tensor:
    """Count the assignments of each logical expert, int64 [E]; they sum to T * K."""
    return torch.bincount(expert_ids_TK.flatten(), minlength=num_experts)


@torch.no_grad()
def update_selection_bias(bias_E: Tensor, load_E: Tensor, *, gamma: float) -> None:
    """Move `bias_E` in place by gamma, given the whole batch's `load_E`; at mean load it stays."""
    load_E = load_E.to(bias_E.dtype)
    bias_E += gamma * torch.sign(load_E.mean() - load_E)
