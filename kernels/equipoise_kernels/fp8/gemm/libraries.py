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


def gemm_scaled_mm(a: QuantizedRows, weight: QuantizedWeight, *, out: Tensor) -> None:
    """Multiply with cuBLAS (12.9 or later), 1 x 128 and 128 x 128 scales; computes bfloat16."""
    # cuBLAS requires columns of scales without gaps, and rows of weight scales padded to 16 bytes.
    missing = -weight.scales.shape[1] % SCALE_ALIGNMENT
    weight_scales = functional.pad(weight.scales, (0, missing)) if missing else weight.scales
    kinds = functional.ScalingType
    unswizzled = functional.SwizzleType.NO_SWIZZLE
    result = functional.scaled_mm(
        a.codes,
        weight.codes.t(),
        scale_a=a.scales.t().contiguous().t(),
        scale_recipe_a=kinds.BlockWise1x128,
        scale_b=weight_scales.t(),
        scale_recipe_b=kinds.BlockWise128x128,
        swizzle_a=unswizzled,
        swizzle_b=unswizzled,
        output_dtype=torch.bfloat16,
    )
    out.copy_(result)


def gemm_deep_gemm(a: QuantizedRows, weight: QuantizedWeight, *, out: Tensor) -> None:
    """Multiply with DeepGEMM's dense kernel; float32 scales, as on Hopper."""
    library = importlib.import_module("deep_gemm")
    library.fp8_gemm_nt((a.codes, a.scales), (weight.codes, weight.scales), out)
