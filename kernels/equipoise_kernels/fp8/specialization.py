"""What a kernel is compiled for: argument types, constants, warps and stages.

Owns the description only. It lets `codegen` compile every committed configuration on a machine
without a GPU, from the same names that launchers use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialization:
    """One compilation of a kernel.

    Attributes:
        kernel: a function under `jit.jit`.
        name: for messages.
        signature: Triton's type of each argument, "constexpr" for constants.
        constants: values of the constants.
        aligned: names of the arguments that are multiples of 16, as launches find them.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        ctas_per_sm: programs that must fit on one multiprocessor.
        min_accumulators: float32 sums a thread holds for an FP8 product; 0 for other kernels.
        flags: "release" or "acquire" for a kernel that tells other devices so; else empty.
        fuses_products: whether a product may be fused into a sum, unlike in torch.
        has_wide_products: whether it multiplies 16-bit numbers by warp groups.
    """

    kernel: Any
    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int
    ctas_per_sm: int
    min_accumulators: int
    flags: str
    fuses_products: bool
    has_wide_products: bool


def specialization(
    kernel: Any,
    *,
    name: str,
    arguments: str,
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int = 3,
    ctas_per_sm: int = 1,
    min_accumulators: int = 0,
    flags: str = "",
    fuses_products: bool = True,
    has_wide_products: bool = False,
) -> Specialization:
    """Describe a compilation.

    Args:
        kernel: a function under `jit.jit`.
        name: for messages.
        arguments: Triton's types of the arguments before the constants, separated by blanks. "i32"
            is any number, "i32:16" one that is a multiple of 16; pointers always are.
        constants: values by name.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        ctas_per_sm: programs that must fit on one multiprocessor.
        min_accumulators: float32 sums a thread holds for an FP8 product.
        flags: "release" or "acquire" for a kernel that tells other devices so.
        fuses_products: whether a product may be fused into a sum.
        has_wide_products: whether it multiplies 16-bit numbers by warp groups.
    """
    types = arguments.split()
    names = [argument for argument in kernel.arg_names if argument not in constants]
    assert len(names) == len(types), f"{name}: {len(types)} types for arguments {names}"
    given = dict(zip(names, types, strict=True))
    return Specialization(
        kernel=kernel,
        name=name,
        signature={
            argument: given[argument].removesuffix(":16") if argument in given else "constexpr"
            for argument in kernel.arg_names
        },
        constants=dict(constants),
        aligned=tuple(a for a, kind in given.items() if kind[0] == "*" or kind.endswith(":16")),
        num_warps=num_warps,
        num_stages=num_stages,
        ctas_per_sm=ctas_per_sm,
        min_accumulators=min_accumulators,
        flags=flags,
        fuses_products=fuses_products,
        has_wide_products=has_wide_products,
    )
