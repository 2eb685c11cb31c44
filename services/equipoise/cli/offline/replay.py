"""`equipoise replay`: compare policies on recorded windows."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from rich.progress import MofNCompleteColumn
from rich.table import Table

from equipoise.cli.display import (
    NO_DATA,
    console,
    format_count,
    print_json,
    print_whole,
    progress_bar,
)
from equipoise.cli.offline.inputs import (
    Case,
    places_text,
    pool_topology,
    read_case,
    starting_layout,
)
from equipoise.cli.offline.policies import policies_of
from equipoise.cli.offline.replay_run import ReplayedWindow, ReplayRun, replay
from equipoise.cli.offline.settings import ReplaySettings
from equipoise.planning.policy import Policy
from equipoise.planning.topology import Topology
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.numbers import format_bytes

NEVER = "never"
"""Name of the baseline, which never moves anything."""


def run(settings: ReplaySettings) -> int:
    """Replay under each policy and under the baseline; print windows and totals.

    Raises:
        FormatError: a file cannot be read or written.
        InvalidSettingsError: files and options contradict each other.
        ModuleNotFoundError: an image is requested and matplotlib is missing.
    """
    if settings.plot is not None:
        from equipoise.cli.plots import draw_replay  # Fails early if matplotlib is missing.
    named = policies_of(settings.policy)
    if NEVER in named:
        raise InvalidSettingsError(
            f"--policy {NEVER}: the name is reserved for the baseline, which is always included"
        )
    policies: dict[str, Policy | None] = {NEVER: None, **named}
    case = read_case(settings.source)
    topology = pool_topology(settings.pool, case.model)
    runs = _replayed(settings, policies, case, topology)
    if settings.plot is not None:
        draw_replay(runs, settings.plot, window_s=settings.window_s)
    if settings.json:
        print_json(_document(runs, settings, topology))
    else:
        _show(runs, settings, case, topology)
    return 0


def _lost_gpus(run: ReplayRun, settings: ReplaySettings, topology: Topology) -> float:
    """GPUs that imbalance costs, averaged over the windows with traffic."""
    lost = [
        settings.cost.lost_gpus(balancedness, num_ranks=topology.num_ranks)
        for balancedness in run.measured
    ]
    return fmean(lost)


def _replayed(
    settings: ReplaySettings,
    policies: dict[str, Policy | None],
    case: Case,
    topology: Topology,
) -> tuple[ReplayRun, ...]:
    if case.recording.num_windows < 2:
        raise InvalidSettingsError(
            "a replay needs at least two windows: name several files, --loads A,B"
        )
    start = starting_layout(settings.pool, case=case, topology=topology)
    with progress_bar(MofNCompleteColumn()) as progress:
        runs = []
        for name, policy in policies.items():
            task = progress.add_task(name, total=case.recording.num_windows)
            runs.append(
                replay(
                    case.recording,
                    name=name,
                    policy=policy,
                    model=case.model,
                    topology=topology,
                    start=start,
                    window_s=settings.window_s,
                    on_window=lambda task=task: progress.advance(task),  # type: ignore[misc]
                )
            )
    return tuple(runs)


def _document(
    runs: Sequence[ReplayRun], settings: ReplaySettings, topology: Topology
) -> dict[str, Any]:
    """The document for --json."""
    lost = {run.name: _lost_gpus(run, settings, topology) for run in runs}
    return {
        "window_s": settings.window_s,
        "cost_basis": settings.cost.basis,
        "policies": [
            {
                "name": run.name,
                "policy": None if run.policy is None else asdict(run.policy),
                "balancedness_mean": run.balancedness_mean,
                "balancedness_min": run.balancedness_min,
                "switches": run.switches,
                "rejections": run.rejections,
                "moves": run.moves,
                "bytes": run.bytes,
                "gpus_lost": lost[run.name],
                "price_lost_per_hour": settings.cost.price_per_hour(lost[run.name]),
                "windows": [asdict(window) for window in run.windows],
            }
            for run in runs
        ],
    }


def _show(
    runs: Sequence[ReplayRun], settings: ReplaySettings, case: Case, topology: Topology
) -> None:
    out = console()
    model = case.model
    slots_text = f"{topology.num_slots} slots"
    if settings.pool.places:
        slots_text = f"{places_text(topology)}, up to {topology.slots_per_rank} slots in a layer"
    out.print(
        f"{case.recording.num_windows} windows of {settings.window_s:g} s, {model.num_layers} "
        f"layers x {model.num_experts} experts; {format_count(topology.num_ranks, 'rank')} on "
        f"{format_count(len(topology.nodes), 'node')}, {slots_text}"
    )
    for one in runs:
        if one.policy is not None:
            out.print(f"\npolicy {one.name}", style="bold")
            out.print(_windows_table(one.windows))
            if settings.reasons:
                out.print()
                out.print(_reasons_table(one.windows))
    out.print("\nall windows", style="bold")
    print_whole(_totals_table(runs, settings, topology))
    if settings.cost.is_wanted:
        out.print(f"\nGPUs lost to imbalance, {settings.cost.basis}; moves are not included")
    if settings.plot is not None:
        out.print(f"\nwrote {settings.plot}")


def _windows_table(windows: Sequence[ReplayedWindow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("window", overflow="fold")
    for name in ("balance", "next window", "moves", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for window in windows:
        table.add_row(
            window.window,
            NO_DATA if window.balancedness is None else f"{window.balancedness:.3f}",
            _next_balance(window),
            f"{window.moves:,}" if window.moves else "",
            format_bytes(window.bytes) if window.bytes else "",
            _verdict(window),
        )
    return table


def _reasons_table(windows: Sequence[ReplayedWindow]) -> Table:
    """One reason per window, at full width."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    for window in windows:
        if window.reason:
            table.add_row(window.window, window.reason)
    return table


def _next_balance(window: ReplayedWindow) -> str:
    """Balancedness of the next window; after a switch, preceded by its value without it."""
    if window.next_taken is None or window.next_kept is None:
        return ""
    return f"{f'{window.next_kept:.3f} → ' if window.accepted else ''}{window.next_taken:.3f}"


def _verdict(window: ReplayedWindow) -> str:
    if window.accepted is None:
        return ""
    verdict = "switch" if window.accepted else "stay"
    return f"{verdict}, traffic shifted" if window.shifted else verdict


def _totals_table(runs: Sequence[ReplayRun], settings: ReplaySettings, topology: Topology) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("policy")
    columns = ["mean balance", "worst window", "switches", "rejected", "moves", "bytes"]
    for name in (*columns, *settings.cost.columns):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.name,
            f"{run.balancedness_mean:.4f}",
            f"{run.balancedness_min:.4f}",
            str(run.switches),
            str(run.rejections),
            f"{run.moves:,}",
            format_bytes(run.bytes),
            *settings.cost.cells(_lost_gpus(run, settings, topology)),
        )
    return table
