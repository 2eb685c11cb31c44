"""Layers in FP8: the linear map, and the SwiGLU feed-forward network.

Parameters have the checkpoint's names, including scales.
"""

import torch
from torch import Tensor, nn

from equipoise_kernels.formats import (
    CODE,
    GROUP,
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

    def __init__(self, in_dim: int, out_dim: int, *, memory: QuantizedWeight | None = None) -> None:
        """`memory` is where the weight is stored; new by default."""
        super().__init__()
        memory = memory or _empty_weight(out_dim, in_dim)
        assert memory.codes.shape == (out_dim, in_dim)
        self.weight = nn.Parameter(memory.codes, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(memory.scales, requires_grad=False)
        self._quantized = QuantizedWeight(codes=self.weight, scales=self.weight_scale_inv)

    def forward(self, rows: QuantizedRows) -> Tensor:
        """Return rows [T, out] in bfloat16."""
        return gemm(rows, self._quantized)


class Fp8SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) on quantised rows: dense layers and shared experts.

    Gate and up share memory, gate first, and are multiplied together.
    """

    def __init__(self, config: ModelConfig, hidden_dim: int) -> None:
        super().__init__()
        self.scale_format = scale_format(config)
        assert hidden_dim % GROUP == 0
        dim, blocks = config.hidden_size, hidden_dim // GROUP
        self._gate_up = _empty_weight(2 * hidden_dim, dim)
        codes, scales = self._gate_up.codes, self._gate_up.scales
        gate = QuantizedWeight(codes=codes[:hidden_dim], scales=scales[:blocks])
        up = QuantizedWeight(codes=codes[hidden_dim:], scales=scales[blocks:])
        self.gate_proj = Fp8Linear(dim, hidden_dim, memory=gate)
        self.up_proj = Fp8Linear(dim, hidden_dim, memory=up)
        self.down_proj = Fp8Linear(hidden_dim, config.hidden_size)

    def forward(self, rows: QuantizedRows) -> Tensor:
        """Return rows [T, dim] in bfloat16."""
        both_TH = gemm(rows, self._gate_up)
        y_TD: Tensor = self.down_proj(silu_mul_quant(both_TH, scale_format=self.scale_format))
        return y_TD


def _empty_weight(out_dim: int, in_dim: int) -> QuantizedWeight:
    shape = (out_dim, in_dim)
    return QuantizedWeight(
        codes=torch.empty(shape, dtype=CODE), scales=torch.empty(weight_scale_shape(shape))
    )


def scale_format(config: ModelConfig) -> ScaleFormat:
    """The scale format of activations: the same as that of the weights."""
    fp8 = config.quantization_config
    assert fp8 is not None
    return ScaleFormat.FP32 if fp8.scale_fmt is None else ScaleFormat.UE8M0
