"""What a kernel is compiled for: argument types, constants, warps and stages.

`testing.codegen` compiles every committed configuration from these on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equipoise_kernels.fp8.jit import VARYING


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialization:
    """One compilation of a kernel."""

    kernel: Any
    """A function decorated with `jit.jit`."""
    name: str
    """For messages."""
    types: Mapping[str, str]
    """Triton's type by arguments, separated by spaces; an argument that is not named is "i32"."""
    multiples_of_16: str = ""
    """Arguments that are multiples of 16 at launch; all pointers are, without being named."""
    options: Mapping[str, Any]
    """As at launch: values of the constants, and `num_warps`."""
    ctas_per_sm: int = 1
    """Programs that must fit on one multiprocessor."""
    min_accumulators: int = 0
    """Float32 accumulators per thread of an FP8 product; 0 for other kernels."""
    flags: str = ""
    """How it synchronises with other devices: "release", "acquire", or empty if it does not."""
    fuses_products: bool = True
    """Whether a multiplication may be fused into an addition, unlike in torch."""
    is_product: bool = False
    """Whether it multiplies matrices, step by step."""
    has_wide_products: bool = False
    """Whether it multiplies 16-bit matrices with warp groups."""
    max_stack_share: float = 0.0
    """Share of a step's instructions that may use the stack, for values that every step needs."""

    def __post_init__(self) -> None:
        arguments = list(self.kernel.arg_names)
        typed = {name for names in self.types for name in names.split()}
        named = {*typed, *self.multiples_of_16.split(), *self.constants}
        unknown = (named - {*arguments}) | (typed & {*self.constants})
        unknown |= {*self.multiples_of_16.split()} & {*VARYING}
        assert not unknown, f"{self.name}: {sorted(unknown)} are not arguments of {arguments}"
        missing = [name for name in arguments if name.isupper() and name not in self.constants]
        assert not missing, f"{self.name}: no value for the constants {missing}"

    @property
    def constants(self) -> dict[str, Any]:
        """Values of the constants."""
        return {name: value for name, value in self.options.items() if name != "num_warps"}

    @property
    def signature(self) -> dict[str, str]:
        """Triton's type of each argument, in order; "constexpr" for constants."""
        typed = {name: kind for names, kind in self.types.items() for name in names.split()}
        typed |= dict.fromkeys(self.constants, "constexpr")
        return {name: typed.get(name, "i32") for name in self.kernel.arg_names}

    @property
    def aligned(self) -> tuple[str, ...]:
        """Arguments that are multiples of 16, as Triton finds them at launch."""
        multiples = self.multiples_of_16.split()
        return tuple(n for n, kind in self.signature.items() if kind[0] == "*" or n in multiples)
