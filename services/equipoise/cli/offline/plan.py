"""`equipoise plan`: the layout that loads ask for, what it is worth, and as a file for any engine.

Makes one plan by the balancer's own planning code and shows it. Decides nothing about it.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from equipoise.cli.display import bytes_words, console
from equipoise.cli.offline.inputs import (
    Case,
    CurrentLayout,
    numbers,
    pool_topology,
    read_case,
    read_current,
    unequal_topology,
)
from equipoise.cli.offline.plan_settings import PlanSettings
from equipoise.cli.offline.settings import ToolInputError
from equipoise.formats.files import write_placement
from equipoise.formats.placement import Placement
from equipoise.planning.arrays import ExpertTable, Load, ShareTable
from equipoise.planning.balance import balancedness, balancedness_per_layer, rank_loads
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.load import assignments_per_layer
from equipoise.planning.planner import Plan, plan
from equipoise.planning.policy import Weighting
from equipoise.planning.shared_expert import plan_with_shared_ranks
from equipoise.planning.shares import even_shares
from equipoise.planning.topology import Topology

MAX_CURVE_POINTS = 200
_SHOWN_CURVE_POINTS = 7


def run(settings: PlanSettings) -> int:
    """Plan, write the layout if asked to, and print what it is worth.

    Raises:
        FormatError: a file cannot be read or written.
        ToolInputError: files and options contradict each other, or nothing fits.
    """
    outcome = _make(settings)
    if settings.out is not None:
        write_placement(outcome.placement, settings.out, form=settings.format)
    if settings.json:
        print(json.dumps(_document(outcome, settings), indent=2))
    else:
        _show(outcome, settings)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Outcome:
    """A plan beside what it was made from."""

    case: Case
    topology: Topology
    current: CurrentLayout | None
    plan: Plan
    plan_ms: float
    load: Load
    held: ExpertTable
    held_shares: ShareTable | None

    @property
    def moves(self) -> int:
        """Slots that change, counted from what the file of the current layout says."""
        return int(np.count_nonzero(self.plan.expert_of_slot != self.held))

    @property
    def balancedness_of_layer_now(self) -> Load:
        """What the ranks have now, [layers]; experts that no rank holds are left out."""
        return balancedness_per_layer(self._rank_loads_now())

    @property
    def balancedness_now(self) -> float:
        """The same, mean over the layers with traffic."""
        return balancedness(self._rank_loads_now())

    def _rank_loads_now(self) -> Load:
        live = self.topology.only(self.plan.ranks)
        return rank_loads(
            self.held,
            load=self.load,
            num_ranks=live.num_ranks,
            first_slot=live.first_slot,
            share_of_slot=self.held_shares,
        )

    @property
    def shared_replicas(self) -> list[int] | None:
        """Replicas of the shared expert in each layer, if it is planned like a routed one."""
        if not self.case.has_shared_expert:
            return None
        shared = self.case.model.num_experts - 1
        return [int(count) for count in (self.plan.expert_of_slot == shared).sum(axis=1)]

    @property
    def num_uneven_layers(self) -> int:
        """Layers in which an expert's slots serve unequal shares."""
        made = self.plan
        if made.share_of_slot is None:
            return 0
        even = even_shares(made.expert_of_slot, num_experts=self.case.model.num_experts)
        return int((made.share_of_slot != even).any(axis=1).sum())

    @property
    def placement(self) -> Placement:
        return Placement(
            expert_of_slot=self.plan.expert_of_slot,
            num_experts=self.case.model.num_experts,
            num_ranks=len(self.plan.ranks),
            first_moe_layer=self.case.recording.first_moe_layer,
            share_of_slot=self.plan.share_of_slot,
        )


def _make(settings: PlanSettings) -> _Outcome:
    case = read_case(settings.source)
    load = case.recording.total()
    topology = (
        unequal_topology(settings.pool, case.model, slots_of_rank=settings.slots_of_rank)
        if settings.slots_of_rank
        else pool_topology(settings.pool, case.model)
    )
    current = read_current(settings.pool, case=case, topology=topology)
    arguments: dict[str, Any] = {
        "model": case.model,
        "topology": topology,
        "current": current.layout if current else None,
        "algorithm": settings.algorithm,
        "exclude_ranks": _excluded(settings, topology),
        "samples": _samples(load) if current else None,
    }
    if settings.shared_ranks is None:
        planner: Callable[..., Plan] = plan
        arguments["locality"] = settings.locality
        arguments["max_moves"] = settings.max_moves
        arguments["target_balancedness"] = settings.target_balancedness
        arguments["weighted"] = Weighting.AUTO if settings.weighted else Weighting.OFF
    else:
        planner = plan_with_shared_ranks
        arguments["num_shared_ranks"] = settings.shared_ranks
    try:
        # The first call loads or compiles the planner's machine code, which is no part of a plan.
        planner(
            load[:1], **{**arguments, "model": replace(case.model, num_layers=1), "current": None}
        )
        started_s = time.perf_counter()
        made = planner(load, **arguments)
        plan_ms = (time.perf_counter() - started_s) * 1000
    except InvalidLayoutError as error:
        raise ToolInputError(str(error)) from None
    held = _held(current, case, topology.only(made.ranks), made.ranks)
    has_all_ranks = len(made.ranks) == topology.num_ranks
    return _Outcome(
        case=case,
        topology=topology,
        current=current,
        plan=made,
        plan_ms=plan_ms,
        load=load,
        held=held,
        held_shares=current.share_of_slot if current and has_all_ranks else None,
    )


def _samples(load: Load) -> float | None:
    """Expert assignments per layer if loads are counts: then chance moves nothing."""
    return assignments_per_layer(load) if (load == np.trunc(load)).all() else None


def _excluded(settings: PlanSettings, topology: Topology) -> frozenset[int]:
    ranks = numbers("--exclude-ranks", settings.exclude_ranks)
    unknown = [rank for rank in ranks if rank >= topology.num_ranks]
    if unknown:
        raise ToolInputError(
            f"--exclude-ranks {unknown[0]}: ranks are 0 to {topology.num_ranks - 1}"
        )
    if settings.shared_ranks and settings.shared_ranks >= topology.num_ranks - len(ranks):
        raise ToolInputError(
            f"--shared-ranks {settings.shared_ranks} leave no rank for routed experts"
        )
    return frozenset(ranks)


def _held(
    current: CurrentLayout | None, case: Case, live: Topology, ranks: tuple[int, ...]
) -> ExpertTable:
    """What the slots of the ranks hold now, [layers, slots]."""
    if current is None:
        row = np.arange(live.num_slots, dtype=np.int32) % case.model.num_experts
        return np.tile(row, (case.model.num_layers, 1))
    columns = np.concatenate(
        [np.arange(live.slots_per_rank) + rank * live.slots_per_rank for rank in ranks]
    )
    return current.expert_of_slot[:, columns]


def _document(outcome: _Outcome, settings: PlanSettings) -> dict[str, Any]:
    """For `--json`; balancedness is the mean over layers of mean / max rank load."""
    made, model = outcome.plan, outcome.case.model
    return {
        "balancedness": made.balancedness,
        "balancedness_min_layer": float(made.balancedness_of_layer.min()),
        "balancedness_current": outcome.balancedness_now,
        "bound": made.bound,
        "moves": outcome.moves,
        "bytes": outcome.moves * model.expert_bytes,
        "off_node_share": made.off_node_share,
        "uneven_layers": outcome.num_uneven_layers,
        "plan_ms": outcome.plan_ms,
        "reason": made.reason,
        "algorithm": made.algorithm.value,
        "curve": _thinned(made.curve, MAX_CURVE_POINTS),
        "moves_from": "current" if outcome.current else "contiguous",
        "shared_replicas": outcome.shared_replicas,
        "twins_in_current": outcome.current.num_twins if outcome.current else 0,
        "num_layers": model.num_layers,
        "num_experts": model.num_experts,
        "num_groups": model.num_groups,
        "num_ranks": len(made.ranks),
        "num_slots": int(made.expert_of_slot.shape[1]),
        "num_windows": outcome.case.recording.num_windows,
        "first_moe_layer": outcome.case.recording.first_moe_layer,
        "expert_bytes": model.expert_bytes,
        "expert_bytes_origin": outcome.case.expert_bytes_origin,
        "out": None if settings.out is None else str(settings.out),
    }


def _show(outcome: _Outcome, settings: PlanSettings) -> None:
    made, model = outcome.plan, outcome.case.model
    out = console()
    num_slots = int(made.expert_of_slot.shape[1])
    out.print(
        f"{model.num_layers} layers x {model.num_experts} experts, "
        f"{outcome.case.recording.num_windows} window(s) of loads; {len(made.ranks)} ranks on "
        f"{len(outcome.topology.only(made.ranks).nodes)} node(s), {num_slots} slots "
        f"({num_slots - model.num_experts} redundant)\n"
    )
    now = outcome.balancedness_of_layer_now
    origin = "the current layout" if outcome.current else "experts in order"
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, justify in (("", "left"), ("now", "right"), ("planned", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]  # a literal of its own
    table.add_row(
        "balancedness",
        f"{outcome.balancedness_now:.4f}",
        f"{made.balancedness:.4f}",
        f"mean / max rank load; at most {made.bound:.4f}",
    )
    table.add_row("worst layer", f"{now.min():.4f}", f"{made.balancedness_of_layer.min():.4f}", "")
    slots = model.num_layers * num_slots
    table.add_row("moves", "", f"{outcome.moves:,}", f"of {slots:,} slots, from {origin}")
    table.add_row(
        "bytes",
        "",
        bytes_words(outcome.moves * model.expert_bytes),
        f"{bytes_words(model.expert_bytes)} an expert ({outcome.case.expert_bytes_origin})",
    )
    table.add_row(
        "off-node share",
        "",
        f"{made.off_node_share:.1%}",
        "of the load, away from its group's node",
    )
    if outcome.shared_replicas is not None:
        fewest, most = min(outcome.shared_replicas), max(outcome.shared_replicas)
        count = str(most) if fewest == most else f"{fewest} to {most}"
        table.add_row("shared expert", "", count, "replicas")
    if settings.weighted or outcome.num_uneven_layers:
        table.add_row(
            "uneven shares",
            "",
            f"{outcome.num_uneven_layers:,}",
            f"of {model.num_layers} layers split experts unevenly over their replicas",
        )
    table.add_row("time to plan", "", f"{outcome.plan_ms:.1f} ms", "")
    out.print(table)
    if made.curve:
        out.print("\nwhat moves buy, at best")
        out.print(_curve_table(made.curve))
    out.print(f"\n{made.reason}")
    if outcome.current and outcome.current.num_twins:
        out.print(
            f"the current layout holds experts twice on a rank: {outcome.current.num_twins} of "
            f"the moves repair that"
        )
    if settings.out is not None:
        out.print(f"written to {settings.out} for {settings.format}")


def _curve_table(curve: Sequence[tuple[int, float]]) -> Table:
    """Moves above what they reach."""
    table = Table(box=None, pad_edge=False, show_header=False)
    points = _thinned(curve, _SHOWN_CURVE_POINTS)
    table.add_row("moves", *(f"{moves:,}" for moves, _ in points), style="dim")
    table.add_row("balancedness", *(f"{reached:.3f}" for _, reached in points))
    return table


def _thinned(curve: Sequence[tuple[int, float]], num_points: int) -> list[tuple[int, float]]:
    """At most so many points of a curve, evenly over its balancedness, with both ends."""
    if len(curve) <= num_points:
        return list(curve)
    reached = np.array([value for _, value in curve])
    wanted = np.linspace(reached[0], reached[-1], num_points)
    return [curve[index] for index in np.unique(np.searchsorted(reached, wanted))]
