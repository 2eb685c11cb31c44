"""`equipoise replay`: what the balancer would have done with recorded windows, policy by policy."""

import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from equipoise.cli.display import bytes_words, console
from equipoise.cli.offline.inputs import Case, pool_topology, read_case, read_current
from equipoise.cli.offline.policies import policies_of
from equipoise.cli.offline.replay_run import Run, Step, replay
from equipoise.cli.offline.replay_settings import ReplaySettings
from equipoise.cli.offline.settings import ToolInputError
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.policy import Policy
from equipoise.planning.topology import Topology

NEVER = "never"
"""The policy to compare with: nothing is ever moved."""


def run(settings: ReplaySettings) -> int:
    """Replay under each policy and under none, and print both what happened and the totals.

    Raises:
        FormatError: a file cannot be read or written.
        ToolInputError: files and options contradict each other.
    """
    if settings.plot is not None:
        importlib.import_module("matplotlib")  # If it is missing, say so before the work.
    named = policies_of(settings.policy)
    if NEVER in named:
        raise ToolInputError(f"--policy {NEVER}: that one moves nothing, and is always there")
    policies: dict[str, Policy | None] = {NEVER: None, **named}
    case = read_case(settings.source)
    topology = pool_topology(settings.pool, case.model)
    runs = _replayed(settings, policies, case, topology)
    if settings.plot is not None:
        importlib.import_module("equipoise.cli.offline.replay_plot").draw(
            runs, settings.plot, window_s=settings.window_s
        )
    if settings.json:
        print(json.dumps(_document(runs, settings), indent=2))
    else:
        _show(runs, settings, case, topology)
    return 0


def _replayed(
    settings: ReplaySettings,
    policies: dict[str, Policy | None],
    case: Case,
    topology: Topology,
) -> tuple[Run, ...]:
    if case.recording.num_windows < 2:
        raise ToolInputError(
            "a replay needs two windows or more: name several files with commas, --loads A,B"
        )
    current = read_current(settings.pool, case=case, topology=topology)
    start = (
        current.layout
        if current
        else contiguous_layout(
            num_layers=case.model.num_layers,
            num_experts=case.model.num_experts,
            num_ranks=topology.num_ranks,
            slots_per_rank=topology.slots_per_rank,
        )
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    screen = console(stderr=True)
    with Progress(
        *columns, console=screen, transient=True, disable=not screen.is_terminal
    ) as progress:
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
                    on_step=lambda task=task: progress.advance(task),  # type: ignore[misc]
                )
            )
    return tuple(runs)


def _document(runs: Sequence[Run], settings: ReplaySettings) -> dict[str, Any]:
    """For `--json`."""
    return {
        "window_s": settings.window_s,
        "policies": [
            {
                "name": run.name,
                "policy": None if run.policy is None else asdict(run.policy),
                "balancedness_mean": run.balancedness_mean,
                "balancedness_min": run.balancedness_min,
                "switches": run.switches,
                "refusals": run.refusals,
                "moves": run.moves,
                "bytes": run.bytes,
                "windows": [asdict(step) for step in run.steps],
            }
            for run in runs
        ],
    }


def _show(runs: Sequence[Run], settings: ReplaySettings, case: Case, topology: Topology) -> None:
    out = console()
    model = case.model
    out.print(
        f"{case.recording.num_windows} windows of {settings.window_s:g} s, {model.num_layers} "
        f"layers x {model.num_experts} experts; {topology.num_ranks} ranks on "
        f"{len(topology.nodes)} node(s), {topology.num_slots} slots"
    )
    for one in runs:
        if one.policy is not None:
            out.print(f"\npolicy {one.name}", style="bold")
            out.print(_windows_table(one.steps))
            if settings.reasons:
                out.print()
                out.print(_reasons_table(one.steps))
    out.print("\nall windows", style="bold")
    out.print(_totals_table(runs))
    if settings.plot is not None:
        out.print(f"\ndrawn to {settings.plot}")


def _windows_table(steps: Sequence[Step]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("window", overflow="fold")
    for name in ("balance", "on the next", "moves", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for step in steps:
        table.add_row(
            step.window,
            f"{step.balancedness:.3f}",
            _next_words(step),
            f"{step.moves:,}" if step.moves else "",
            bytes_words(step.bytes) if step.bytes else "",
            _verdict_words(step),
        )
    return table


def _reasons_table(steps: Sequence[Step]) -> Table:
    """A sentence a window, over the whole width."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    for step in steps:
        if step.reason:
            table.add_row(step.window, step.reason)
    return table


def _next_words(step: Step) -> str:
    """The balancedness of the next window, and before it what it would be without the switch."""
    if step.next_taken is None or step.next_kept is None:
        return ""
    return f"{f'{step.next_kept:.3f} → ' if step.accepted else ''}{step.next_taken:.3f}"


def _verdict_words(step: Step) -> str:
    if step.accepted is None:
        return ""
    word = "switch" if step.accepted else "stay"
    return f"{word}, traffic shifted" if step.shifted else word


def _totals_table(runs: Sequence[Run]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("policy")
    for name in ("mean balance", "worst window", "switches", "refused", "moves", "bytes"):
        table.add_column(name, justify="right")
    for run in runs:
        table.add_row(
            run.name,
            f"{run.balancedness_mean:.4f}",
            f"{run.balancedness_min:.4f}",
            str(run.switches),
            str(run.refusals),
            f"{run.moves:,}",
            bytes_words(run.bytes),
        )
    return table
