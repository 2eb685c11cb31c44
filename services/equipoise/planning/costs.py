"""`MeasuredCosts`: what a pool has measured about its steps and moves; verdicts are based on it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from equipoise.planning.balance import Comparison
from equipoise.planning.policy import Policy
from equipoise.planning.step_cost import StepCost, StepWindow, unknown_cost
from equipoise.settings.numbers import format_number

MIN_WAVES = 3
"""Waves before their cost replaces the policy's."""

MAX_WAVES = 8
"""The latest waves that count, because networks and models change."""

LEAST_WAVE_S = 0.1
"""Seconds of fetching that a wave is worth its messages and writes for."""

_SHORTEST_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWave:
    """What one wave cost."""

    most_bytes: int
    """Bytes of the rank that staged most; above 0."""
    staging_s: float
    """Seconds from the first Stage to the last Staged."""
    stall_s: float
    """Longest stall of a rank at the switch, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCost:
    """What moves cost a pool."""

    bandwidth_bytes_per_s: float
    """Bytes per second that a rank stages."""
    switch_stall_s: float
    """Seconds that steps stall at a switch."""
    num_waves: int
    """Waves that measured it; 0 if it is the policy's."""

    @property
    def reason(self) -> str:
        """Where it comes from."""
        if self.num_waves:
            return f"at the cost of the latest {self.num_waves} waves"
        return "at the policy's cost of moves"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForecast:
    """How long a step takes, and would take under a plan, on the traffic of one window."""

    current_s: float
    """As measured in the window, seconds."""
    proposed_s: float
    """Under the plan, seconds."""
    error_s: float
    """Standard error of the difference, seconds."""
    mean_rank_load: float
    """Assignments of a rank per step on average: the amount of traffic."""

    @property
    def throughput_gain(self) -> float:
        """Fraction by which throughput grows while there is always work to do."""
        return self.current_s / self.proposed_s - 1.0

    @property
    def text(self) -> str:
        """The forecast, as a clause of a verdict's reason."""
        saved_ms, error_ms = 1e3 * (self.current_s - self.proposed_s), 1e3 * self.error_s
        return (
            f"it shortens a step of {format_number(1e3 * self.current_s)} ms by "
            f"{format_number(saved_ms)} ± {format_number(error_ms, digits=2)} ms, which raises "
            f"throughput by {self.throughput_gain:.1%}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """What a pool has measured. By default nothing, as for loads from files."""

    step: StepWindow | None = None
    """Steps of the window that plans are judged on."""
    step_cost: StepCost | None = None
    """What a step's time consists of."""
    num_windows: int = 0
    """Windows with step times so far."""
    waves: tuple[MeasuredWave, ...] = ()
    """The latest waves that staged something."""

    def forecast(self, on_window: Comparison) -> StepForecast | None:
        """Predict a step's duration under a plan; None if the cost of an assignment is unknown."""
        step, cost = self.step, self.step_cost
        if step is None or cost is None or not (cost.is_known and step.step_s > 0):
            return None
        freed = (on_window.busiest_before - on_window.busiest_after) / step.num_steps
        # Experts take at most the whole step, whatever the fit says.
        proposed_s = max(
            step.step_s - cost.per_assignment_s * freed,
            step.step_s * min(1.0, on_window.busiest_after / on_window.busiest_before),
        )
        return StepForecast(
            current_s=step.step_s,
            proposed_s=proposed_s,
            error_s=cost.per_assignment_error_s * abs(freed),
            mean_rank_load=step.mean_rank_load,
        )

    @property
    def unknown(self) -> str:
        """Why there is no forecast."""
        return unknown_cost(self.step_cost, num_windows=self.num_windows)

    def move_cost(self, policy: Policy) -> MoveCost:
        """What moves cost: as the latest waves measured it, or as the policy assumes."""
        return _measured(self.waves[:MAX_WAVES]) or MoveCost(
            bandwidth_bytes_per_s=policy.bandwidth_bytes_per_s,
            switch_stall_s=policy.switch_stall_s,
            num_waves=0,
        )

    def wave_bytes(
        self, most_bytes: int, *, time_saved: float, expert_bytes: int, policy: Policy
    ) -> int:
        """Bytes that a rank stages per wave so that a change costs least; within the policy's.

        A change whose rank with the most bytes stages `most_bytes` saves the fraction `time_saved`
        of the time. Smaller waves save some of it sooner, but each of them stalls steps: in n equal
        waves that take `pull_s` together, `time_saved * pull_s / (2 * n)` more is lost than in
        infinitely many, and n stalls.
        """
        cost = self.move_cost(policy)
        pull_s = most_bytes / cost.bandwidth_bytes_per_s
        best_s = (
            math.sqrt(2.0 * pull_s * cost.switch_stall_s / time_saved) if time_saved > 0 else pull_s
        )
        best_bytes = math.ceil(max(best_s, LEAST_WAVE_S) * cost.bandwidth_bytes_per_s)
        return min(max(best_bytes, expert_bytes), policy.wave_bytes(expert_bytes))

    def lost_s(
        self, most_bytes: int, *, wave_bytes: int, is_reshared: bool, policy: Policy
    ) -> float:
        """Seconds of serving that a change of layout costs.

        Ranks fetch in parallel, so the rank with the most bytes, `most_bytes`, sets the duration.
        They also set the number of generations, because each stages at most `wave_bytes`. New
        shares alone need one generation that stages nothing.
        """
        cost = self.move_cost(policy)
        pull_s = most_bytes / cost.bandwidth_bytes_per_s
        num_switches = max(-(-most_bytes // wave_bytes), int(is_reshared))
        return pull_s * policy.pull_slowdown + num_switches * cost.switch_stall_s


def _measured(waves: Sequence[MeasuredWave]) -> MoveCost | None:
    if len(waves) < MIN_WAVES:
        return None
    return MoveCost(
        bandwidth_bytes_per_s=median(
            one.most_bytes / max(_SHORTEST_S, one.staging_s) for one in waves
        ),
        switch_stall_s=median(one.stall_s for one in waves),
        num_waves=len(waves),
    )
