"""`analyse`: from a timeline to computation, communication and what of it is exposed.

Communication is hidden while the same process computes on any of its tracks, and exposed otherwise
(the measure of DeepSeek's published profiles, github.com/deepseek-ai/profile-data). Times of
several processes are added up.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from equipoise.cli.overlap.intervals import Intervals
from equipoise.cli.overlap.names import Part
from equipoise.cli.overlap.timeline import Of, Timeline, Track

NUM_BINS = 240
"""Equal stretches of time that a picture shows."""

_OVERLAPPED_SHARE = 0.01
_LONG_GAP_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Time of some work, in microseconds. What runs at once counts once."""

    computation_us: float
    """Time in which something computed."""
    communication_us: float
    """Time in which something communicated."""
    exposed_us: float
    """Communication while nothing in the process computed."""
    copies_us: float
    """Copies and fills of memory, which hide no communication."""
    experts_us: float
    """Computation of experts."""
    attention_us: float
    """Computation of attention."""

    @property
    def hidden_us(self) -> float:
        """Communication under computation."""
        return self.communication_us - self.exposed_us

    @property
    def hidden_share(self) -> float | None:
        """The hidden fraction of the communication; None without communication."""
        return self.hidden_us / self.communication_us if self.communication_us else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackTimes:
    """One stream of a device, or one thread."""

    process: str
    """Its process or device."""
    track: str
    """Its name."""
    num_slices: int
    """Slices of work."""
    times: Times
    """Its work; `exposed_us` by the computation of the whole process."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overlap:
    """What a trace shows."""

    on_device: bool
    """Whether tracks are streams of a device; else threads."""
    num_processes: int
    """Processes, or devices, over which times are added up."""
    num_steps: int
    """Steps that the trace names; 0 if it names none."""
    span_us: float
    """From the first slice of work to the end of the last, summed over processes."""
    range_us: float
    """From the first slice of work of any process to the last."""
    busy_us: float
    """Time in which something ran."""
    step_us: float
    """Time in steps; the span if the timeline has no ranges of steps."""
    times: Times
    """All work."""
    experts_share: float
    """Computation of experts in steps, as a fraction of `step_us`."""
    layers: tuple[tuple[int, Times], ...]
    """Work within each layer's ranges, by layer; empty if no range names a layer."""
    tracks: tuple[TrackTimes, ...]
    """By stream or thread."""
    notes: tuple[str, ...]
    """What makes the figures doubtful."""
    bins: tuple[tuple[float, float, float], ...]
    """For equal stretches of the range: fractions of computation alone, of both at once, and of
    exposed communication; means over processes."""

    @property
    def idle_us(self) -> float:
        """Time of the span in which nothing ran."""
        return self.span_us - self.busy_us


def analyse(timeline: Timeline) -> Overlap:
    """Measure a timeline that has work."""
    by_process = groupby(timeline.tracks, key=lambda track: track.process)
    processes = [_Process(list(tracks), on_device=timeline.on_device) for _, tracks in by_process]
    layers: defaultdict[int, list[Times]] = defaultdict(list)
    for one in processes:
        for layer in one.layers:
            layers[layer].append(one.times(within=layer))
    start_ns = min(one.start_ns for one in processes)
    end_ns = max(one.end_ns for one in processes)
    edges = np.linspace(start_ns, max(end_ns, start_ns + NUM_BINS), NUM_BINS + 1).astype(np.int64)
    bins = np.mean([one.bins(edges) for one in processes], axis=0)
    step_ns = sum(one.steps.total for one in processes)
    return Overlap(
        on_device=timeline.on_device,
        num_processes=len(processes),
        num_steps=timeline.num_steps,
        span_us=sum(one.end_ns - one.start_ns for one in processes) / 1e3,
        range_us=(end_ns - start_ns) / 1e3,
        busy_us=sum(one.busy_ns for one in processes) / 1e3,
        step_us=step_ns / 1e3,
        times=_summed([one.times() for one in processes]),
        experts_share=sum(one.experts_in_steps_ns for one in processes) / max(1, step_ns),
        layers=tuple((layer, _summed(times)) for layer, times in sorted(layers.items())),
        tracks=tuple(row for one in processes for row in one.rows()),
        notes=tuple(note for one in processes for note in one.notes()),
        bins=tuple((float(c), float(h), float(e)) for c, h, e in bins),
    )


class _Track:
    """One track's sets of time."""

    def __init__(self, track: Track) -> None:
        self.track = track
        work, exchanges = track.intervals(Of.WORK), track.intervals(Of.EXCHANGES)
        self.computation = work - exchanges
        self.communication = Intervals.union([track.intervals(Of.COMMUNICATION), work & exchanges])
        self.copies = track.intervals(Of.COPIES)
        self.busy = Intervals.union([work, track.intervals(Of.COMMUNICATION), self.copies])
        self.parts = {part: self.computation & track.intervals(part) for part in Part}


class _Process:
    """One process's sets of time, over its tracks."""

    def __init__(self, tracks: Sequence[Track], *, on_device: bool) -> None:
        self._on_device = on_device
        self._tracks = [_Track(track) for track in tracks]
        self._computation = Intervals.union(one.computation for one in self._tracks)
        communication = Intervals.union(one.communication for one in self._tracks)
        self._exposed = communication - self._computation
        self._hidden = communication & self._computation
        self._busy = Intervals.union(one.busy for one in self._tracks)
        steps = Intervals.union(track.intervals(Of.STEPS) for track in tracks)
        self.steps = steps or Intervals(self._busy.starts[:1], self._busy.ends[-1:])
        self.layers = sorted({layer for track in tracks for layer in track.layers})
        self._windows = {
            layer: Intervals.union(track.intervals(layer) for track in tracks)
            for layer in self.layers
        }

    @property
    def start_ns(self) -> int:
        return int(self._busy.starts[0])

    @property
    def end_ns(self) -> int:
        return int(self._busy.ends[-1])

    @property
    def busy_ns(self) -> int:
        return self._busy.total

    @property
    def experts_in_steps_ns(self) -> int:
        experts = Intervals.union(one.parts[Part.EXPERTS] for one in self._tracks)
        return (experts & self.steps).total

    def times(self, *, within: int | None = None) -> Times:
        """Times of all work, or of that within the ranges of one layer."""
        return self._times_of(self._tracks, within=within)

    def rows(self) -> list[TrackTimes]:
        """One row for each track."""
        return [
            TrackTimes(
                process=one.track.process,
                track=one.track.name,
                num_slices=one.track.num_slices,
                times=self._times_of([one], within=None),
            )
            for one in self._tracks
        ]

    def bins(self, edges: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """[bins, 3]: fractions of computation alone, of both, of exposed communication."""
        both = np.diff(self._hidden.before(edges))
        columns = [np.diff(self._computation.before(edges)) - both, both]
        columns.append(np.diff(self._exposed.before(edges)))
        shares: npt.NDArray[np.float64] = np.stack(columns, axis=1) / np.diff(edges)[:, None]
        return shares

    def notes(self) -> list[str]:
        """What makes this process's figures doubtful."""
        return [*self._notes_on_tracks(), *self._notes_on_gaps()]

    def _times_of(self, tracks: Sequence[_Track], *, within: int | None) -> Times:
        def union(sets: list[Intervals]) -> Intervals:
            if within is None:
                return Intervals.union(sets)
            windows = [self._window(one.track, within) for one in tracks]
            return Intervals.union(one & window for one, window in zip(sets, windows, strict=True))

        communication = union([one.communication for one in tracks])
        return Times(
            computation_us=union([one.computation for one in tracks]).total / 1e3,
            communication_us=communication.total / 1e3,
            exposed_us=(communication & self._exposed).total / 1e3,
            copies_us=union([one.copies for one in tracks]).total / 1e3,
            experts_us=union([one.parts[Part.EXPERTS] for one in tracks]).total / 1e3,
            attention_us=union([one.parts[Part.ATTENTION] for one in tracks]).total / 1e3,
        )

    def _window(self, track: Track, layer: int) -> Intervals:
        """A layer's ranges on a track; on one that names no layer, those of the whole process.

        Threads of a communication library name none.
        """
        if track.layers or layer not in self._windows:
            return track.intervals(layer)
        return self._windows[layer]

    def _notes_on_tracks(self) -> list[str]:
        """Slices of one stream that overlap; those of a thread are nested by nature."""
        notes = []
        for one in self._tracks if self._on_device else []:
            share = 1 - one.busy.total / one.track.work_ns
            if share > _OVERLAPPED_SHARE:
                notes.append(
                    f"slices of stream {one.track.name} overlap by {share:.0%} of their time: the "
                    "profiler merged several streams, or the clock jumped"
                )
        return notes

    def _notes_on_gaps(self) -> list[str]:
        gaps = self._busy.starts[1:] - self._busy.ends[:-1]
        longest, span = int(gaps.max(initial=0)), self.end_ns - self.start_ns
        if longest <= _LONG_GAP_SHARE * span:
            return []
        gap = f"nothing runs for {longest / 1e3:,.0f} µs, {longest / span:.0%} of the span"
        return [f"{gap}: the process was idle, or its clock jumped"]


def _summed(times: Sequence[Times]) -> Times:
    return Times(
        computation_us=sum(one.computation_us for one in times),
        communication_us=sum(one.communication_us for one in times),
        exposed_us=sum(one.exposed_us for one in times),
        copies_us=sum(one.copies_us for one in times),
        experts_us=sum(one.experts_us for one in times),
        attention_us=sum(one.attention_us for one in times),
    )
