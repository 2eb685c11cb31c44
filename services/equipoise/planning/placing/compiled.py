"""`compiled` and `part`: how planning turns loops over arrays into machine code.

Functions marked with them take and return NumPy arrays and numbers only, keep to one file each (the
compiler's cache does not notice a change in another file), and hold no lock of the interpreter, so
that a caller's threads run beside them. The first call compiles, or loads what an earlier process
compiled: see `equipoise.planning.warm_up`.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function on its first call for the types it is called with, and keep the result.

    Machine code is kept in `NUMBA_CACHE_DIR`, or else beside the source or in the user's cache
    folder; where none of them can be written, each process compiles for itself.
    """
    return _compiled(function)


def part(function: Function) -> Function:
    """Compile a function that only compiled ones call: without a way in from Python, so sooner."""
    return _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _compiled(function: Function, **options: Any) -> Function:
    try:
        made = numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
    except RuntimeError:  # No folder for the cache.
        made = numba.njit(nogil=True, error_model="numpy", **options)(function)
    return cast("Function", made)
