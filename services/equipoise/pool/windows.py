"""`Windows`: a pool's closed windows, its loads and demand of this epoch, and its slow ranks."""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from equipoise.planning.arrays import Load
from equipoise.planning.layout import Layout
from equipoise.planning.load import LoadAverage, assignments_per_layer
from equipoise.planning.ratio import RanksAdvice
from equipoise.planning.slowness import RankPace, SlowRank, find_slow
from equipoise.planning.step_cost import Imbalance, StepCost, StepCostFit, imbalance
from equipoise.planning.topology import ModelShape
from equipoise.planning.traffic import Traffic
from equipoise.pool.counters import Counters
from equipoise.pool.demand import Demand
from equipoise.pool.loads import ClosedWindow, PoolLoads, drop_old_tables
from equipoise.pool.policy import PoolPolicy
from equipoise.pool.records import SLOW, AverageRecord
from equipoise.wire.messages import Report

MAX_WINDOWS = 128
"""Closed windows kept for status."""

MAX_PACES = 100
"""Windows kept to find slow ranks: the most that a policy may ask for."""


class Windows:
    """Windows of a pool, over all its epochs; `remembered` are averages from the store."""

    def __init__(
        self, policy: PoolPolicy, *, remembered: Mapping[str, AverageRecord], counters: Counters
    ) -> None:
        self._policy = policy
        self._averages = remembered
        self._tally = counters.tally
        self.loads: PoolLoads | None = None
        """Loads of the epoch; None until all its ranks serve."""
        self._demand: Demand | None = None
        self._closed: deque[ClosedWindow] = deque(maxlen=MAX_WINDOWS)
        self.num_closed = 0
        """Windows closed since this balancer leads."""
        self._paces: deque[RankPace] = deque(maxlen=MAX_PACES)
        self.slow: Mapping[int, SlowRank] = {}
        """Ranks that compute slower than their peers."""
        self._step_times = StepCostFit()
        self.traffic = Traffic()
        """The kinds of traffic learned since this balancer leads."""

    @property
    def closed(self) -> Sequence[ClosedWindow]:
        """The latest closed windows, oldest first."""
        return self._closed

    @property
    def latest(self) -> ClosedWindow | None:
        """The window that closed last."""
        return self._closed[-1] if self._closed else None

    @property
    def latest_with_traffic(self) -> ClosedWindow | None:
        """The window that closed last among those with traffic."""
        return next((one for one in reversed(self._closed) if one.assignments), None)

    @property
    def step_cost(self) -> StepCost | None:
        """What a step's time consists of, by the windows of this epoch; None after too few.

        It is learned again in each epoch, because ranks and their devices may be others, and so by
        a new leader: that takes a few windows, in which verdicts use an upper bound. A stored fit
        would have to be doubted for as long.
        """
        return self._step_times.cost()

    @property
    def num_step_windows(self) -> int:
        """Windows with step times that the fit uses."""
        return self._step_times.num_windows

    @property
    def imbalance(self) -> Imbalance | None:
        """What imbalance costs in the latest window; None without traffic."""
        window = self.latest
        if window is None or not window.assignments:
            return None
        return imbalance(
            window.step,
            self.step_cost,
            balancedness=window.balancedness,
            num_windows=self.num_step_windows,
        )

    @property
    def advice(self) -> RanksAdvice | None:
        """How many ranks the traffic of this epoch calls for; None while nothing is known.

        An epoch and a new leader measure again: how fast a rank prefills depends on the group.
        """
        return None if self._demand is None else self._demand.advice

    def adopt_policy(self, *, now: float) -> None:
        """The policy has changed; averages and the open window stay."""
        if self.loads is not None:
            self.loads.adopt(self._policy.values, now=now)

    def begin_epoch(self, *, now: float) -> None:
        """Keep the averages and drop what is about the ranks of the epoch before."""
        self._step_times.clear()
        if self.loads is not None:
            self._averages = self.loads.records(now=now)
        self.loads = self._demand = None
        self._paces.clear()
        self.slow = {}

    def open(
        self,
        *,
        epoch: int,
        model: ModelShape,
        num_ranks: int,
        least_ranks: int,
        counted_from: int,
        now: float,
    ) -> None:
        """Open the first window of an epoch. All experts need at least `least_ranks` ranks."""
        self.loads = PoolLoads(
            epoch=epoch,
            model=model,
            num_ranks=num_ranks,
            policy=self._policy.values,
            remembered=self._averages,
            counted_from=counted_from,
            now=now,
        )
        self._demand = Demand(least_ranks=least_ranks, now=now)

    def accept(self, report: Report, layout: Layout, *, now: float) -> None:
        """Count a report; `layout` is that of its generation, or the newest one known.

        Raises:
            InvalidReportError: the report cannot be used; nothing of it is counted.
        """
        # Before all ranks serve nothing is lost: counters are cumulative.
        if self.loads is None or self._demand is None:
            return
        if self.loads.accept(report, layout, now=now):
            self._demand.accept(report, layout, now=now)

    def close_due(self, *, generation: int, now: float) -> ClosedWindow | None:
        """Close the open window if it is due."""
        if self.loads is None or not self.loads.is_due(now=now):
            return None
        self.num_closed += 1
        window = self.loads.close_window(number=self.num_closed, generation=generation, now=now)
        self._closed.append(window)
        if window.step is not None and window.assignments and not (window.switched or window.doubt):
            self._step_times.add(window.step)
        if window.assignments and not window.doubt:
            self._learn(window, self.loads.slow)
        drop_old_tables(self._closed)
        self._tally.note_window(shifted=window.shift.detected)
        return window

    def _learn(self, window: ClosedWindow, average: LoadAverage) -> None:
        """Learn kinds of traffic; a new leader begins with the average that the store remembers."""
        load = window.load
        if not self.traffic.kinds:
            rate = average.per_second()
            load = rate * (average.samples() / assignments_per_layer(rate))
        policy = self._policy.values
        self.traffic = self.traffic.after(
            load,
            duration_s=policy.interval_s,
            half_life_s=policy.slow_half_life_s,
            recent_half_life_s=policy.fast_half_life_s,
            factor=policy.shift_factor,
        )

    def note_switch(self) -> None:
        """A plan is rolled out: a layout has ended."""
        self.traffic = self.traffic.switched()

    def find_slow(self, window: ClosedWindow) -> Sequence[SlowRank]:
        """Look for slow ranks, `window` included; returns those that were not slow before."""
        if window.pace is not None:
            self._paces.append(window.pace)
        before, self.slow = self.slow, find_slow(self._paces, policy=self._policy.values)
        found = [slow for rank, slow in self.slow.items() if rank not in before]
        self._tally.note_slow(len(found))
        return found

    def average_load(self, model: ModelShape) -> Load:
        """The slow average, float64 [layers, experts] per second; zeros without one."""
        if self.loads is not None:
            return self.loads.slow.per_second()
        wanted = (model.num_layers, model.num_experts)
        record = self._averages.get(SLOW)
        if record is None or record.decayed_load.shape != wanted or record.weight_s <= 0:
            return np.zeros(wanted)
        return record.decayed_load / record.weight_s
