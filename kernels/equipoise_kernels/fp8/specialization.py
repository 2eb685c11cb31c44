"""What a kernel is compiled for: argument types, constants, warps and stages.

`testing.codegen` compiles every committed configuration from these on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialization:
    """One compilation of a kernel."""

    kernel: Any
    """A function decorated with `jit.jit`."""
    name: str
    """For messages."""
    signature: Mapping[str, str]
    """Triton's type of each argument, "constexpr" for constants."""
    constants: Mapping[str, Any]
    """Values of the constants."""
    aligned: tuple[str, ...]
    """Arguments that are multiples of 16, as Triton finds them at launch."""
    num_warps: int
    """Warps per program."""
    num_stages: int
    """Depth of the software pipeline."""
    ctas_per_sm: int
    """Programs that must fit on one multiprocessor."""
    min_accumulators: int
    """Float32 accumulators per thread of an FP8 product; 0 for other kernels."""
    flags: str
    """How it synchronises with other devices: "release", "acquire", or empty if it does not."""
    fuses_products: bool
    """Whether a multiplication may be fused into an addition, unlike in torch."""
    has_wide_products: bool
    """Whether it multiplies 16-bit matrices with warp groups."""


def specialization(
    kernel: Any,
    *,
    name: str,
    types: Mapping[str, str],
    multiples_of_16: Sequence[str] = (),
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int = 3,
    ctas_per_sm: int = 1,
    min_accumulators: int = 0,
    flags: str = "",
    fuses_products: bool = True,
    has_wide_products: bool = False,
) -> Specialization:
    """Describe a compilation; see the fields of `Specialization`.

    Args:
        kernel: a function decorated with `jit.jit`.
        name: for messages.
        types: Triton's type by argument; an argument that is not named is "i32".
        multiples_of_16: arguments that are multiples of 16; all pointers are, without being named.
        constants: values by argument.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
        ctas_per_sm: programs that must fit on one multiprocessor.
        min_accumulators: float32 accumulators per thread of an FP8 product.
        flags: "release", "acquire" or empty.
        fuses_products: whether a multiplication may be fused into an addition.
        has_wide_products: whether it multiplies 16-bit matrices with warp groups.
    """
    arguments = list(kernel.arg_names)
    unknown = ({*types, *multiples_of_16, *constants} - {*arguments}) | ({*types} & {*constants})
    assert not unknown, f"{name}: {sorted(unknown)} are not arguments of {arguments}"
    missing = [
        argument for argument in arguments if argument.isupper() and argument not in constants
    ]
    assert not missing, f"{name}: no value for the constants {missing}"
    return Specialization(
        kernel=kernel,
        name=name,
        signature={
            argument: "constexpr" if argument in constants else types.get(argument, "i32")
            for argument in arguments
        },
        constants=dict(constants),
        aligned=tuple(
            argument
            for argument in arguments
            if argument in multiples_of_16 or types.get(argument, "").startswith("*")
        ),
        num_warps=num_warps,
        num_stages=num_stages,
        ctas_per_sm=ctas_per_sm,
        min_accumulators=min_accumulators,
        flags=flags,
        fuses_products=fuses_products,
        has_wide_products=has_wide_products,
    )
