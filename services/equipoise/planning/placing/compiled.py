"""`compiled` and `part`: compile loops over arrays to machine code with Numba.

Functions marked with them take and return NumPy arrays and numbers only. They use compiled
functions and constants of their own file only, because Numba's cache does not notice a change in
another file.
They release the GIL, so other threads run meanwhile. The first call compiles, or loads what an
earlier process compiled: see `equipoise.planning.warm_up`.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function on its first call for the argument types, and cache the result.

    The cache is in `NUMBA_CACHE_DIR`, else beside the source or in the user's cache folder. If none
    of them is writable, each process compiles for itself.
    """
    return _compiled(function)


def part(function: Function) -> Function:
    """Compile a function that only compiled ones call; omitting the Python wrapper saves time."""
    return _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _compiled(function: Function, **options: Any) -> Function:
    try:
        made = numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
    except RuntimeError:  # No writable cache folder.
        made = numba.njit(nogil=True, error_model="numpy", **options)(function)
    return cast("Function", made)
