"""`LoadCounters`: turns cumulative load reports into differences.

Rejects reports that are implausible for one rank. `WindowLoad.contradiction` checks all ranks
together.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from equipoise.planning.arrays import AssignmentCounts
from equipoise.planning.errors import InvalidReportError
from equipoise.planning.layout import Layout
from equipoise.planning.load import LoadDelta
from equipoise.planning.phase import Phase

MAX_ASSIGNMENTS_PER_STEP = 2**24
"""More than a slot can receive in a step: 1,024 ranks x 16,384 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadReport:
    """Cumulative counters of one rank.

    Counters only grow, so a lost, repeated or late report is harmless.
    """

    boot_id: str
    """Identifies the worker process: counters start at zero with each boot."""
    epoch: int
    rank: int
    generation: int
    """Generation that routed the assignments."""
    phase: Phase
    assignments: AssignmentCounts
    """uint64 [layers, slots_per_rank]: received per own slot since `generation` began on this
    boot."""


class LoadCounters:
    """Turns the cumulative reports of one epoch into differences.

    State is bounded: the last boot of each rank and its last few generations.

    Counters of generations from `counted_from` on started at zero while this object existed. Older
    generations began earlier (the balancer was restarted), so the first report of one is only the
    baseline for the next: its assignments cover an unknown time.
    """

    def __init__(self, *, epoch: int, counted_from: int = 1) -> None:
        self._epoch = epoch
        self._counted_from = counted_from
        self._ranks: dict[int, _RankCounters] = {}

    def accept(
        self, report: LoadReport, layout: Layout, *, num_steps: int | None = None
    ) -> LoadDelta:
        """Compute the assignments that a report adds to the previous one of its rank.

        Counters that shrink although steps advanced are not a late report: the previous counters
        were wrong, and the new ones become the baseline.

        Args:
            report: the report.
            layout: the layout of the report's generation, or the newest one if it is unknown.
            num_steps: steps since the previous report; None if unknown.

        Raises:
            InvalidReportError: the report cannot be used and is not remembered. Kinds:
                report_wrong_epoch, report_unknown_rank, report_future_generation,
                report_old_generation, report_old_boot, report_shape, report_shrinking_counter,
                report_implausible.
        """
        _check(report, layout, epoch=self._epoch)
        known = self._ranks.get(report.rank) or _RankCounters(boot_id=report.boot_id)
        if report.boot_id in known.retired_boots:
            raise InvalidReportError(
                "report_old_boot",
                f"rank {report.rank} reports for boot {report.boot_id!r}, which boot "
                f"{known.boot_id!r} has replaced",
            )
        if report.boot_id != known.boot_id:
            retired = deque([*known.retired_boots, known.boot_id], maxlen=_BOOTS_KEPT)
            known = _RankCounters(boot_id=report.boot_id, retired_boots=retired)
        added = self._added(report, known, num_steps=num_steps)
        known.remember(report)
        self._ranks[report.rank] = known
        return LoadDelta(rank=report.rank, layout=layout, slot_load=added.astype(np.float64))

    def _added(
        self, report: LoadReport, known: "_RankCounters", *, num_steps: int | None
    ) -> AssignmentCounts:
        previous = self._previous(report, known)
        added = report.assignments - previous
        # Two generations may be reported at the same time; the second report then has no new steps.
        most = (
            _MOST if num_steps is None else min(_MOST, MAX_ASSIGNMENTS_PER_STEP * max(1, num_steps))
        )
        if int(added.max()) <= most:
            return added  # The common case.
        below = report.assignments < previous
        if below.any() and num_steps is not None and num_steps > 0:
            return np.zeros_like(report.assignments)
        if below.any():
            layer, slot = (int(index) for index in np.argwhere(below)[0])
            raise InvalidReportError(
                "report_shrinking_counter",
                f"rank {report.rank} counted {int(report.assignments[layer, slot])} assignments in "
                f"layer {layer}, own slot {slot} of generation {report.generation}, fewer than the "
                f"{int(previous[layer, slot])} before",
            )
        layer, slot = (int(index) for index in np.argwhere(added > most)[0])
        raise InvalidReportError(
            "report_implausible",
            f"rank {report.rank} reports that layer {layer}, own slot {slot} received "
            f"{int(added[layer, slot])} assignments in {num_steps} steps, more than "
            f"{most}: restart it",
        )

    def _previous(self, report: LoadReport, known: "_RankCounters") -> AssignmentCounts:
        if report.generation <= known.forgotten_generation:
            raise InvalidReportError(
                "report_old_generation",
                f"rank {report.rank} reports for generation {report.generation}, "
                f"which has been dropped",
            )
        previous = known.assignments.get((report.generation, report.phase))
        if previous is not None:
            return previous
        began_before = report.generation < self._counted_from
        return report.assignments if began_before else np.zeros_like(report.assignments)


_MOST = 2**63
"""Unsigned differences above this are negative."""

_GENERATIONS_KEPT = 4
_BOOTS_KEPT = 4


@dataclass(slots=True, kw_only=True)
class _RankCounters:
    """The last counters of one rank, by generation and phase."""

    boot_id: str
    retired_boots: deque[str] = field(default_factory=lambda: deque(maxlen=_BOOTS_KEPT))
    assignments: dict[tuple[int, Phase], AssignmentCounts] = field(default_factory=dict)
    forgotten_generation: int = 0

    def remember(self, report: LoadReport) -> None:
        is_new = (report.generation, report.phase) not in self.assignments
        self.assignments[report.generation, report.phase] = report.assignments.copy()
        if not is_new:
            return
        generations = sorted({generation for generation, _ in self.assignments})
        for generation in generations[:-_GENERATIONS_KEPT]:
            self.forgotten_generation = generation
            for phase in Phase:
                self.assignments.pop((generation, phase), None)


def _check(report: LoadReport, layout: Layout, *, epoch: int) -> None:
    if report.epoch != epoch:
        raise InvalidReportError(
            "report_wrong_epoch",
            f"rank {report.rank} reports for epoch {report.epoch}, but the current one is {epoch}",
        )
    if not 0 <= report.rank < layout.num_ranks:
        raise InvalidReportError(
            "report_unknown_rank",
            f"rank {report.rank} is out of range: ranks are 0 to {layout.num_ranks - 1}",
        )
    if report.generation != layout.generation:
        is_future = report.generation > layout.generation
        raise InvalidReportError(
            "report_future_generation" if is_future else "report_old_generation",
            f"rank {report.rank} reports for generation {report.generation}, whose layout is not "
            f"{'known' if is_future else 'kept'}; the newest is {layout.generation}",
        )
    expected = (layout.num_layers, layout.slots_per_rank)
    if report.assignments.shape != expected:
        raise InvalidReportError(
            "report_shape",
            f"rank {report.rank} reports counters of shape {report.assignments.shape}, but "
            f"[layers, slots_per_rank] is {expected}",
        )
