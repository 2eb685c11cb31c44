"""Commands to look at a fleet: `decisions`, `epochs`, `loads`, `layout …`, and their settings.

What they do is imported when one runs.
"""

import importlib
from collections.abc import Callable
from typing import Any

import typer

from equipoise.cli.live.ask_settings import AskSettings
from equipoise.cli.live.operation_settings import PinSettings, RollbackSettings
from equipoise.cli.live.settings import (
    DecisionsSettings,
    LayoutDiffSettings,
    LayoutExportSettings,
    LayoutImportSettings,
    LayoutShowSettings,
    LoadsSettings,
)
from equipoise.cli.options import command_from


def add_look_commands(app: typer.Typer) -> None:
    """Add them to the program."""
    app.command("decisions")(command_from(DecisionsSettings, _decisions))
    app.command("epochs")(command_from(AskSettings, _epochs))
    app.command("loads")(command_from(LoadsSettings, _loads))
    layout = typer.Typer(
        help="Show, compare and exchange a pool's layouts.",
        no_args_is_help=True,
        add_completion=False,
    )
    layout.command("show")(command_from(LayoutShowSettings, _layout_show))
    layout.command("diff")(command_from(LayoutDiffSettings, _layout_diff))
    layout.command("export")(command_from(LayoutExportSettings, _layout_export))
    layout.command("import")(command_from(LayoutImportSettings, _layout_import))
    layout.command("pin")(command_from(PinSettings, _layout_pin))
    layout.command("rollback")(command_from(RollbackSettings, _layout_rollback))
    app.add_typer(layout, name="layout")


def _decisions(settings: DecisionsSettings) -> int:
    """Show past decisions with their reasons, newest first."""
    return _run("decisions", "run")(settings)


def _epochs(settings: AskSettings) -> int:
    """Show the latest changes of who takes part, and why."""
    return _run("decisions", "epochs")(settings)


def _loads(settings: LoadsSettings) -> int:
    """Show how load fell on layers and ranks in the latest window, as a heat map."""
    return _run("loads", "run")(settings)


def _layout_show(settings: LayoutShowSettings) -> int:
    """Show a layout."""
    return _run("layouts", "show")(settings)


def _layout_diff(settings: LayoutDiffSettings) -> int:
    """Say what moves from one layout to another. Exit status 3 when they differ."""
    return _run("layouts", "diff")(settings)


def _layout_export(settings: LayoutExportSettings) -> int:
    """Write a layout to a file, in any engine's format."""
    return _run("layouts", "export")(settings)


def _layout_import(settings: LayoutImportSettings) -> int:
    """Pin the pool to the layout in a file. Exit status 3 when the balancer refuses."""
    return _run("layouts", "import_")(settings)


def _layout_pin(settings: PinSettings) -> int:
    """Keep a placement, whatever traffic says, until `unpin`; as `equipoise pin`."""
    return _run("operations", "pin")(settings)


def _layout_rollback(settings: RollbackSettings) -> int:
    """Place experts as an earlier generation did; as `equipoise rollback`."""
    return _run("operations", "rollback")(settings)


def _run(module: str, name: str) -> Callable[[Any], int]:
    found = importlib.import_module(f"equipoise.cli.live.{module}")
    run: Callable[[Any], int] = getattr(found, name)
    return run
