"""Named ranges of a step in profiler traces, which `equipoise overlap` reads.

They cost a microsecond while no profiler runs. A captured CUDA graph has none.
"""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler
from torch.profiler import record_function

_NOTHING = nullcontext()


def named(name: str) -> AbstractContextManager[object]:
    """Return a range called `equipoise.NAME`, or nothing while no profiler runs."""
    if not profiler._is_profiler_enabled:  # noqa: SLF001  # it has no public name
        return _NOTHING
    return record_function(f"equipoise.{name}")


def named_layer(index: int, *, num_dense: int) -> AbstractContextManager[object]:
    """Return the range of a model's layer. MoE layers are counted from 0, after dense ones."""
    return named(f"dense_layer {index}" if index < num_dense else f"layer {index - num_dense}")
