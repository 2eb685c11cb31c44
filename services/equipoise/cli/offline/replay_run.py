"""Replays a recording through the balancer's own averaging, planning and verdicts. Pure.

It assumes that an accepted layout is in place when the next window begins, and that traffic does
not depend on the layout.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from equipoise.formats.recording import Recording
from equipoise.planning.arrays import Load
from equipoise.planning.balance import balancedness, layout_loads
from equipoise.planning.layout import Layout
from equipoise.planning.load import LoadAverage, Shift, follow_traffic
from equipoise.planning.policy import Policy
from equipoise.planning.proposal import Proposal, ProposalRequest, propose
from equipoise.planning.topology import ModelShape, Topology
from equipoise.planning.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedWindow:
    """One window and the decision at its end."""

    window: str
    """Name of the window."""

    balancedness: float | None
    """Balancedness under the layout in use; None without traffic."""

    shifted: bool
    """Whether a traffic shift was detected."""

    accepted: bool | None
    """Whether a plan was adopted; None without a decision."""

    reason: str
    """Reason of the verdict; empty without a decision."""

    moves: int
    """Experts copied after the window."""

    bytes: int
    """Bytes of those experts."""

    lost_s: float
    """Seconds of serving that copying them costs, at the policy's price."""

    next_kept: float | None
    """Balancedness of the next window had the layout been kept; None if it has no traffic, or
    there is none."""

    next_taken: float | None
    """Balancedness of the next window under the layout chosen; None as above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRun:
    """All windows under one policy."""

    name: str
    """Name of the policy."""

    policy: Policy | None
    """The policy; None never moves anything."""

    windows: tuple[ReplayedWindow, ...]
    """The windows, in order."""

    @property
    def measured(self) -> Sequence[float]:
        """Balancedness of each window with traffic, under the layout in use."""
        return [one.balancedness for one in self.windows if one.balancedness is not None]

    @property
    def balancedness_mean(self) -> float:
        """Mean over the windows with traffic."""
        return fmean(self.measured)

    @property
    def balancedness_min(self) -> float:
        """Balancedness of the worst window."""
        return min(self.measured)

    @property
    def switches(self) -> int:
        """Number of plans adopted."""
        return sum(window.accepted is True for window in self.windows)

    @property
    def rejections(self) -> int:
        """Number of plans rejected."""
        return sum(window.accepted is False for window in self.windows)

    @property
    def moves(self) -> int:
        """Total number of experts copied."""
        return sum(window.moves for window in self.windows)

    @property
    def bytes(self) -> int:
        """Total bytes copied."""
        return sum(window.bytes for window in self.windows)


def replay(
    recording: Recording,
    *,
    name: str,
    policy: Policy | None,
    model: ModelShape,
    topology: Topology,
    start: Layout,
    window_s: float,
    on_window: Callable[[], None] = lambda: None,
) -> ReplayRun:
    """Run a policy over the windows of a recording, each `window_s` seconds long.

    A decision is due at the end of the first window after the policy's interval has passed. If the
    interval spans several windows, the verdict considers them together, as the balancer does.
    `on_window` is called after each window.
    """
    decider = None if policy is None else Decider(policy, model=model, topology=topology)
    layout = start
    windows: list[ReplayedWindow] = []
    for index, window in enumerate(recording.windows):
        proposal = None
        if decider is not None:
            proposal = decider.close(window, layout, now=(index + 1) * window_s)
        adopted = proposal if proposal is not None and proposal.verdict.accepted else None
        taken = layout
        if adopted is not None:
            taken = layout.with_placement(
                adopted.plan.expert_of_slot,
                generation=layout.generation + 1,
                share_of_slot=adopted.plan.share_of_slot,
            )
        following = None if index + 1 == recording.num_windows else recording.windows[index + 1]
        windows.append(
            ReplayedWindow(
                window=recording.names[index],
                balancedness=_balancedness(layout, window),
                shifted=proposal is not None and proposal.request.shift.detected,
                accepted=None if proposal is None else proposal.verdict.accepted,
                reason="" if proposal is None else proposal.verdict.reason,
                moves=0 if adopted is None else adopted.verdict.moves,
                bytes=0 if adopted is None else adopted.verdict.bytes,
                lost_s=0.0 if adopted is None else adopted.verdict.lost_s,
                next_kept=None if following is None else _balancedness(layout, following),
                next_taken=None if following is None else _balancedness(taken, following),
            )
        )
        layout = taken
        on_window()
    return ReplayRun(name=name, policy=policy, windows=tuple(windows))


class Decider:
    """The balancer's averages and decisions, driven by window ends instead of a clock."""

    def __init__(self, policy: Policy, *, model: ModelShape, topology: Topology) -> None:
        self._policy, self._model, self._topology = policy, model, topology
        shape = {"num_layers": model.num_layers, "num_experts": model.num_experts}
        self._fast = LoadAverage.start(**shape, half_life_s=policy.fast_half_life_s, now=0.0)
        self._slow = LoadAverage.start(**shape, half_life_s=policy.slow_half_life_s, now=0.0)
        self._open = np.zeros((model.num_layers, model.num_experts))
        self._opened_s = 0.0
        self._due_s = policy.interval_s
        self._shifts: Sequence[Shift] = ()
        self._last_switch_s: float | None = None
        self._traffic = Traffic()

    def close(self, window: Load, layout: Layout, *, now: float) -> Proposal | None:
        """Count a window; propose a layout if a decision is due and there was traffic."""
        self._open = self._open + window
        # Rounding may leave a sum of window lengths just below a multiple of the interval.
        if now < self._due_s * (1 - 1e-9):
            return None
        load, duration_s = self._open, now - self._opened_s
        self._open, self._opened_s = np.zeros_like(load), now
        self._due_s = max(self._due_s, now - self._policy.interval_s) + self._policy.interval_s
        shift = self._fold(load, duration_s=duration_s, now=now)
        self._traffic = self._traffic.after(
            load,
            duration_s=duration_s,
            half_life_s=self._policy.slow_half_life_s,
            recent_half_life_s=self._policy.fast_half_life_s,
            factor=self._policy.shift_factor,
        )
        if not load.any():
            return None
        proposal = propose(
            ProposalRequest(
                current=layout,
                average=self._slow.per_second(),
                samples=self._slow.samples(),
                window=load,
                traffic=self._traffic,
                shift=shift,
                model=self._model,
                topology=self._topology,
                policy=self._policy,
                first_generation=layout.generation + 1,
                now=now,
                last_switch_s=self._last_switch_s,
            )
        )
        if proposal.verdict.accepted:
            self._last_switch_s = now
            self._traffic = self._traffic.switched()
        return proposal

    def _fold(self, load: Load, *, duration_s: float, now: float) -> Shift:
        self._fast, self._slow, self._shifts, shift = follow_traffic(
            self._fast,
            self._slow,
            load,
            before=self._shifts,
            duration_s=duration_s,
            factor=self._policy.shift_factor,
            now=now,
        )
        return shift


def _balancedness(layout: Layout, load: Load) -> float | None:
    return balancedness(layout_loads(layout, load)) if load.any() else None
