"""Layers of a model: embedding, linear map, RMSNorm, SwiGLU feed-forward network.

Parameters have Hugging Face's names, so that a checkpoint's names are module paths. The kernels'
`plain` package computes them; `row_block` selects its batch-invariant form. The FP8 model uses the
embedding, the norms and the head from here, in bfloat16.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise_kernels.plain.linear import by_row_blocks, linear
from equipoise_kernels.plain.rms_norm import rms_norm


class Embedding(nn.Module):
    """Looks up a row of `weight` [vocabulary, dim] for each token."""

    def __init__(self, num_tokens: int, dim: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        # Not torch's: it fills the weight, and filling a meta tensor imports a compiler.
        self.weight = nn.Parameter(torch.empty(num_tokens, dim, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        """Int64 tokens [...] to [..., dim]."""
        return functional.embedding(tokens, self.weight)


class Linear(nn.Module):
    """y = x W^T without bias, on rows [T, in]; `weight` is [out, in]."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        row_block: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.row_block = row_block
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim, dtype=dtype))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Rows [T, in] to rows [T, out]."""
        return linear(x_TD, self.weight, row_block=self.row_block)


class RMSNorm(nn.Module):
    """Rows [T, dim] divided by their root mean square, times `weight` [dim]."""

    def __init__(
        self,
        dim: int,
        *,
        eps: float,
        row_block: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.row_block = row_block
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Rows [T, dim] to rows of the same shape and dtype."""
        return rms_norm(x_TD, self.weight, self.eps, row_block=self.row_block)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) on rows [T, dim]: dense layers and shared experts."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        row_block: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.row_block = row_block
        self.gate_proj = Linear(dim, hidden_dim, row_block=row_block, dtype=dtype)
        self.up_proj = Linear(dim, hidden_dim, row_block=row_block, dtype=dtype)
        self.down_proj = Linear(hidden_dim, dim, row_block=row_block, dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Rows [T, dim] to rows of the same shape; T may be 0."""
        gate_TI = by_row_blocks(functional.silu, self.gate_proj(x_TD), row_block=self.row_block)
        y_TD: Tensor = self.down_proj(gate_TI * self.up_proj(x_TD))
        return y_TD
