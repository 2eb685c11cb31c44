"""Imports Triton where it is installed; nothing else imports it.

Every operation's file holds its kernel beside its torch twin, and the twin must work without Triton
(without a GPU, or without Linux). There `jit` returns the function unchanged; it is never launched,
because `selection` offers Triton only where it is installed.

A kernel may only use its module's globals as compile-time constants, so a kernel's file declares
its own with `constant`.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    triton = None
    tl = None
    TensorDescriptor = None

__all__ = [
    "VARYING",
    "TensorDescriptor",
    "constant",
    "is_interpreting",
    "jit",
    "next_power_of_two",
    "tl",
    "triton_version",
]


# Arguments that differ between steps, ranks or layouts. Triton would compile a kernel again for a
# value of 1, and for multiples of 16: in the middle of a step for which other ranks wait.
VARYING = (
    *("layer", "rank", "num_rows", "num_out_rows", "max_rows", "num_pairs", "num_splits"),
    *("table_size", "num_places", "table_stride", "share_stride", "slots_stride"),
    *("is_captured", "slot_multiple", "rows_per_slot", "num_ranks", "slots_per_rank"),
)


def jit(function: Any) -> Any:
    """Compile a function as a kernel: `triton.jit`, or the function itself without Triton."""
    if triton is None:
        return function
    varying = [name for name in inspect.signature(function).parameters if name in VARYING]
    if is_interpreting():
        return triton.jit(function, do_not_specialize=varying)
    return _kernel_class()(function, do_not_specialize=varying)


@cache
def _kernel_class() -> Any:
    """`triton.JITFunction` with a short way to launch what is compiled already.

    Triton binds, specialises and checks all arguments of every launch, which takes longer than most
    kernels of a decode step. This kernel finds the compiled one by the classes of its arguments.
    """

    class Kernel(triton.JITFunction):  # type: ignore[misc]  # untyped
        def __init__(self, function: Any, **options: Any) -> None:
            super().__init__(function, **options)
            self._is_varying = [param.do_not_specialize for param in self.params]
            self._known: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

        def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            classes = tuple(map(_class_of, args, self._is_varying))
            key = classes, tuple(options.items())
            known = self._known.get(key)
            if known is None or warmup:
                compiled = super().run(*args, grid=grid, warmup=warmup, **options)
                if not warmup:
                    constants = tuple(options[name] for name in self.arg_names[len(args) :])
                    self._known[key] = compiled, constants
                return compiled
            compiled, constants = known
            compiled[(*grid, 1, 1)](*args, *constants)
            return compiled

    return Kernel


def _class_of(argument: Any, is_varying: bool) -> Any:
    """All that Triton's specialisation of an argument may depend on."""
    if isinstance(argument, int):
        fits = -(1 << 31) <= argument < 1 << 31
        kind = type(argument)  # booleans are integers too
        return (kind, fits) if is_varying else (kind, fits, argument == 1, argument % 16 == 0)
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0, argument.get_device()
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, tuple(argument.block_shape)
    return type(argument)


def constant(value: Any) -> Any:
    """Make a module's number usable in its kernels: `tl.constexpr`, or the value without Triton."""
    return value if tl is None else tl.constexpr(value)


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`, from 1."""
    return 1 << (number - 1).bit_length()


def triton_version() -> str | None:
    """Major and minor version of the installed Triton, such as "3.6", or None."""
    if triton is None:
        return None
    version: str = triton.__version__
    return ".".join(version.split(".")[:2])


def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)
