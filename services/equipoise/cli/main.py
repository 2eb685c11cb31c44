"""`equipoise`: every command, and how errors become one line and an exit status.

A command's implementation is imported when it runs, so that `--help` is fast and the control plane
needs no torch. Only settings, which import nothing heavy, are imported here.
"""

import sys
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from equipoise.balancer.settings import BalancerSettings
from equipoise.cli.bench.settings import BenchServeSettings
from equipoise.cli.checkpoint.settings import ConvertCheckpointSettings
from equipoise.cli.demo.settings import DemoSettings
from equipoise.cli.generate.settings import GenerateSettings
from equipoise.cli.help import INSPECT, OFFLINE, OPERATE, SERVICES, TRY, Sections
from equipoise.cli.live import settings as live
from equipoise.cli.offline import settings as offline
from equipoise.cli.options import add_command
from equipoise.cli.policy import settings as policy
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
    TrustError,
)
_REFUSED = "Exits with status 3 if the balancer refuses."
_OWN_PACKAGES = {"equipoise", "equipoise_model", "equipoise_kernels"}
_EXTRA_OF_PACKAGE = {"torch": "worker", "safetensors": "worker", "matplotlib": "plots"}


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


app = typer.Typer(
    help="Keep a Mixture-of-Experts fleet balanced.",
    cls=Sections,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Rich tables cut the names of options and variables at 80 columns.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _group(name: str, section: str, text: str) -> typer.Typer:
    group = typer.Typer(cls=Sections, help=text, no_args_is_help=True)
    app.add_typer(group, name=name, rich_help_panel=section)
    return group


layout = _group("layout", INSPECT, "Show, compare, export and import layouts.")
policies = _group("policy", OPERATE, "Check, show, compare and preview policy files.")
checkpoint = _group("checkpoint", OFFLINE, "Prepare a model's weights.")
bench = _group("bench", TRY, "Measure a server's latency and throughput.")


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


add_command(app, "balancer", BalancerSettings, "balancer.__main__:run", SERVICES)
add_command(app, "worker", WorkerSettings, "worker.__main__:run", SERVICES)
add_command(app, "gateway", GatewaySettings, "gateway.__main__:run", SERVICES)

add_command(app, "status", live.StatusSettings, "cli.live.status:run", INSPECT)
add_command(app, "decisions", live.DecisionsSettings, "cli.live.decisions:run", INSPECT)
add_command(
    app,
    "epochs",
    live.BalancerClientSettings,
    "cli.live.decisions:epochs",
    INSPECT,
    text="List recent membership changes with their reasons.",
)
add_command(app, "loads", live.LoadsSettings, "cli.live.loads:run", INSPECT)
add_command(layout, "show", live.LayoutShowSettings, "cli.live.layouts:show")
add_command(layout, "diff", live.LayoutDiffSettings, "cli.live.layouts:diff")
add_command(layout, "export", live.LayoutExportSettings, "cli.live.layouts:export")
add_command(layout, "import", live.LayoutImportSettings, "cli.live.layouts:import_")

for _name, _settings, _text in (
    ("rebalance", live.RebalanceSettings, ""),
    (
        "pause",
        live.OperationSettings,
        f"Stop adopting plans until `resume`.\n\nA rollout in progress still completes. {_REFUSED}",
    ),
    (
        "resume",
        live.OperationSettings,
        f"Adopt plans again after `pause` or `rollback`.\n\n{_REFUSED}",
    ),
    ("rollback", live.RollbackSettings, ""),
    ("pin", live.PinSettings, ""),
    ("unpin", live.OperationSettings, f"Adopt plans again after `pin`.\n\n{_REFUSED}"),
    ("preview", live.PreviewSettings, ""),
):
    add_command(app, _name, _settings, f"cli.live.operations:{_name}", OPERATE, text=_text)
add_command(policies, "validate", policy.PolicyValidateSettings, "cli.policy.files:validate")
add_command(policies, "show", policy.PolicyShowSettings, "cli.policy.files:show")
add_command(policies, "diff", policy.PolicyDiffSettings, "cli.policy.files:diff")


@policies.command("schema")
def _policy_schema() -> None:
    """Print the JSON Schema of policy files, for editors."""
    from equipoise.cli.policy.files import schema

    schema()


add_command(policies, "preview", policy.PolicyPreviewSettings, "cli.policy.preview:run")

add_command(app, "plan", offline.PlanSettings, "cli.offline.plan:run", OFFLINE)
add_command(app, "replay", offline.ReplaySettings, "cli.offline.replay:run", OFFLINE)
add_command(app, "whatif", offline.WhatIfSettings, "cli.offline.whatif:run", OFFLINE)
add_command(app, "convert", offline.ConvertSettings, "cli.offline.convert:run", OFFLINE)
add_command(checkpoint, "convert", ConvertCheckpointSettings, "cli.checkpoint.convert:run")

add_command(app, "demo", DemoSettings, "cli.demo.run:run", TRY)
add_command(app, "generate", GenerateSettings, "cli.generate.run:run", TRY)
add_command(bench, "serve", BenchServeSettings, "cli.bench.serve:run")


if __name__ == "__main__":
    main()
