"""Sixty-four concurrent streams: nothing leaks, and no stream gets another's tokens."""

import gc
import itertools
import threading
import time
from contextlib import contextmanager

import numpy as np
import psutil
import pytest

from equipoise.worker.alone import engine_alone
from equipoise.worker.sequence import Request
from equipoise.worker.settings import WorkerSettings
from equipoise_model.sampling_params import SamplingParams

NUM_STREAMS = 64
NUM_PLACES = 80
BOUND_S = 60.0

SAMPLING = [
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2, presence_penalty=0.5),
    SamplingParams(temperature=1.2, top_k=8, seed=3, frequency_penalty=0.3),
    SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=2),
]


def asked(place, *, key, max_tokens):
    """Request number `place` of a list that is longer than the number of streams.

    Every other request shares a prefix with some others, and therefore blocks.
    """
    rng = np.random.default_rng(place)
    shared = np.random.default_rng(place % 8).integers(0, 64, 32 * (place % 2))
    own = rng.integers(0, 64, rng.integers(1, 24))
    return Request(
        key=key,
        prompt=tuple(map(int, (*shared, *own))),
        max_tokens=int(rng.integers(4, max_tokens)),
        sampling=SAMPLING[place % len(SAMPLING)],
    )


class Streams:
    """Closed-loop clients of an engine: when a request ends, the next one starts."""

    def __init__(self, settings, *, max_tokens):
        self._max_tokens = max_tokens
        self.engine = engine_alone(settings, publish=self._take)
        self.changed = threading.Condition()
        self.results = {}
        self._keys = itertools.count(1)
        self._open = {}

    def begin(self, place):
        with self.changed:
            key = next(self._keys)
            self._open[key] = (place, [])
        self.engine.submit(asked(place, key=key, max_tokens=self._max_tokens))

    def _take(self, result):
        with self.changed:
            for emission in result.emissions:
                place, sampled = self._open[emission.key]
                sampled.append(emission.sampled)
                if emission.finish is not None:
                    del self._open[emission.key]
                    self.results.setdefault(place, []).append(tuple(sampled))
            self.changed.notify_all()

    def until_fewer_than(self, num_open):
        with self.changed:
            while len(self._open) >= num_open:
                assert self.changed.wait(BOUND_S), "no step came for so long"

    def serve(self, places, *, at_a_time):
        for place in places:
            self.until_fewer_than(at_a_time)
            self.begin(place)
        self.until_fewer_than(1)


@contextmanager
def serving(settings, *, max_tokens):
    """Streams of a running engine."""
    streams = Streams(settings, max_tokens=max_tokens)
    stepping = threading.Thread(target=streams.engine.run)
    stepping.start()
    try:
        yield streams
    finally:
        streams.engine.leave()
        stepping.join(BOUND_S)
        assert not stepping.is_alive()


def soak(streams, *, num_places, for_s=0.0, num_turns=1):
    """Serve each request alone, then all of them repeatedly, and compare every answer.

    Ends after at least `for_s` seconds and `num_turns` turns; returns the memory after each turn.
    """
    streams.serve(range(num_places), at_a_time=1)
    alone = {place: answers[0] for place, answers in streams.results.items()}
    assert len(set(alone.values())) > num_places * 0.9
    sizes = []
    turn = 0
    end_s = time.monotonic() + for_s
    while turn < num_turns or time.monotonic() < end_s:
        turn += 1
        order = np.random.default_rng(turn).permutation(num_places)
        streams.serve(map(int, order), at_a_time=NUM_STREAMS)
        for place, answers in streams.results.items():
            assert set(answers) == {alone[place]}, f"request {place} in turn {turn}"
        streams.results.clear()
        stats = streams.engine.progress().stats
        assert (stats.active_requests, stats.queued_requests) == (0, 0)
        assert stats.cache_tokens_used == 0
        gc.collect()
        sizes.append(psutil.Process().memory_info().rss)
    return sizes


def test_streams_get_the_same_tokens_as_alone_and_leak_nothing(settings):
    chosen = settings(
        max_requests=NUM_STREAMS, max_queued_requests=0, max_step_tokens=2 * NUM_STREAMS
    )
    with serving(chosen, max_tokens=14) as streams:
        sizes = soak(streams, num_places=70, num_turns=3)
    assert sizes[-1] - sizes[1] < 16 << 20


@pytest.mark.benchmark
@pytest.mark.timeout(1800)
def test_ten_minutes_of_streams_leak_nothing():
    """The tiny model drafting one token, with a cache too small for all streams."""
    chosen = WorkerSettings(
        max_requests=NUM_STREAMS,
        max_queued_requests=0,
        max_step_tokens=3 * NUM_STREAMS,
        context_length=160,
        cache_tokens=NUM_STREAMS * 32,
        speculate=1,
        speculate_up_to=NUM_STREAMS,
    )
    with serving(chosen, max_tokens=96) as streams:
        sizes = soak(streams, num_places=NUM_PLACES, for_s=600)
        stats = streams.engine.progress().stats
    mib = [size / 2**20 for size in sizes]
    # The first turns warm up the allocators; afterwards memory is flat.
    settled = len(sizes) // 10
    print(
        f"{len(sizes)} turns of {NUM_PLACES} requests: {stats.tokens_generated} tokens, "
        f"{stats.drafts_accepted} of {stats.drafts} drafts right, "
        f"{stats.requests_preempted} preempted, "
        f"{stats.prefix_tokens_found} of {stats.prefix_tokens_sought} tokens found; resident "
        f"{mib[0]:.1f} MiB, {mib[settled]:.1f} after a tenth, from {min(mib[settled:]):.1f} to "
        f"{max(mib[settled:]):.1f} since, {mib[-1]:.1f} at the end"
    )
    assert stats.requests_preempted > 0
    assert mib[-1] - mib[settled] < 16
