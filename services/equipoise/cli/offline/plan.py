"""`equipoise plan`: plan a layout for recorded loads with the balancer's planner."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.progress import TimeElapsedColumn
from rich.table import Table

from equipoise.cli.display import console, format_count, print_json, progress_bar
from equipoise.cli.offline.inputs import (
    Case,
    CurrentLayout,
    numbers,
    places_text,
    pool_topology,
    read_case,
    read_current,
    unequal_topology,
)
from equipoise.cli.offline.settings import PlanSettings
from equipoise.formats.files import write_placement
from equipoise.formats.placement import ExpertPlacement
from equipoise.planning.arrays import EMPTY, ExpertTable, Load
from equipoise.planning.balance import balancedness, balancedness_per_layer, rank_loads
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import count_moves, count_replicas
from equipoise.planning.load import assignments_per_layer
from equipoise.planning.places import Wishes, plan_in_places
from equipoise.planning.placing.blanks import widened
from equipoise.planning.planner import Plan, plan
from equipoise.planning.policy import SlotUse, Weighting
from equipoise.planning.shared_expert import plan_with_shared_ranks
from equipoise.planning.shares import even_shares
from equipoise.planning.topology import Topology
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.numbers import format_bytes

MAX_CURVE_POINTS = 200
_SHOWN_CURVE_POINTS = 7


def run(settings: PlanSettings) -> int:
    """Plan, write the layout if a file is named, and print its balance and cost.

    Raises:
        FormatError: a file cannot be read or written.
        InvalidSettingsError: files and options contradict each other, or no layout fits.
    """
    report = _make(settings)
    if settings.out is not None:
        write_placement(report.placement, settings.out, form=settings.format)
    if settings.json:
        print_json(_document(report, settings))
    else:
        _show(report, settings)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PlanReport:
    """A plan and its inputs."""

    case: Case
    """Loads and model."""

    topology: Topology
    """All ranks, including excluded ones."""

    current: CurrentLayout | None
    """The current layout, if a file was given."""

    plan: Plan
    """The plan."""

    plan_ms: float
    """Time to plan."""

    held: ExpertTable
    """Experts that the plan's ranks hold now, [layers, slots]."""

    rank_load_now: Load
    """Current load, [layers, ranks]; experts that no rank holds are ignored."""

    @property
    def live(self) -> Topology:
        """The ranks that the plan uses."""
        return self.topology.only(self.plan.ranks)

    @property
    def moves(self) -> int:
        """Number of slots that change from the current layout."""
        return count_moves(self.held, self.plan.expert_of_slot)

    @property
    def shared_replicas(self) -> list[int] | None:
        """Replicas of the shared expert in each layer, if it is planned as a routed expert."""
        if not self.case.has_shared_expert:
            return None
        shared = self.case.model.num_experts - 1
        return [int(count) for count in (self.plan.expert_of_slot == shared).sum(axis=1)]

    @property
    def num_lost(self) -> int:
        """Number of experts, over all layers, that none of the plan's ranks holds now."""
        replicas = count_replicas(self.held, num_experts=self.case.model.num_experts)
        return int((replicas == 0).sum())

    @property
    def num_uneven_layers(self) -> int:
        """Number of layers in which some expert's replicas serve unequal shares."""
        made = self.plan
        if made.share_of_slot is None:
            return 0
        even = even_shares(made.expert_of_slot, num_experts=self.case.model.num_experts)
        return int((made.share_of_slot != even).any(axis=1).sum())

    @property
    def placement(self) -> ExpertPlacement:
        return ExpertPlacement(
            expert_of_slot=self.plan.expert_of_slot,
            num_experts=self.case.model.num_experts,
            num_ranks=len(self.plan.ranks),
            first_moe_layer=self.case.recording.first_moe_layer,
            share_of_slot=self.plan.share_of_slot,
        )


def _make(settings: PlanSettings) -> _PlanReport:
    case = read_case(settings.source)
    load = case.recording.total()
    topology = (
        unequal_topology(settings.pool, case.model, slots_of_rank=settings.slots_of_rank)
        if settings.slots_of_rank
        else pool_topology(settings.pool, case.model)
    )
    current = read_current(settings.pool, case=case, topology=topology)
    is_counts = bool((load == np.trunc(load)).all())
    arguments: dict[str, Any] = {
        "model": case.model,
        "topology": topology,
        "current": current.layout if current else None,
        "algorithm": settings.algorithm,
        "exclude_ranks": _excluded(settings, topology),
        # If the loads are counts, the plan makes no moves for noise.
        "samples": assignments_per_layer(load) if current and is_counts else None,
    }
    if settings.pool.places:
        planner: Callable[..., Plan] = _pooled
        arguments["wishes"] = Wishes(
            algorithm=arguments.pop("algorithm"),
            slots=SlotUse.POOLED,
            locality=settings.locality,
            weighted=Weighting.AUTO if settings.weighted else Weighting.OFF,
            max_moves=settings.max_moves,
            target_balancedness=settings.target_balancedness,
            samples=arguments.pop("samples"),
        )
    elif settings.shared_ranks is None:
        planner = plan
        arguments["locality"] = settings.locality
        arguments["max_moves"] = settings.max_moves
        arguments["target_balancedness"] = settings.target_balancedness
        arguments["weighted"] = Weighting.AUTO if settings.weighted else Weighting.OFF
    else:
        planner = plan_with_shared_ranks
        arguments["num_shared_ranks"] = settings.shared_ranks
    try:
        # The first call compiles or loads machine code; keep that out of the measured time.
        if not settings.pool.places:
            planner(
                load[:1],
                **{**arguments, "model": replace(case.model, num_layers=1), "current": None},
            )
        started_s = time.perf_counter()
        with progress_bar(TimeElapsedColumn()) as progress:
            progress.add_task("planning", total=None)
            made = planner(load, **arguments)
        plan_ms = (time.perf_counter() - started_s) * 1000
    except InvalidLayoutError as error:
        raise InvalidSettingsError(str(error)) from None
    live = topology.only(made.ranks)
    held = _held(current, case, live, made.ranks)
    has_all_ranks = len(made.ranks) == topology.num_ranks
    return _PlanReport(
        case=case,
        topology=topology,
        current=current,
        plan=made,
        plan_ms=plan_ms,
        held=held,
        rank_load_now=rank_loads(
            held,
            load=load,
            num_ranks=live.num_ranks,
            first_slot=live.first_slot,
            share_of_slot=current.share_of_slot if current and has_all_ranks else None,
        ),
    )


def _pooled(load: Load, *, wishes: Wishes, **arguments: Any) -> Plan:
    return plan_in_places(load, wishes, **arguments)


def _excluded(settings: PlanSettings, topology: Topology) -> frozenset[int]:
    ranks = numbers("--exclude-ranks", settings.exclude_ranks)
    unknown = [rank for rank in ranks if rank >= topology.num_ranks]
    if unknown:
        raise InvalidSettingsError(
            f"--exclude-ranks {unknown[0]}: the ranks are 0 to {topology.num_ranks - 1}"
        )
    if settings.shared_ranks and settings.shared_ranks >= topology.num_ranks - len(ranks):
        raise InvalidSettingsError(
            f"--shared-ranks {settings.shared_ranks} leaves no rank for routed experts"
        )
    return frozenset(ranks)


def _held(
    current: CurrentLayout | None, case: Case, live: Topology, ranks: tuple[int, ...]
) -> ExpertTable:
    """The experts in the slots of `ranks` now, [layers, slots]."""
    if current is None:
        in_use = live.slots_of_layer(case.model.num_layers)
        row = np.arange(sum(in_use), dtype=np.int32) % case.model.num_experts
        return widened(np.tile(row, (case.model.num_layers, 1)), live, in_use, fill=EMPTY)
    columns = np.concatenate(
        [np.arange(live.slots_per_rank) + rank * live.slots_per_rank for rank in ranks]
    )
    return current.expert_of_slot[:, columns]


def _document(report: _PlanReport, settings: PlanSettings) -> dict[str, Any]:
    """The report for --json; balancedness is the mean over layers of mean / max rank load."""
    made, model = report.plan, report.case.model
    return {
        "balancedness": made.balancedness,
        "balancedness_min_layer": float(made.balancedness_of_layer.min()),
        "balancedness_current": balancedness(report.rank_load_now),
        "bound": made.bound,
        "lost_experts": report.num_lost,
        "moves": report.moves,
        "bytes": report.moves * model.expert_bytes,
        "off_node_share": made.off_node_share,
        "uneven_layers": report.num_uneven_layers,
        "plan_ms": report.plan_ms,
        "reason": made.reason,
        "algorithm": made.algorithm.value,
        "curve": _thinned(made.curve, MAX_CURVE_POINTS),
        "moves_from": "current" if report.current else "contiguous",
        "shared_replicas": report.shared_replicas,
        "twins_in_current": report.current.num_twins if report.current else 0,
        "num_layers": model.num_layers,
        "num_experts": model.num_experts,
        "num_groups": model.num_groups,
        "num_ranks": len(made.ranks),
        "num_slots": int(made.expert_of_slot.shape[1]),
        "places_of_rank": report.live.places_of_rank,
        "slots_of_layer": (made.expert_of_slot != EMPTY).sum(axis=1).tolist(),
        "num_windows": report.case.recording.num_windows,
        "first_moe_layer": report.case.recording.first_moe_layer,
        "expert_bytes": model.expert_bytes,
        "expert_bytes_origin": report.case.expert_bytes_origin,
        "out": None if settings.out is None else str(settings.out),
    }


def _show(report: _PlanReport, settings: PlanSettings) -> None:
    made, model = report.plan, report.case.model
    out = console()
    used = (made.expert_of_slot != EMPTY).sum(axis=1)
    num_slots = int(made.expert_of_slot.shape[1])
    slots_text = f"{num_slots} slots ({num_slots - model.num_experts} redundant)"
    if settings.pool.places:
        slots_text = (
            f"{places_text(report.live)}: {used.min()} to {used.max()} slots in a layer "
            f"({used.mean() - model.num_experts:.1f} redundant on average)"
        )
    out.print(
        f"{model.num_layers} layers x {model.num_experts} experts, "
        f"{format_count(report.case.recording.num_windows, 'window')} of loads; "
        f"{format_count(len(made.ranks), 'rank')} on "
        f"{format_count(len(report.live.nodes), 'node')}, {slots_text}\n"
    )
    now = balancedness_per_layer(report.rank_load_now)
    origin = "the current layout" if report.current else "experts in order"
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, justify in (("", "left"), ("now", "right"), ("planned", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]  # a literal of its own
    table.add_row(
        "balancedness",
        f"{balancedness(report.rank_load_now):.4f}",
        f"{made.balancedness:.4f}",
        f"mean / max rank load; upper bound {made.bound:.4f}",
    )
    table.add_row("worst layer", f"{now.min():.4f}", f"{made.balancedness_of_layer.min():.4f}", "")
    if report.num_lost:
        text = f'of {model.num_layers * model.num_experts:,}; "now" leaves out their load'
        table.add_row("lost experts", f"{report.num_lost:,}", "0", text)
    slots = int(used.sum())
    table.add_row("moves", "", f"{report.moves:,}", f"of {slots:,} slots, from {origin}")
    table.add_row(
        "bytes",
        "",
        format_bytes(report.moves * model.expert_bytes),
        f"{format_bytes(model.expert_bytes)} per expert ({report.case.expert_bytes_origin})",
    )
    table.add_row(
        "off-node share",
        "",
        f"{made.off_node_share:.1%}",
        "of the load is away from its group's node",
    )
    if report.shared_replicas is not None:
        fewest, most = min(report.shared_replicas), max(report.shared_replicas)
        count = str(most) if fewest == most else f"{fewest} to {most}"
        table.add_row("shared expert", "", count, "replicas")
    if settings.weighted or report.num_uneven_layers:
        table.add_row(
            "uneven shares",
            "",
            f"{report.num_uneven_layers:,}",
            f"of {model.num_layers} layers split experts unevenly over their replicas",
        )
    table.add_row("planning time", "", f"{report.plan_ms:.1f} ms", "")
    out.print(table)
    if len(made.curve) > 1:
        out.print("\nbest balancedness by number of moves")
        out.print(_curve_table(made.curve))
    out.print(f"\n{made.reason}")
    if report.current and report.current.num_twins:
        out.print(
            f"the current layout holds experts twice on a rank; {report.current.num_twins} of the "
            "moves fix that"
        )
    if settings.out is not None:
        out.print(f"wrote {settings.out} ({settings.format} format)")


def _curve_table(curve: Sequence[tuple[int, float]]) -> Table:
    """Numbers of moves above the balancedness that each reaches."""
    table = Table(box=None, pad_edge=False, show_header=False)
    points = _thinned(curve, _SHOWN_CURVE_POINTS)
    table.add_row("moves", *(f"{moves:,}" for moves, _ in points), style="dim")
    table.add_row("balancedness", *(f"{reached:.3f}" for _, reached in points))
    return table


def _thinned(curve: Sequence[tuple[int, float]], num_points: int) -> list[tuple[int, float]]:
    """At most `num_points` points of a curve, evenly spaced in balancedness, ends included."""
    if len(curve) <= num_points:
        return list(curve)
    reached = np.array([value for _, value in curve])
    wanted = np.linspace(reached[0], reached[-1], num_points)
    return [curve[index] for index in np.unique(np.searchsorted(reached, wanted))]
