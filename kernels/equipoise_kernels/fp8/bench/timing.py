"""Measures times on a GPU: medians of CUDA graph replays, alternating between candidates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

TimedCall = Callable[[], Any]

_MIN_LAUNCHES = 20
_REPLAYS = 15
_WARM_UP = 3
_EAGER_CALLS = 100
# Twice the L2 cache of an H200.
_FLUSH_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Median microseconds per call, and the spread: (slowest - fastest) / median replay."""

    median_us: float
    spread: float


class Timer(Protocol):
    """What times cases; tests use one that needs no GPU."""

    def interleaved(self, candidates: Mapping[str, Sequence[TimedCall]]) -> dict[str, Timing]:
        """Time candidates alternately; each is a list of equal calls on different memory."""

    def eager_us(self, call: TimedCall) -> float:
        """Microseconds of host time per call."""

    def kernel_names(self, call: TimedCall) -> list[str]:
        """Names of the kernels that a call runs on the device."""


class GraphTimer:
    """Times with CUDA graphs, on the current device."""

    def __init__(self) -> None:
        self._flushed = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def interleaved(self, candidates: Mapping[str, Sequence[TimedCall]]) -> dict[str, Timing]:
        """See `Timer`: every replay of a candidate is followed by one of the next."""
        graphs = {name: _captured(calls) for name, calls in candidates.items()}
        pairs: dict[str, list[tuple[Any, Any]]] = {name: [] for name in candidates}
        for _ in range(_REPLAYS):
            for name, (graph, _) in graphs.items():
                self._flushed.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                pairs[name].append((start, end))
        torch.cuda.synchronize()
        return {
            name: _timing([s.elapsed_time(e) * 1e3 / graphs[name][1] for s, e in pairs[name]])
            for name in candidates
        }

    def eager_us(self, call: TimedCall) -> float:
        """See `Timer`: launches only; the device may still be running."""
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_EAGER_CALLS):
            call()
        elapsed = time.perf_counter() - start
        torch.cuda.synchronize()
        return elapsed * 1e6 / _EAGER_CALLS

    def kernel_names(self, call: TimedCall) -> list[str]:
        """See `Timer`; uses torch's profiler."""
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        return [event.name for event in profile.events()]


def _captured(calls: Sequence[TimedCall]) -> tuple[Any, int]:
    """Capture at least 20 launches that rotate through the calls; also return their number."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in [*calls[:1]] * _WARM_UP:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    rounds = -(-_MIN_LAUNCHES // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    return graph, rounds * len(calls)


def _timing(replays_us: Sequence[float]) -> Timing:
    median = statistics.median(replays_us)
    return Timing(median_us=median, spread=(max(replays_us) - min(replays_us)) / median)
