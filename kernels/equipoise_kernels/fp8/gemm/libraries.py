"""Dense products by libraries, if installed: cuBLAS through torch, and DeepGEMM.

Translates this package's formats to theirs. A library is offered only if it is installed, the
device is a Hopper GPU and the self-test passed; see `selection`.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor
from torch.nn import functional

from equipoise_kernels.formats import SCALE_ALIGNMENT, QuantizedRows, QuantizedWeight

# What cuBLAS's block-scaled product requires (its documentation, section 3.1.4.5.1), and torch.
SCALED_MM_ROWS = 4
SCALED_MM_COLUMNS = 16


def gemm_scaled_mm(a: QuantizedRows, weight: QuantizedWeight, *, out: Tensor) -> None:
    """Multiply with cuBLAS (12.9 or later), 1 x 128 and 128 x 128 scales; computes bfloat16.

    Rows must be a multiple of SCALED_MM_ROWS, outputs one of SCALED_MM_COLUMNS; `gemm.dense` sends
    other rows elsewhere.
    """
    # cuBLAS requires columns of scales without gaps, and rows of weight scales padded to 16 bytes.
    missing = -weight.scales.shape[1] % SCALE_ALIGNMENT
    weight_scales = functional.pad(weight.scales, (0, missing)) if missing else weight.scales
    kinds, unswizzled = functional.ScalingType, functional.SwizzleType.NO_SWIZZLE.value
    is_direct = out.dtype is torch.bfloat16 and out.is_contiguous()
    result = out if is_direct else out.new_empty(out.shape, dtype=torch.bfloat16)
    # The public `scaled_mm` allocates its result, and copying it takes as long as the product.
    torch.ops.aten._scaled_mm_v2.out(  # noqa: SLF001
        a.codes,
        weight.codes.t(),
        [a.scales.t().contiguous().t()],
        [kinds.BlockWise1x128.value],
        [unswizzled],
        [weight_scales.t()],
        [kinds.BlockWise128x128.value],
        [unswizzled],
        None,
        torch.bfloat16,
        out=result,
    )
    if not is_direct:
        out.copy_(result)


def gemm_deep_gemm(a: QuantizedRows, weight: QuantizedWeight, *, out: Tensor) -> None:
    """Multiply with DeepGEMM's dense kernel; float32 scales, as on Hopper; computes bfloat16."""
    library = importlib.import_module("deep_gemm")
    result = out if out.dtype is torch.bfloat16 else torch.empty_like(out, dtype=torch.bfloat16)
    library.fp8_gemm_nt((a.codes, a.scales), (weight.codes, weight.scales), result)
    if result is not out:
        out.copy_(result)
