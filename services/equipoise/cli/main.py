"""`equipoise`: every command, and how errors become one line and an exit status.

Each command imports its implementation when it runs, so that `--help` is fast and the control plane
needs no torch. Only settings, which import nothing heavy, are imported here.
"""

import sys
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from equipoise.balancer.settings import BalancerSettings
from equipoise.cli.bench.settings import BenchServeSettings
from equipoise.cli.checkpoint.settings import ConvertCheckpointSettings
from equipoise.cli.demo.settings import DemoSettings
from equipoise.cli.generate.settings import GenerateSettings
from equipoise.cli.live.settings import (
    BalancerClientSettings,
    DecisionsSettings,
    LayoutDiffSettings,
    LayoutExportSettings,
    LayoutImportSettings,
    LayoutShowSettings,
    LoadsSettings,
    OperationSettings,
    PinSettings,
    PreviewSettings,
    RebalanceSettings,
    RollbackSettings,
    StatusSettings,
)
from equipoise.cli.offline.settings import (
    ConvertSettings,
    PlanSettings,
    ReplaySettings,
    ToolInputError,
    WhatIfSettings,
)
from equipoise.cli.options import options_from_settings
from equipoise.cli.policy.settings import (
    PolicyDiffSettings,
    PolicyPreviewSettings,
    PolicyShowSettings,
    PolicyValidateSettings,
)
from equipoise.formats.errors import FormatError
from equipoise.gateway.settings import GatewaySettings
from equipoise.planning.errors import InvalidPolicyError
from equipoise.policy.errors import PolicyError
from equipoise.settings.errors import InvalidSettingsError
from equipoise.trust.errors import TrustError
from equipoise.worker.settings import WorkerSettings

EXIT_ERROR = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_BAD_INPUT = (
    FormatError,
    InvalidPolicyError,
    InvalidSettingsError,
    PolicyError,
    ToolInputError,
    TrustError,
)
_OWN_PACKAGES = {"equipoise", "equipoise_model", "equipoise_kernels"}
_EXTRA_OF_PACKAGE = {"torch": "worker", "safetensors": "worker", "matplotlib": "plots"}

_SERVICES = "Services"
_INSPECT = "Inspect a running fleet"
_OPERATE = "Operate a running fleet"
_OFFLINE = "Work with files"
_TRY = "Try and measure"


def main() -> NoReturn:
    """Run the command line; an expected error prints its message only, without a traceback."""
    try:
        app()
    except KeyboardInterrupt:
        print("equipoise: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        message = _user_message(error)
        if message is None:
            raise
        print(f"equipoise: {message}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT if isinstance(error, _BAD_INPUT) else EXIT_ERROR)
    sys.exit()


def _user_message(error: Exception) -> str | None:
    """The message for an error that the user can fix; None for a bug, which keeps its traceback."""
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").partition(".")[0]
        if missing in _EXTRA_OF_PACKAGE:
            return f"this needs {missing}: pip install 'equipoise[{_EXTRA_OF_PACKAGE[missing]}]'"
    if type(error).__module__.partition(".")[0] in _OWN_PACKAGES:
        return str(error)
    return None


class _Sections(TyperGroup):
    """Lists commands by section, with whole sentences."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            section = getattr(command, "rich_help_panel", None) or "Commands"
            row = (name, command.get_short_help_str(limit=200))
            sections.setdefault(section, []).append(row)
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows)


app = typer.Typer(
    help="Keep a Mixture-of-Experts fleet balanced.",
    cls=_Sections,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Rich tables cut the names of options and variables at 80 columns.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
layout = typer.Typer(
    cls=_Sections, help="Show, compare, export and import layouts.", no_args_is_help=True
)
policy = typer.Typer(
    cls=_Sections, help="Check, show, compare and preview policy files.", no_args_is_help=True
)
checkpoint = typer.Typer(cls=_Sections, help="Prepare a model's weights.", no_args_is_help=True)
bench = typer.Typer(
    cls=_Sections, help="Measure a server's latency and throughput.", no_args_is_help=True
)


def _show_version(requested: bool) -> None:
    if requested:
        print(f"equipoise {version('equipoise')}")
        raise typer.Exit


@app.callback()
def _equipoise(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command(rich_help_panel=_SERVICES)
@options_from_settings
def balancer(settings: BalancerSettings) -> int:
    """Run a balancer: collect loads, plan layouts and roll them out."""
    from equipoise.balancer.__main__ import run

    return run(settings)


@app.command(rich_help_panel=_SERVICES)
@options_from_settings
def worker(settings: WorkerSettings) -> int:
    """Run one expert-parallel rank: serve requests and switch layouts."""
    from equipoise.worker.__main__ import run

    return run(settings)


@app.command(rich_help_panel=_SERVICES)
@options_from_settings
def gateway(settings: GatewaySettings) -> int:
    """Serve an OpenAI-compatible API over the ranks of a pool."""
    from equipoise.gateway.__main__ import run

    return run(settings)


@app.command(rich_help_panel=_INSPECT)
@options_from_settings
def status(settings: StatusSettings) -> int:
    """Show the balance, ranks, rollout and latest decisions of a pool.

    Exits with status 3 unless every rank serves.
    """
    from equipoise.cli.live.status import run

    return run(settings)


@app.command(rich_help_panel=_INSPECT)
@options_from_settings
def decisions(settings: DecisionsSettings) -> int:
    """List past decisions with their reasons, newest first."""
    from equipoise.cli.live.decisions import run

    return run(settings)


@app.command(rich_help_panel=_INSPECT)
@options_from_settings
def epochs(settings: BalancerClientSettings) -> int:
    """List recent membership changes with their reasons."""
    from equipoise.cli.live.decisions import epochs

    return epochs(settings)


@app.command(rich_help_panel=_INSPECT)
@options_from_settings
def loads(settings: LoadsSettings) -> int:
    """Show the latest window's load by layer and rank as a heat map."""
    from equipoise.cli.live.loads import run

    return run(settings)


app.add_typer(layout, name="layout", rich_help_panel=_INSPECT)


@layout.command("show")
@options_from_settings
def layout_show(settings: LayoutShowSettings) -> int:
    """Show a layout."""
    from equipoise.cli.live.layouts import show

    return show(settings)


@layout.command("diff")
@options_from_settings
def layout_diff(settings: LayoutDiffSettings) -> int:
    """Show the moves from one layout to another.

    Exits with status 3 if they place experts differently.
    """
    from equipoise.cli.live.layouts import diff

    return diff(settings)


@layout.command("export")
@options_from_settings
def layout_export(settings: LayoutExportSettings) -> int:
    """Write a layout to a file in an engine's format."""
    from equipoise.cli.live.layouts import export

    return export(settings)


@layout.command("import")
@options_from_settings
def layout_import(settings: LayoutImportSettings) -> int:
    """Pin the pool to the layout in a file.

    Exits with status 3 if the balancer refuses.
    """
    from equipoise.cli.live.layouts import import_

    return import_(settings)


@app.command(rich_help_panel=_OPERATE)
@options_from_settings
def rebalance(settings: RebalanceSettings) -> int:
    """Plan now, and roll the plan out if it is worth its moves.

    Exits with status 3 if the balancer refuses.
    """
    from equipoise.cli.live.operations import rebalance

    return rebalance(settings)


@app.command(rich_help_panel=_OPERATE)
@options_from_settings
def pause(settings: OperationSettings) -> int:
    """Stop adopting plans until `resume`.

    A rollout in progress still completes. Exits with status 3 if the balancer refuses.
    """
    from equipoise.cli.live.operations import pause

    return pause(settings)


@app.command(rich_help_panel=_OPERATE)
@options_from_settings
def resume(settings: OperationSettings) -> int:
    """Adopt plans again after `pause` or `rollback`.

    Exits with status 3 if the balancer refuses.
    """
    from equipoise.cli.live.operations import resume

    return resume(settings)


@app.command(rich_help_panel=_OPERATE)
@options_from_settings
def rollback(settings: RollbackSettings) -> int:
    """Restore an earlier placement as a new generation, and pause.

    Exits with status 3 if the balancer refuses.
    """
    from equipoise.cli.live.operations import rollback

    return rollback(settings)


@app.command(rich_help_panel=_OPERATE)
@options_from_settings
def pin(settings: PinSettings) -> int:
    """Keep one placement, whatever the traffic, until `unpin`.

    Exits with status 3 if the balancer refuses.
    """
    from equipoise.cli.live.operations import pin

    return pin(settings)


@app.command(rich_help_panel=_OPERATE)
@options_from_settings
def unpin(settings: OperationSettings) -> int:
    """Adopt plans again after `pin`.

    Exits with status 3 if the balancer refuses.
    """
    from equipoise.cli.live.operations import unpin

    return unpin(settings)


@app.command(rich_help_panel=_OPERATE)
@options_from_settings
def preview(settings: PreviewSettings) -> int:
    """Plan now and show the result without rolling it out.

    Exits with status 3 if the balancer would not roll it out.
    """
    from equipoise.cli.live.operations import preview

    return preview(settings)


app.add_typer(policy, name="policy", rich_help_panel=_OPERATE)


@policy.command("validate")
@options_from_settings
def policy_validate(settings: PolicyValidateSettings) -> int:
    """Check a policy file.

    Prints every fault with its line, and exits with status 2 if there is one.
    """
    from equipoise.cli.policy.files import validate

    return validate(settings)


@policy.command("show")
@options_from_settings
def policy_show(settings: PolicyShowSettings) -> int:
    """Show every value in effect under a file, defaults included."""
    from equipoise.cli.policy.files import show

    return show(settings)


@policy.command("diff")
@options_from_settings
def policy_diff(settings: PolicyDiffSettings) -> int:
    """Show what changes from one policy file to another.

    Exits with status 3 if anything changes.
    """
    from equipoise.cli.policy.files import diff

    return diff(settings)


@policy.command("schema")
def policy_schema() -> None:
    """Print the JSON Schema of policy files, for editors."""
    from equipoise.cli.policy.files import schema

    schema()


@policy.command("preview")
@options_from_settings
def policy_preview(settings: PolicyPreviewSettings) -> int:
    """Plan under a policy file without changing anything.

    Plans for the loads of a running pool, or for recorded ones with --loads.
    """
    from equipoise.cli.policy.preview import run

    return run(settings)


@app.command(rich_help_panel=_OFFLINE)
@options_from_settings
def plan(settings: PlanSettings) -> int:
    """Plan a layout for recorded loads and show its balance and cost."""
    from equipoise.cli.offline.plan import run

    return run(settings)


@app.command(rich_help_panel=_OFFLINE)
@options_from_settings
def replay(settings: ReplaySettings) -> int:
    """Replay recorded windows under one or more policies."""
    from equipoise.cli.offline.replay import run

    return run(settings)


@app.command(rich_help_panel=_OFFLINE)
@options_from_settings
def whatif(settings: WhatIfSettings) -> int:
    """Compare GPU counts and redundant slots for recorded loads."""
    from equipoise.cli.offline.whatif import run

    return run(settings)


@app.command(rich_help_panel=_OFFLINE)
@options_from_settings
def convert(settings: ConvertSettings) -> int:
    """Convert loads or a layout from one engine's format to another's."""
    from equipoise.cli.offline.convert import run

    return run(settings)


app.add_typer(checkpoint, name="checkpoint", rich_help_panel=_OFFLINE)


@checkpoint.command("convert")
@options_from_settings
def checkpoint_convert(settings: ConvertCheckpointSettings) -> int:
    """Convert a model's weights to FP8 or BF16, or reshard them."""
    from equipoise.cli.checkpoint.convert import run

    return run(settings)


@app.command(rich_help_panel=_TRY)
@options_from_settings
def demo(settings: DemoSettings) -> int:
    """Watch a local fleet drift out of balance and recover.

    Exits with status 1 if a request failed, a token differed or balance was not restored.
    """
    from equipoise.cli.demo.run import run

    return run(settings)


@app.command(rich_help_panel=_TRY)
@options_from_settings
def generate(settings: GenerateSettings) -> int:
    """Complete a prompt, in this process or on a server."""
    from equipoise.cli.generate.run import run

    return run(settings)


app.add_typer(bench, name="bench", rich_help_panel=_TRY)


@bench.command("serve")
@options_from_settings
def bench_serve(settings: BenchServeSettings) -> int:
    """Measure any OpenAI-compatible server.

    Exits with status 1 if a request failed.
    """
    from equipoise.cli.bench.serve import run

    return run(settings)


if __name__ == "__main__":
    main()
