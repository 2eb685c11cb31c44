"""Sixty-four streams at once: nothing leaks, and nobody gets another's tokens."""

import gc
import itertools
import threading
import time

import numpy as np
import psutil
import pytest

from equipoise.worker.alone import engine_alone
from equipoise.worker.sequence import Request
from equipoise_model.sampling_params import SamplingParams

NUM_STREAMS = 64
BOUND_S = 120.0

SAMPLING = [
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2, presence_penalty=0.5),
    SamplingParams(temperature=1.2, top_k=8, seed=3, frequency_penalty=0.3),
    SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=2),
]


def asked(place, *, key):
    """The request of a place in the list, which is longer than the streams are many."""
    rng = np.random.default_rng(place)
    return Request(
        key=key,
        prompt=tuple(int(token) for token in rng.integers(0, 64, rng.integers(1, 24))),
        max_tokens=int(rng.integers(4, 14)),
        sampling=SAMPLING[place % len(SAMPLING)],
    )


class Streams:
    """Closed-loop clients of an engine: as one of their requests ends, the next begins."""

    def __init__(self, settings):
        self.engine = engine_alone(settings, publish=self._take)
        self.changed = threading.Condition()
        self.results = {}
        self._keys = itertools.count(1)
        self._open = {}

    def begin(self, place):
        with self.changed:
            key = next(self._keys)
            self._open[key] = (place, [])
        self.engine.submit(asked(place, key=key))

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
            assert self.changed.wait_for(lambda: len(self._open) < num_open, BOUND_S)

    def serve(self, places, *, at_a_time):
        for place in places:
            self.until_fewer_than(at_a_time)
            self.begin(place)
        self.until_fewer_than(1)


@pytest.fixture
def streams(settings):
    streams = Streams(
        settings(max_requests=NUM_STREAMS, max_queued_requests=0, max_step_tokens=2 * NUM_STREAMS)
    )
    stepping = threading.Thread(target=streams.engine.run)
    stepping.start()
    yield streams
    streams.engine.leave()
    stepping.join(BOUND_S)
    assert not stepping.is_alive()


def soak(streams, *, num_places, until):
    """Serve each alone, then all again and again; every answer must be the one it got alone."""
    streams.serve(range(num_places), at_a_time=1)
    alone = {place: answers[0] for place, answers in streams.results.items()}
    assert len(set(alone.values())) > num_places * 0.9
    sizes = []
    turn = 0
    while turn == 0 or not until(turn):
        turn += 1
        order = np.random.default_rng(turn).permutation(num_places)
        streams.serve(map(int, order), at_a_time=NUM_STREAMS)
        for place, answers in streams.results.items():
            assert set(answers) == {alone[place]}, f"request {place} in turn {turn}"
        streams.results.clear()
        stats = streams.engine.progress().stats
        assert (stats.active_requests, stats.queued_requests) == (0, 0)
        gc.collect()
        sizes.append(psutil.Process().memory_info().rss)
    return sizes


def test_streams_get_what_they_get_alone_and_leave_nothing_behind(streams):
    sizes = soak(streams, num_places=70, until=lambda turn: turn == 3)
    assert sizes[-1] - sizes[1] < 16 << 20


@pytest.mark.benchmark
@pytest.mark.timeout(900)
def test_ten_minutes_of_streams_leave_nothing_behind(streams):
    end_s = time.monotonic() + 600
    sizes = soak(streams, num_places=256, until=lambda _: time.monotonic() > end_s)
    # The first turns warm allocators up; from there on it is flat.
    settled = sizes[len(sizes) // 10]
    assert sizes[-1] - settled < 16 << 20
