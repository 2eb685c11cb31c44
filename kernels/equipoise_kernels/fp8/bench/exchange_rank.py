"""One rank of gate E3: exchanges in a process of its own, until one of the ranks is killed.

    python -m equipoise_kernels.fp8.bench.exchange_rank RANK ARGUMENTS

ARGUMENTS is `Arguments` as JSON, the same for all ranks. Prints an `ExchangeRecord` as JSON. The
last rank kills itself after the exchanges; the next exchange of the others must name it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from equipoise_kernels.errors import AllToAllError
from equipoise_kernels.fp8 import selection
from equipoise_kernels.fp8.all_to_all.buffer import EpBuffer
from equipoise_kernels.fp8.all_to_all.opening import open_buffer
from equipoise_kernels.fp8.all_to_all.order import weighted_sum
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.jit import is_interpreting

_FORMING_S = 60.0
_SKEW_S = 1e-3
# Exchanges between two checks whether there is time for more; all ranks agree on it.
_EXCHANGES_AT_A_TIME = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Input of all ranks."""

    num_ranks: int
    """Number of processes."""
    rendezvous: str
    """A file that does not exist yet."""
    device: str
    """"cuda", or "cpu" with kernels in the interpreter."""
    exchanges: int
    """How many to make."""
    within_s: float
    """No exchange starts later than this."""
    timeout_s: float
    """How long an exchange waits for a rank."""
    seed: int
    """Seed of rows, routes and pauses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRecord:
    """What a rank observed."""

    exchanges: int
    """Exchanges made."""
    wrong: int
    """Exchanges whose sums were not correct to the last bit."""
    missing: tuple[int, ...]
    """The ranks that the last exchange named."""
    words: str
    """Its message."""
    waited_s: float
    """How long it took to fail."""


def main() -> None:
    """Form the group, make exchanges, and lose one of the ranks."""
    rank, arguments = int(sys.argv[1]), Arguments(**json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)  # how the interpreter reads loop bounds
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.rendezvous}",
        rank=rank,
        world_size=arguments.num_ranks,
        timeout=timedelta(seconds=_FORMING_S),
    )
    # Skips self-tests, which would run every operation on every rank; the exchanges test more.
    selection.start(selection.resolve("triton", _no_obstacle))
    with _right_casts():
        seen = _exchanges(rank, arguments)
    sys.stdout.write(json.dumps(asdict(seen)) + "\n")


def _no_obstacle(_operation: str, _backend: str) -> None:
    return None


def _right_casts() -> AbstractContextManager[None]:
    if not is_interpreting():
        return nullcontext()
    from equipoise_kernels.fp8.testing.interpreter import corrected_casts  # noqa: PLC0415

    return corrected_casts()


def _exchanges(rank: int, arguments: Arguments) -> ExchangeRecord:
    shape = EpShape(
        rank=rank,
        num_ranks=arguments.num_ranks,
        slots_per_rank=4,
        top_k=4,
        dim=512,
        max_tokens=16,
        payload=Payload.BF16,
    )
    assert dist.group.WORLD is not None
    opened = open_buffer(
        shape, group=dist.group.WORLD, device=arguments.device, timeout_s=arguments.timeout_s
    )
    buffer = opened.buffer
    generator = torch.Generator(arguments.device).manual_seed(arguments.seed + rank)
    rng = random.Random(arguments.seed + rank)  # noqa: S311  pauses, not secrets
    made, wrong, start = 0, 0, time.monotonic()
    while made < arguments.exchanges and _all_have_time(start, arguments.within_s):
        for _ in range(min(_EXCHANGES_AT_A_TIME, arguments.exchanges - made)):
            wrong += not _is_right(buffer, shape, generator, rng)
            made += 1
    if rank == arguments.num_ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    missing: tuple[int, ...] = ()
    words = "nothing was noticed"
    try:
        _is_right(buffer, shape, generator, rng)
    except AllToAllError as error:
        missing, words = error.ranks, str(error)
    return ExchangeRecord(
        exchanges=made,
        wrong=wrong,
        missing=missing,
        words=words,
        waited_s=time.monotonic() - start,
    )


def _all_have_time(start: float, within_s: float) -> bool:
    has_time = torch.tensor([time.monotonic() - start < within_s], dtype=torch.int32)
    dist.all_reduce(has_time, op=dist.ReduceOp.MIN)
    return bool(has_time)


def _is_right(
    buffer: EpBuffer, shape: EpShape, generator: torch.Generator, rng: random.Random
) -> bool:
    """Make one exchange of new rows with experts that double them; some ranks have no tokens."""

    def drawn(columns: int) -> Tensor:
        size = (num_tokens, columns)
        return torch.rand(size, generator=generator, device=generator.device)

    num_tokens = rng.randint(0, shape.max_tokens)
    x, weights_TK = drawn(shape.dim).to(shape.payload.answer_dtype), drawn(shape.top_k)
    slots_TK = drawn(shape.num_slots).topk(shape.top_k).indices
    time.sleep(rng.random() * _SKEW_S)
    came = buffer.dispatch(x, slots_TK)
    assert isinstance(came.rows, Tensor)
    time.sleep(rng.random() * _SKEW_S)
    summed = buffer.combine(2 * came.rows, came.handle, weights_TK=weights_TK)
    wanted = weighted_sum((2 * x).unsqueeze(1).expand(-1, shape.top_k, -1), weights_TK)
    return torch.equal(summed, wanted)


if __name__ == "__main__":
    main()
