"""Layers in FP8: the linear map, and the SwiGLU feed-forward network.

Parameters have the checkpoint's names, including scales.
"""

import torch
from torch import Tensor, nn

from equipoise_kernels.formats import (
    CODE,
    QuantizedRows,
    QuantizedWeight,
    ScaleFormat,
    weight_scale_shape,
)
from equipoise_kernels.fp8.gemm.dense import gemm
from equipoise_kernels.fp8.quant.silu_mul_quant import silu_mul_quant
from equipoise_model.config import ModelConfig


class Fp8Linear(nn.Module):
    """y = x W^T without bias, on quantised rows [T, in]; `weight` holds codes [out, in]."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        shape = (out_dim, in_dim)
        self.weight = nn.Parameter(torch.empty(shape, dtype=CODE), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(
            torch.empty(weight_scale_shape(shape)), requires_grad=False
        )

    def forward(self, rows: QuantizedRows, *, out: Tensor | None = None) -> Tensor:
        """Return rows [T, out] in bfloat16, written to `out` if given."""
        weight = QuantizedWeight(codes=self.weight, scales=self.weight_scale_inv)
        return gemm(rows, weight, out=out)


class Fp8SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) on quantised rows: dense layers and shared experts."""

    def __init__(self, config: ModelConfig, hidden_dim: int) -> None:
        super().__init__()
        self.scale_format = scale_format(config)
        self.gate_proj = Fp8Linear(config.hidden_size, hidden_dim)
        self.up_proj = Fp8Linear(config.hidden_size, hidden_dim)
        self.down_proj = Fp8Linear(hidden_dim, config.hidden_size)

    def forward(self, rows: QuantizedRows) -> Tensor:
        """Return rows [T, dim] in bfloat16."""
        num_rows, hidden_dim = rows.codes.shape[0], self.gate_proj.weight.shape[0]
        both_TH = rows.scales.new_empty(num_rows, 2 * hidden_dim, dtype=torch.bfloat16)
        self.gate_proj(rows, out=both_TH[:, :hidden_dim])
        self.up_proj(rows, out=both_TH[:, hidden_dim:])
        y_TD: Tensor = self.down_proj(silu_mul_quant(both_TH, scale_format=self.scale_format))
        return y_TD


def scale_format(config: ModelConfig) -> ScaleFormat:
    """The scale format of activations: the same as that of the weights."""
    fp8 = config.quantization_config
    assert fp8 is not None
    return ScaleFormat.FP32 if fp8.scale_fmt is None else ScaleFormat.UE8M0
