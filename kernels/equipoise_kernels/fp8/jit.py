"""Triton, where it is installed: the one place that imports it.

Every operation's file holds its kernel beside its torch twin, and the twin must work on a machine
without Triton (one without a GPU, or without Linux). There `jit` leaves a function as it is: nobody
launches it, because `selection` offers Triton only where it is installed.

Kernels are compiled for constants of the module that defines them, so a kernel's file names its own
as `tl.constexpr`.
"""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    triton = None
    tl = None
    TensorDescriptor = None

__all__ = ["TensorDescriptor", "constant", "is_interpreting", "jit", "tl", "triton_version"]


def jit(function: Any) -> Any:
    """Make a kernel of a function: `triton.jit`, or nothing without Triton."""
    return function if triton is None else triton.jit(function)


def constant(value: Any) -> Any:
    """Make a module's number visible to its kernels: `tl.constexpr`, or the value itself."""
    return value if tl is None else tl.constexpr(value)


def triton_version() -> str | None:
    """Major and minor number of the installed Triton, such as "3.6", or None."""
    if triton is None:
        return None
    version: str = triton.__version__
    return ".".join(version.split(".")[:2])


def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)
