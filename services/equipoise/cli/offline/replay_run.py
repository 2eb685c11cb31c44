"""What a balancer would have done with a recording, window by window. Pure: values in, values out.

It folds, detects, plans and judges by the balancer's own code. It assumes that an accepted layout
is in place when the next window begins, and that traffic does not depend on the layout.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from equipoise.formats.recording import Recording
from equipoise.planning.arrays import Load
from equipoise.planning.balance import balancedness, layout_loads
from equipoise.planning.layout import Layout
from equipoise.planning.load import LoadAverage, Shift, assignments_per_layer, detect_shift
from equipoise.planning.policy import Policy
from equipoise.planning.proposal import Proposal, ProposalRequest, propose
from equipoise.planning.topology import ModelShape, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One window. `balancedness` is what the layout in use made of it.

    `accepted` is None when nothing was decided at its end. `next_kept` and `next_taken` are the
    balancedness on the next window of the layout that was in use and of the one that is then; None
    behind the last window.
    """

    window: str
    balancedness: float
    shifted: bool
    accepted: bool | None
    reason: str
    moves: int
    bytes: int
    next_kept: float | None
    next_taken: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All windows under one policy; None is the policy that never moves anything."""

    name: str
    policy: Policy | None
    steps: tuple[Step, ...]

    @property
    def balancedness_mean(self) -> float:
        """Mean over windows, each under the layout it had."""
        return float(np.mean([step.balancedness for step in self.steps]))

    @property
    def balancedness_min(self) -> float:
        """The worst window's."""
        return min(step.balancedness for step in self.steps)

    @property
    def switches(self) -> int:
        """Plans that were accepted."""
        return sum(step.accepted is True for step in self.steps)

    @property
    def refusals(self) -> int:
        """Plans that were not."""
        return sum(step.accepted is False for step in self.steps)

    @property
    def moves(self) -> int:
        """Experts copied."""
        return sum(step.moves for step in self.steps)

    @property
    def bytes(self) -> int:
        """What they cost."""
        return sum(step.bytes for step in self.steps)


def replay(
    recording: Recording,
    *,
    name: str,
    policy: Policy | None,
    model: ModelShape,
    topology: Topology,
    start: Layout,
    window_s: float,
    on_step: Callable[[], None] = lambda: None,
) -> Run:
    """Run a policy over the windows of a recording, each of which lasted `window_s` seconds.

    A policy decides at the end of the first window at which its interval has passed; with an
    interval of several windows it judges on all of them together, as the balancer does.
    """
    decider = None if policy is None else _Decider(policy, model=model, topology=topology)
    layout = start
    steps: list[Step] = []
    for index, window in enumerate(recording.windows):
        proposal = None
        if decider is not None:
            proposal = decider.close(window, layout, now=(index + 1) * window_s)
        taken = layout
        if proposal is not None and proposal.verdict.accepted:
            taken = layout.with_placement(
                proposal.plan.expert_of_slot,
                generation=layout.generation + 1,
                share_of_slot=proposal.plan.share_of_slot,
            )
        following = None if index + 1 == recording.num_windows else recording.windows[index + 1]
        steps.append(
            _step(recording.names[index], window, following, proposal, kept=layout, taken=taken)
        )
        layout = taken
        on_step()
    return Run(name=name, policy=policy, steps=tuple(steps))


class _Decider:
    """Averages and the decisions they lead to: the balancer's tick without its clock."""

    def __init__(self, policy: Policy, *, model: ModelShape, topology: Topology) -> None:
        self._policy, self._model, self._topology = policy, model, topology
        shape = {"num_layers": model.num_layers, "num_experts": model.num_experts}
        self._fast = LoadAverage.start(**shape, half_life_s=policy.fast_half_life_s, now=0.0)
        self._slow = LoadAverage.start(**shape, half_life_s=policy.slow_half_life_s, now=0.0)
        self._open = np.zeros((model.num_layers, model.num_experts))
        self._opened_s = 0.0
        self._due_s = policy.interval_s
        self._shifted_before = False
        self._last_switch_s: float | None = None

    def close(self, window: Load, layout: Layout, *, now: float) -> Proposal | None:
        """Count a window, and propose a layout if it is time and there is traffic."""
        self._open = self._open + window
        # Sums of window lengths miss a multiple of the interval by rounding.
        if now < self._due_s * (1 - 1e-9):
            return None
        load, duration_s = self._open, now - self._opened_s
        self._open, self._opened_s = np.zeros_like(load), now
        self._due_s = max(self._due_s, now - self._policy.interval_s) + self._policy.interval_s
        shift = self._fold(load, duration_s=duration_s, now=now)
        if not load.any():
            return None
        proposal = propose(
            ProposalRequest(
                current=layout,
                average=self._slow.per_second(),
                window=load,
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
        return proposal

    def _fold(self, load: Load, *, duration_s: float, now: float) -> Shift:
        """Both averages after a window, as the balancer has them; see its `PoolLoads`."""
        self._fast = self._fast.fold(load, now=now)
        self._slow = self._slow.fold(load, now=now)
        shift = detect_shift(
            self._fast.per_second(),
            self._slow.per_second(),
            assignments=assignments_per_layer(load),
            threshold=self._policy.shift_threshold,
        )
        if shift.detected or self._shifted_before:
            self._slow = self._slow.restarted(load, duration_s=duration_s, now=now)
        self._shifted_before = shift.detected
        return shift


def _step(
    name: str,
    window: Load,
    following: Load | None,
    proposal: Proposal | None,
    *,
    kept: Layout,
    taken: Layout,
) -> Step:
    moved = taken is not kept and proposal is not None
    return Step(
        window=name,
        balancedness=_balancedness(kept, window),
        shifted=proposal is not None and proposal.request.shift.detected,
        accepted=None if proposal is None else proposal.verdict.accepted,
        reason="" if proposal is None else proposal.verdict.reason,
        moves=proposal.verdict.moves if moved and proposal is not None else 0,
        bytes=proposal.verdict.bytes if moved and proposal is not None else 0,
        next_kept=None if following is None else _balancedness(kept, following),
        next_taken=None if following is None else _balancedness(taken, following),
    )


def _balancedness(layout: Layout, load: Load) -> float:
    return balancedness(layout_loads(layout, load))
