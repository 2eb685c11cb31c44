"""`PoolLoads`: the loads of one pool in one epoch, from reports to windows and averages."""

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, replace

import numpy as np

from equipoise.planning.arrays import Bools, Indices, Load
from equipoise.planning.balance import balancedness, balancedness_per_layer, mean_if_busy
from equipoise.planning.counters import LoadCounters
from equipoise.planning.errors import InvalidReportError
from equipoise.planning.layout import Layout
from equipoise.planning.load import (
    LoadAverage,
    LoadWindow,
    Shift,
    WindowLoad,
    common_steps,
    follow_traffic,
)
from equipoise.planning.node_traffic import NodeCounters, NodeTraffic
from equipoise.planning.phase import Phase
from equipoise.planning.policy import Policy
from equipoise.planning.realised import RealisedShares, realised_shares
from equipoise.planning.slowness import RankPace
from equipoise.planning.step_cost import StepWindow
from equipoise.planning.steps import StepCounters
from equipoise.planning.topology import ModelShape
from equipoise.pool.records import FAST, SLOW, SLOW_SQUARES, AverageRecord
from equipoise.wire.messages import Report

REPORTS_MISSED = 3
"""Report intervals without a report after which a rank is unheard. Until then, the next report
makes up for missing ones: reports are cumulative."""

MAX_STEPS_RATIO = 3.0
"""Factor by which a rank's steps in a window may differ from most ranks', because ranks report at
different moments. If reports are as rare as windows, it is 2."""

MAX_STEPS_RATIO_MIXED = 1.5
"""The same for a window with several layouts, whose loads are not scaled to common steps."""

STEPS_SURPLUS = 16
"""Steps by which ranks may always differ in a window with one layout: it may have few."""

MAX_TABLES = 4
"""Windows with traffic whose tables are kept: plans are made on the latest ones."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedWindow:
    """One planning interval as it was measured.

    `load` is float64 [layers, experts] in assignments, `rank_load` [layers, ranks] by receiver, so
    `balancedness` is measured, not planned. `generation` is the one in use when the window closed;
    `switched` is set if another was in use when it opened. `shares` compares planned with realised
    shares, None if unknown; `pace` is how long ranks computed, None if not reported, and `step` how
    long steps took; `nodes` is how rows spread over nodes, None on one. `phase` is the one that all
    reports named, else mixed. Loads are those of equally many steps of each rank.
    `unheard` are ranks whose report is overdue: the window lacks their load. `contradiction` says
    why the counts cannot be true or be compared, if so. The averages exclude a window with `doubt`.
    """

    number: int
    closed_s: float
    load: Load
    rank_load: Load
    balancedness: float
    balancedness_min_layer: float
    max_over_mean: float
    assignments: float
    generation: int
    switched: bool
    shift: Shift
    shares: RealisedShares | None
    pace: RankPace | None = None
    step: StepWindow | None = None
    nodes: NodeTraffic | None = None
    phase: Phase = Phase.MIXED
    unheard: tuple[int, ...] = ()
    contradiction: str = ""

    @property
    def doubt(self) -> str:
        """Why the window can neither be planned on nor judge a rollout; empty if it can."""
        if self.unheard:
            word = "rank" if len(self.unheard) == 1 else "ranks"
            ranks = ", ".join(map(str, self.unheard))
            return f"incomplete window: no report from {word} {ranks}"
        return self.contradiction

    def without_tables(self) -> "ClosedWindow":
        """The window without its tables, which take a thousand times as much memory."""
        nothing = np.zeros((0, 0))
        return replace(self, load=nothing, rank_load=nothing)


def drop_old_tables(windows: MutableSequence[ClosedWindow]) -> None:
    """Keep only the tables of the latest window, and of the latest windows with traffic.

    `windows`, one at least, are in the order in which they closed.
    """
    busy = [window.number for window in windows if window.assignments]
    kept = {*busy[-MAX_TABLES:], windows[-1].number}
    for place, window in enumerate(windows):
        if window.load.size and window.number not in kept:
            windows[place] = window.without_tables()


class PoolLoads:
    """Counters, the open window, and a fast and a slow moving average.

    `remembered` are averages from the store, used if they fit the pool's shape; a half-life that
    changed since only sets how fast they decay. `counted_from` is the first generation whose
    counters started while this balancer was connected.
    """

    def __init__(
        self,
        *,
        epoch: int,
        model: ModelShape,
        num_ranks: int,
        policy: Policy,
        remembered: Mapping[str, AverageRecord],
        counted_from: int,
        now: float,
    ) -> None:
        self._policy = policy
        self._model = model
        self._num_ranks = num_ranks
        self._counters = LoadCounters(epoch=epoch, counted_from=counted_from)
        self._window = LoadWindow(
            num_layers=model.num_layers,
            num_experts=model.num_experts,
            num_ranks=num_ranks,
            opened_s=now,
        )
        self.fast = self._average(remembered.get(FAST), policy.fast_half_life_s, now=now)
        self.slow = replace(
            self._average(remembered.get(SLOW), policy.slow_half_life_s, now=now),
            decayed_squares=_squares(remembered.get(SLOW), remembered.get(SLOW_SQUARES)),
        )
        self._steps = StepCounters(num_ranks=num_ranks, is_heard_from_start=counted_from == 1)
        self._nodes = NodeCounters(num_ranks=num_ranks, is_heard_from_start=counted_from == 1)
        self._report_interval_s = policy.report_interval_s
        self._reported = np.zeros(num_ranks, dtype=bool)
        self._heard_s = np.full(num_ranks, now)
        self._unheard_at_open = np.zeros(num_ranks, dtype=bool)
        self._gap_s = np.zeros(num_ranks)
        self._generation_at_open = 0
        self._phases: set[Phase] = set()
        self._shifts: Sequence[Shift] = ()
        self._next_close_s = now + policy.interval_s

    def adopt(self, policy: Policy, *, now: float) -> None:
        """Adopt another policy: averages keep their values and decay at another rate."""
        opened_s = self._next_close_s - self._policy.interval_s
        self._next_close_s = max(now, opened_s + policy.interval_s)
        self.fast = replace(self.fast, half_life_s=policy.fast_half_life_s)
        self.slow = replace(self.slow, half_life_s=policy.slow_half_life_s)
        self._policy = policy

    def accept(self, report: Report, layout: Layout, *, now: float) -> bool:
        """Count a report; `layout` is that of its generation, or the newest one known.

        Returns whether it is the latest of its rank: one of an earlier stream may arrive late.

        Raises:
            InvalidReportError: the report cannot be used; nothing of it is counted.
        """
        load, stats = report.load, report.stats
        if layout.num_ranks != self._num_ranks:
            raise InvalidReportError(
                "report_old_generation",
                f"rank {load.rank} reports for generation {load.generation}, which belongs to "
                f"another epoch: it had {layout.num_ranks} ranks, this one has {self._num_ranks}",
            )
        num_steps = self._steps.steps_since_report(
            load.rank, stats.steps, busy_us=stats.busy_us, step_us=stats.step_us, now=now
        )
        delta = self._counters.accept(load, layout, num_steps=num_steps)
        self._window.add(delta)
        is_latest = self._steps.accept(
            load,
            steps=stats.steps,
            busy_us=stats.busy_us,
            step_us=stats.step_us,
            has_grown=bool(delta.slot_load.any()),
            now=now,
        )
        if is_latest:
            self._nodes.accept(load.rank, stats.nodes)
        self._phases.add(load.phase)
        if self._unheard_at_open[load.rank] and not self._reported[load.rank]:
            self._gap_s[load.rank] = now - self._heard_s[load.rank]
        self._heard_s[load.rank] = now
        self._reported[load.rank] = True
        return is_latest

    def is_due(self, *, now: float) -> bool:
        """Whether the open window has lasted for a planning interval.

        It also waits for the first report of each rank in the window, until that is overdue.
        """
        if now < self._next_close_s:
            return False
        return not (~self._reported & ~self._is_unheard(now)).any()

    def close_window(self, *, number: int, generation: int, now: float) -> ClosedWindow:
        """Close the window under its number, fold it into both averages, and look for a shift."""
        counted, steps = self._window.close(now=now), self._steps.in_window()
        load = counted.at_common_steps(steps)
        rank_load = load.rank_load
        per_layer = balancedness_per_layer(rank_load)
        closed = ClosedWindow(
            number=number,
            closed_s=now,
            load=load.expert_load,
            rank_load=rank_load,
            balancedness=balancedness(rank_load),
            balancedness_min_layer=float(per_layer.min()),
            max_over_mean=mean_if_busy(1 / per_layer, is_busy=rank_load.max(axis=1) > 0),
            assignments=float(load.expert_load.sum()),
            generation=generation,
            switched=self._generation_at_open not in {0, generation},
            shift=_UNCOUNTED,
            shares=_realised(load),
            pace=self._steps.pace(rank_load),
            step=self._steps.step_window(rank_load),
            nodes=self._nodes.in_window(steps),
            phase=next(iter(self._phases)) if len(self._phases) == 1 else Phase.MIXED,
            unheard=tuple(np.flatnonzero(self._is_unheard(now)).tolist()),
            contradiction=counted.contradiction
            or _interruption(self._gap_s)
            or _imbalance_of_steps(steps, load),
        )
        if closed.doubt:
            self.fast, self.slow = self.fast.skipped(now=now), self.slow.skipped(now=now)
        else:
            closed = replace(closed, shift=self._fold(load, now=now))
        self._open_next(generation=generation, now=now)
        return closed

    def _fold(self, load: WindowLoad, *, now: float) -> Shift:
        self.fast, self.slow, self._shifts, shift = follow_traffic(
            self.fast,
            self.slow,
            load.expert_load,
            before=self._shifts,
            duration_s=load.duration_s,
            factor=self._policy.shift_factor,
            now=now,
        )
        return shift

    def records(self, *, now: float) -> dict[str, AverageRecord]:
        """Both averages for the store, and the squares if they are used; `now` is unix time."""
        records = {
            name: AverageRecord(
                half_life_s=average.half_life_s,
                time_unix_s=now,
                weight_s=average.decayed_duration_s,
                decayed_load=average.decayed_load,
            )
            for name, average in ((FAST, self.fast), (SLOW, self.slow))
        }
        if self._policy.risk_z and self.slow.decayed_squares is not None:
            records[SLOW_SQUARES] = replace(records[SLOW], decayed_load=self.slow.decayed_squares)
        return records

    def _is_unheard(self, now: float) -> Bools:
        """Which ranks' reports are overdue, [ranks]."""
        return now - self._heard_s > REPORTS_MISSED * self._report_interval_s

    def _open_next(self, *, generation: int, now: float) -> None:
        self._steps.open_next()
        self._nodes.open_next()
        self._generation_at_open = generation
        self._unheard_at_open = self._is_unheard(now)
        self._reported[:] = False
        self._gap_s[:] = 0.0
        self._phases = set()
        # From the planned time, so that intervals do not drift; from now, if ticks were held up.
        planned_s = self._next_close_s + self._policy.interval_s
        self._next_close_s = planned_s if planned_s > now else now + self._policy.interval_s

    def _average(
        self, record: AverageRecord | None, half_life_s: float, *, now: float
    ) -> LoadAverage:
        fresh = LoadAverage.start(
            num_layers=self._model.num_layers,
            num_experts=self._model.num_experts,
            half_life_s=half_life_s,
            now=now,
        )
        if record is None or record.decayed_load.shape != fresh.decayed_load.shape:
            return fresh
        return LoadAverage(
            half_life_s=half_life_s,
            folded_s=now,
            decayed_load=record.decayed_load,
            decayed_duration_s=record.weight_s,
        )


_UNCOUNTED = Shift(detected=False, distance=0.0, noise=0.0, reason="no shift: not counted")


def _interruption(gap_s: Load) -> str:
    """Which rank reported again after a gap, [ranks] in seconds; empty if there was none."""
    if not gap_s.any():
        return ""
    rank = int(gap_s.argmax())
    gap = f"{gap_s[rank]:.0f} s"
    return f"rank {rank} reported again after {gap}: its load covers more than the window"


def _imbalance_of_steps(steps: Indices, load: WindowLoad) -> str:
    """Why the loads of ranks cannot be compared, given their steps, [ranks]; empty if they can.

    Those of a rank without steps cannot be scaled, and those of several layouts are not.
    """
    usual, has_traffic = common_steps(steps), bool(load.expert_load.any())
    is_mixed = has_traffic and load.layout is None
    most, surplus = (MAX_STEPS_RATIO_MIXED, 0) if is_mixed else (MAX_STEPS_RATIO, STEPS_SURPLUS)
    differs = (np.abs(steps - usual) > surplus) & ((steps > most * usual) | (most * steps < usual))
    if has_traffic and (steps > 0).any():
        differs |= steps <= 0
    if not differs.any():
        return ""
    rank = int(np.flatnonzero(differs)[0])
    return (
        f"rank {rank} counted {int(steps[rank])} steps, but most ranks counted {usual}: their "
        "loads cannot be compared"
    )


def _realised(load: WindowLoad) -> RealisedShares | None:
    if load.layout is None:
        return None
    return realised_shares(load.slot_load, load.layout)


def _squares(average: AverageRecord | None, squares: AverageRecord | None) -> Load | None:
    """The squares from the store, if they were written together with the average."""
    if (
        average is None
        or squares is None
        or (squares.time_unix_s, squares.weight_s) != (average.time_unix_s, average.weight_s)
        or squares.decayed_load.shape != average.decayed_load.shape
    ):
        return None
    return squares.decayed_load
