"""`equipoise`: every command, and how errors become one line and an exit status.

Each command imports its implementation when it runs, so that `--help` is fast and the control plane
needs no torch. Only settings, which import nothing heavy, are imported here.
"""

import sys
from typing import Annotated, NoReturn

import typer

from equipoise.balancer.settings import BalancerSettings
from equipoise.cli.bench.settings import BenchServeSettings
from equipoise.cli.checkpoint.settings import ConvertCheckpointSettings, ManifestSettings
from equipoise.cli.demo.settings import DemoSettings
from equipoise.cli.generate.settings import GenerateSettings
from equipoise.cli.handover.settings import HandoverSettings
from equipoise.cli.help import OFFLINE, SERVICES, TRY, Sections
from equipoise.cli.live.commands import commands as live_commands
from equipoise.cli.offline.settings import (
    ConvertSettings,
    PlanSettings,
    ReplaySettings,
    WhatIfSettings,
)
from equipoise.cli.options import options_from_settings
from equipoise.cli.overlap.settings import OverlapSettings
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
            extra = _EXTRA_OF_PACKAGE[missing]
            return (
                f"this needs equipoise[{extra}] (there is no {missing}): run pip install "
                f"'.[{extra}]' in a checkout"
            )
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
checkpoint = typer.Typer(cls=Sections, help="Prepare a model's weights.", no_args_is_help=True)
bench = typer.Typer(
    cls=Sections, help="Measure a server's latency and throughput.", no_args_is_help=True
)


def _show_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

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


@app.command(rich_help_panel=SERVICES)
@options_from_settings
def balancer(settings: BalancerSettings) -> int:
    """Run a balancer: collect loads, plan layouts and roll them out."""
    from equipoise.balancer.__main__ import run

    return run(settings)


@app.command(rich_help_panel=SERVICES)
@options_from_settings
def worker(settings: WorkerSettings) -> int:
    """Run an expert-parallel rank, or several: serve requests and switch layouts."""
    if settings.explain:
        from equipoise.cli.explain import run as explain

        return explain(settings)
    if settings.local_ranks > 1:
        from equipoise.cli import local_ranks

        return local_ranks.run(settings)
    from equipoise.worker.__main__ import run

    return run(settings)


@app.command(rich_help_panel=SERVICES)
@options_from_settings
def gateway(settings: GatewaySettings) -> int:
    """Serve an OpenAI-compatible API over the ranks of a pool."""
    from equipoise.gateway.__main__ import run

    return run(settings)


app.add_typer(live_commands)


@app.command(rich_help_panel=OFFLINE)
@options_from_settings
def plan(settings: PlanSettings) -> int:
    """Plan a layout for recorded loads and show its balance and cost."""
    from equipoise.cli.offline.plan import run

    return run(settings)


@app.command(rich_help_panel=OFFLINE)
@options_from_settings
def replay(settings: ReplaySettings) -> int:
    """Replay recorded windows under one or more policies."""
    from equipoise.cli.offline.replay import run

    return run(settings)


@app.command(rich_help_panel=OFFLINE)
@options_from_settings
def whatif(settings: WhatIfSettings) -> int:
    """Compare GPU counts and redundant slots for recorded loads."""
    from equipoise.cli.offline.whatif import run

    return run(settings)


@app.command(rich_help_panel=OFFLINE)
@options_from_settings
def convert(settings: ConvertSettings) -> int:
    """Convert loads or a layout from one engine's format to another's."""
    from equipoise.cli.offline.convert import run

    return run(settings)


@app.command(rich_help_panel=OFFLINE)
@options_from_settings
def overlap(settings: OverlapSettings) -> int:
    """Measure in a profiler trace how much communication hides under computation."""
    from equipoise.cli.overlap.run import run

    return run(settings)


app.add_typer(checkpoint, name="checkpoint", rich_help_panel=OFFLINE)


@checkpoint.command("convert")
@options_from_settings
def checkpoint_convert(settings: ConvertCheckpointSettings) -> int:
    """Convert a model's weights to FP8 or BF16, or reshard them."""
    from equipoise.cli.checkpoint.convert import run

    return run(settings)


@checkpoint.command("manifest")
@options_from_settings
def checkpoint_manifest(settings: ManifestSettings) -> int:
    """Write the digests of a model's weights, or verify the weights against them."""
    from equipoise.cli.checkpoint.manifest import run

    return run(settings)


@app.command(rich_help_panel=TRY)
@options_from_settings
def demo(settings: DemoSettings) -> int:
    """Watch a local fleet drift out of balance and recover.

    Exits with status 1 if a request failed, a token differed or balance was not restored.
    """
    from equipoise.cli.demo.run import run

    return run(settings)


@app.command(rich_help_panel=TRY)
@options_from_settings
def generate(settings: GenerateSettings) -> int:
    """Complete a prompt, in this process or on a server."""
    from equipoise.cli.generate.run import run

    return run(settings)


@app.command(rich_help_panel=TRY)
@options_from_settings
def handover(settings: HandoverSettings) -> int:
    """Send a prompt through a gateway of two pools and check that its latents are handed over.

    Exits with status 3 if the decode pool prefilled the prompt.
    """
    from equipoise.cli.handover.run import run

    return run(settings)


app.add_typer(bench, name="bench", rich_help_panel=TRY)


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
