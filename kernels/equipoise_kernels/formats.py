"""Block-scaled FP8: what codes and scales are, and their layout in memory.

Owns the formats of the FP8 data plane and of FP8 checkpoints, those of DeepSeek-V3 (arXiv
2412.19437, section 3.3) and DeepGEMM. Rows (activations) have a scale for every 1 x 128 group,
weights for every 128 x 128 block; codes are E4M3 (largest value 448).

The arithmetic, in float32, is part of the contract:

    amax    = max(largest |x| of the group, AMAX_FLOOR)
    scale   = amax / 448                                   ScaleFormat.FP32
            = the smallest power of two >= amax / 448      ScaleFormat.UE8M0
    code    = round to nearest even (x * (1 / scale))
    x'      = code * scale

`1 / scale` is one IEEE division per group. An infinite x makes every value of its group NaN; a NaN
affects only itself. UE8M0 scales are computed on bits: a logarithm is wrong next to exact powers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from equipoise_kernels.errors import KernelInputError

CODE = torch.float8_e4m3fn
CODE_MAX = 448.0
GROUP = 128
AMAX_FLOOR = 1e-4
# TMA requires columns of scales to start at multiples of 16 bytes.
SCALE_ALIGNMENT = 4


class ScaleFormat(Enum):
    """Which float32 values scales may have."""

    FP32 = "fp32"
    UE8M0 = "ue8m0"


class ScaleLayout(Enum):
    """Memory layout of rows' scales [.., M, K / 128].

    ROW_MAJOR: contiguous. MN_ALIGNED: the row index runs fastest and each column of scales starts
    at a multiple of 16 bytes: strides (1, M rounded up to 4), as DeepGEMM requires on Hopper.
    """

    ROW_MAJOR = "row_major"
    MN_ALIGNED = "mn_aligned"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRows:
    """Rows in FP8: codes [.., M, K], and scales float32 [.., M, K / 128] in either layout.

    Raises:
        KernelInputError: codes and scales do not match.
    """

    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        require("codes", self.codes, CODE)
        require("scales", self.scales, torch.float32)
        require_groups("codes", self.codes)
        expected = (*self.codes.shape[:-1], self.codes.shape[-1] // GROUP)
        require("scales", self.scales, shape=expected)

    def dequantized(self) -> Tensor:
        """The values, float32 [.., M, K]."""
        return self.codes.float() * self.scales.repeat_interleave(GROUP, dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """Weights in FP8: codes [.., N, K], scales float32 [.., ceil(N / 128), ceil(K / 128)].

    The last block of a dimension may be smaller (DeepSeek-V3 has a weight of 576 rows).

    Raises:
        KernelInputError: codes and scales do not match.
    """

    codes: Tensor
    scales: Tensor
    derived: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What launchers make of the tensors once and use at every launch, by name."""

    def __post_init__(self) -> None:
        require("codes", self.codes, CODE)
        require("scales", self.scales, torch.float32, shape=weight_scale_shape(self.codes.shape))

    def dequantized(self) -> Tensor:
        """The values, float32 [.., N, K]."""
        *_, num_rows, num_columns = self.codes.shape
        tall = self.scales.repeat_interleave(GROUP, dim=-2)[..., :num_rows, :]
        return self.codes.float() * tall.repeat_interleave(GROUP, dim=-1)[..., :num_columns]


def empty_rows(
    shape: Sequence[int],
    *,
    device: torch.device | str,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
) -> QuantizedRows:
    """Allocate uninitialised rows [.., M, K]; K must be a multiple of 128."""
    codes = torch.empty(*shape, dtype=CODE, device=device)
    require_groups("rows", codes)
    scale_shape = (*shape[:-1], shape[-1] // GROUP)
    return QuantizedRows(
        codes=codes, scales=empty_scales(scale_shape, device=device, layout=layout)
    )


def empty_scales(
    shape: Sequence[int], *, device: torch.device | str, layout: ScaleLayout
) -> Tensor:
    """Allocate uninitialised scales [.., M, K / 128] in a layout."""
    if layout is ScaleLayout.ROW_MAJOR:
        return torch.empty(*shape, dtype=torch.float32, device=device)
    *outer, num_rows, num_groups = shape
    aligned = -(-num_rows // SCALE_ALIGNMENT) * SCALE_ALIGNMENT
    storage = torch.empty(*outer, num_groups, aligned, dtype=torch.float32, device=device)
    return storage[..., :num_rows].transpose(-1, -2)


def weight_scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the scales of weights [.., N, K]."""
    *outer, num_rows, num_columns = shape
    return (*outer, -(-num_rows // GROUP), -(-num_columns // GROUP))


def scales_of(amax: Tensor, scale_format: ScaleFormat) -> Tensor:
    """Scales of groups with the given largest absolute values, float32 of the same shape."""
    scales = amax.clamp_min(AMAX_FLOOR) / CODE_MAX
    return scales if scale_format is ScaleFormat.FP32 else next_power_of_two(scales)


def next_power_of_two(scales: Tensor) -> Tensor:
    """Smallest powers of two not below normal positive float32 numbers; infinity stays infinite."""
    bits = scales.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def encode(x: Tensor, scales: Tensor) -> Tensor:
    """Codes of float32 values; scales broadcast over them."""
    return (x * (1.0 / scales)).to(CODE)


def require(
    name: str,
    tensor: Tensor,
    *dtypes: torch.dtype,
    shape: Sequence[int] | None = None,
    dense: bool = False,
    contiguous: bool = False,
    like: Tensor | None = None,
) -> None:
    """Raise KernelInputError unless a tensor is as an operation's contract says.

    Args:
        name: of the tensor, for the message.
        tensor: what to check.
        dtypes: those allowed; any if there are none.
        shape: the exact shape.
        dense: whether columns must be contiguous and rows must not overlap.
        contiguous: whether the whole tensor must be contiguous.
        like: a tensor on the device where it must be.
    """
    if dtypes and tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise KernelInputError(f"{name} must be {names}, not {tensor.dtype}: convert it first")
    # Runs several times per kernel: a list of strides is made only for a message.
    if shape is not None and tensor.shape != tuple(shape):
        raise KernelInputError(f"{name} must be {list(shape)}, not {list(tensor.shape)}")
    if dense and not tensor.is_contiguous():
        _require_dense(name, tensor)
    if contiguous and not tensor.is_contiguous():
        raise KernelInputError(
            f"{name} must be contiguous, not strides {list(tensor.stride())}: call contiguous()"
        )
    if like is not None and tensor.device != like.device:
        raise KernelInputError(f"{name} is on {tensor.device}, the rest on {like.device}: move it")


def _require_dense(name: str, tensor: Tensor) -> None:
    strides = list(tensor.stride())
    if tensor.shape[-1] > 1 and strides[-1] != 1:
        raise KernelInputError(
            f"{name} must have neighbouring columns, not strides {strides}: call contiguous()"
        )
    if tensor.shape[-2] > 1 and strides[-2] < tensor.shape[-1]:
        raise KernelInputError(f"{name}'s rows overlap (strides {strides}): call contiguous()")


def require_groups(name: str, tensor: Tensor) -> None:
    """Raise KernelInputError unless a tensor's rows are whole groups of 128."""
    if tensor.dim() < 2 or tensor.shape[-1] == 0 or tensor.shape[-1] % GROUP != 0:
        raise KernelInputError(
            f"{name} must be [.., rows, K] with K a multiple of {GROUP}, not "
            f"{list(tensor.shape)}: pad K with zeros"
        )
