"""Named ranges of a step in profiler traces, which `equipoise overlap` reads.

They cost a microsecond while no profiler runs. A captured CUDA graph has none.
"""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler
from torch.profiler import record_function

from equipoise_model.overlap import Result, Stages

_NOTHING = nullcontext()


def named(name: str) -> AbstractContextManager[object]:
    """Return a range called `equipoise.NAME`, or nothing while no profiler runs."""
    if not profiler._is_profiler_enabled:  # noqa: SLF001  # it has no public name
        return _NOTHING
    return record_function(f"equipoise.{name}")


def named_stages(stages: Stages[Result], *, layer: int, num_dense: int) -> Stages[Result]:
    """Run a layer's stages, each in the layer's range, which no pause is part of."""
    while True:
        try:
            with named_layer(layer, num_dense=num_dense):
                stage = next(stages)
        except StopIteration as end:
            result: Result = end.value
            return result
        yield stage


def named_layer(index: int, *, num_dense: int) -> AbstractContextManager[object]:
    """Return the range of a model's layer. MoE layers are counted from 0, after dense ones."""
    return named(f"dense_layer {index}" if index < num_dense else f"layer {index - num_dense}")
