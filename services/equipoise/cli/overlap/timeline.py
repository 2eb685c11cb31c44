"""`Timeline`: the busy times and named ranges of a trace, by process and track, in bounded memory.

A trace with kernels is read as that of its devices, a trace without them as that of its threads.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from equipoise.cli.overlap.intervals import NEVER, Collector, Intervals
from equipoise.cli.overlap.names import Meaning, Names, Part
from equipoise.formats.errors import FormatError
from equipoise.formats.trace import Slice

MAX_INTERVALS = 3_500_000
"""Separate intervals held at once; the analysis needs up to 95 bytes for each."""

MAX_TRACKS = 4096
"""Threads, or streams, of all processes."""

MAX_SPAN_NS = 86_400 * 10**9
"""A trace of more than a day has a clock that jumped."""

_KERNEL = "kernel"
_COPIES = {"gpu_memcpy", "gpu_memset"}
_DEVICE_RANGE = "gpu_user_annotation"
_HOST_RANGE = "user_annotation"
_NO_WORK = {"python_function", "cuda_runtime", "cuda_driver", "overhead", "trace", "profiler"}
"""Calls that wait or only start work, and the profiler's own."""


class Of(Enum):
    """What intervals of a track are of, besides a layer (its number)."""

    WORK = auto()
    """Computation, and communication by ranges' names only."""
    COMMUNICATION = auto()
    """Work that is communication by its own name."""
    COPIES = auto()
    """Copies within a device and to its host, which neither compute nor communicate."""
    EXCHANGES = auto()
    """Ranges within which work is communication."""
    STEPS = auto()


Key = Of | Part | int


@dataclass(slots=True)
class Track:
    """One thread of a process, or one stream of a device."""

    process: str
    name: str
    num_slices: int = 0
    """Slices of work."""
    found: dict[Key, Collector] = field(default_factory=dict)

    def intervals(self, key: Key) -> Intervals:
        """The union of what was found."""
        found = self.found.get(key)
        return NEVER if found is None else found.intervals()

    @property
    def layers(self) -> list[int]:
        """Layers that ranges name here."""
        return sorted(key for key in self.found if isinstance(key, int))

    @property
    def work_ns(self) -> int:
        """Sum of the durations of all slices of work, nanoseconds."""
        return sum(self.found[key].total for key in _WORK if key in self.found)


class Timeline:
    """Collects slices.

    Raises (from `add` and `check`):
        FormatError: the slices have too many intervals or tracks, span more than a day, or none is
            of work. Threads may have too many if a device follows.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._tracks: dict[tuple[str, str], Track] = {}
        self._num_intervals = 0
        self._excess: str | None = None
        """What threads have too much of; they are no longer collected."""
        self._first_ns: int | None = None
        self._last_ns = 0
        self.on_device = False
        """Whether the tracks are streams of devices."""
        self.num_steps = 0
        """Steps that ranges of threads name."""

    @classmethod
    def of(cls, slices: Iterable[Slice], names: Names) -> "Timeline":
        """Collect a whole trace."""
        timeline = cls(names)
        for one in slices:
            timeline.add(one)
        timeline.check()
        return timeline

    @property
    def tracks(self) -> list[Track]:
        """Tracks that worked for some time, by process and name."""
        worked = [track for track in self._tracks.values() if track.work_ns]
        return sorted(worked, key=lambda track: (_natural(track.process), _natural(track.name)))

    def add(self, one: Slice) -> None:
        """Collect a slice."""
        self._check_clock(one)
        meaning = self._names[one.name]
        if one.category == _KERNEL or one.category in _COPIES:
            self._begin_device()
            self._add_work(one, meaning)
        elif one.category == _DEVICE_RANGE:
            self._begin_device()
            self._add_ranges(one, meaning)
        elif one.category == _HOST_RANGE:
            self.num_steps += meaning.is_step
            if not self.on_device:
                self._add_ranges(one, meaning)
                # On a thread, a range is work throughout: Python runs between its operators.
                if meaning.is_communication or meaning.part is not None:
                    self._note(one, Of.WORK)
        elif one.category not in _NO_WORK and not self.on_device:
            # A thread's slices are nested: what communication calls is communication.
            self._note(one, Of.WORK)
            self._add_ranges(one, meaning)

    def check(self) -> None:
        """Check that there is something to analyse, and that it is complete."""
        if self._excess is not None:
            raise FormatError(self._excess)
        if not self.tracks:
            raise FormatError(
                "it has no work of any duration (category kernel or cpu_op): profile with "
                "ProfilerActivity.CUDA or ProfilerActivity.CPU"
            )

    def _check_clock(self, one: Slice) -> None:
        if self._first_ns is None:
            self._first_ns, self._last_ns = one.start_ns, one.end_ns
        first_ns, last_ns = min(self._first_ns, one.start_ns), max(self._last_ns, one.end_ns)
        if last_ns - first_ns > MAX_SPAN_NS:
            raise FormatError(
                f"{one.name[:60]!r} at {one.start_ns / 1e3:.0f} µs is more than a day from other "
                "slices: its clock jumped, or several traces were joined; profile again"
            )
        self._first_ns, self._last_ns = first_ns, last_ns

    def _begin_device(self) -> None:
        """Forget threads once there is a device: they only start its work."""
        if not self.on_device:
            self.on_device = True
            self._tracks.clear()
            self._num_intervals = 0
            self._excess = None

    def _add_work(self, one: Slice, meaning: Meaning) -> None:
        if meaning.is_communication:
            self._note(one, Of.COMMUNICATION)
        elif one.category in _COPIES:
            self._note(one, Of.COPIES)
        else:
            self._note(one, Of.WORK)
            if meaning.part is not None:
                self._note(one, meaning.part)

    def _add_ranges(self, one: Slice, meaning: Meaning) -> None:
        keys: list[Key | None] = [
            meaning.part,
            meaning.layer,
            Of.EXCHANGES if meaning.is_communication else None,
            Of.STEPS if meaning.is_step else None,
        ]
        for key in keys:
            if key is not None:
                self._note(one, key)

    def _note(self, one: Slice, key: Key) -> None:
        if self._excess is not None:
            return
        track = self._tracks.get((one.process, one.track))
        if track is None:
            track = Track(process=one.process, name=one.track)
            self._tracks[one.process, one.track] = track
        track.num_slices += key in _WORK
        collector = track.found.get(key)
        if collector is None:
            collector = track.found[key] = Collector()
            self._num_intervals += _INTERVALS_PER_COLLECTOR
        self._num_intervals += collector.add(one.start_ns, one.end_ns)
        if self._num_intervals > MAX_INTERVALS:
            self._exceed(f"{MAX_INTERVALS:,} separate intervals: profile fewer steps")
        elif len(self._tracks) > MAX_TRACKS:
            self._exceed(f"{MAX_TRACKS:,} threads or streams: profile fewer processes")

    def _exceed(self, limit: str) -> None:
        """Fail on a device; threads are forgotten, because a device may follow."""
        self._excess = f"it has more than {limit}"
        if self.on_device:
            raise FormatError(self._excess)
        self._tracks.clear()


_WORK = {Of.WORK, Of.COMMUNICATION, Of.COPIES}
_INTERVALS_PER_COLLECTOR = 64
"""What an empty collector and its track need, in intervals of 16 bytes."""


def _natural(name: str) -> tuple[int, str]:
    """Order numbers by value, before other names."""
    return (int(name), "") if name.isdecimal() and len(name) < 19 else (2**63, name)
