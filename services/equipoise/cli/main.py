"""`equipoise`: the commands, and how their faults end: one line, an exit status, no traceback.

Each command's module is imported when it runs, so that the control plane needs no torch and
`--help` is quick. Settings alone are imported here; they import nothing heavy.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer

from equipoise.balancer.settings import BalancerSettings
from equipoise.cli.bench.settings import BenchServeSettings
from equipoise.cli.checkpoint.settings import ConvertCheckpointSettings
from equipoise.cli.demo.settings import DemoSettings
from equipoise.cli.generate.settings import GenerateSettings
from equipoise.cli.live.commands import add_look_commands
from equipoise.cli.live.operation_settings import (
    OrderSettings,
    PinSettings,
    PreviewSettings,
    RebalanceSettings,
    RollbackSettings,
)
from equipoise.cli.live.status_settings import StatusSettings
from equipoise.cli.offline.convert_settings import ConvertSettings
from equipoise.cli.offline.plan_settings import PlanSettings
from equipoise.cli.offline.replay_settings import ReplaySettings
from equipoise.cli.offline.settings import ToolInputError
from equipoise.cli.offline.whatif_settings import WhatIfSettings
from equipoise.cli.options import command_from
from equipoise.cli.policy.commands import policy_app
from equipoise.formats.errors import FormatError
from equipoise.gateway.settings import GatewaySettings
from equipoise.policy.errors import PolicyError
from equipoise.worker.settings import WorkerSettings

EXIT_FAULT = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_OWN_PACKAGES = {"equipoise", "equipoise_model", "equipoise_kernels"}
_EXTRA_OF_PACKAGE = {"torch": "worker", "safetensors": "worker", "matplotlib": "plots"}


def main() -> NoReturn:
    """Run the command line; what our own exceptions say is all that a user's fault prints."""
    try:
        app()
    except KeyboardInterrupt:
        print("equipoise: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        words = _words_for_users(error)
        if words is None:
            raise
        print(f"equipoise: {words}", file=sys.stderr)
        bad_input = isinstance(error, FormatError | PolicyError | ToolInputError)
        sys.exit(EXIT_BAD_INPUT if bad_input else EXIT_FAULT)
    sys.exit()


app = typer.Typer(
    help="Keeps a Mixture-of-Experts fleet balanced.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"equipoise {version('equipoise')}")
        raise typer.Exit


@app.callback()
def _equipoise(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    pass


def _balancer(settings: BalancerSettings) -> int:
    """Run the control plane: gather loads, plan layouts, push them to workers."""
    return _run_of("equipoise.balancer.__main__")(settings)


def _worker(settings: WorkerSettings) -> int:
    """Run one expert-parallel rank: serve requests, report loads, switch layouts."""
    return _run_of("equipoise.worker.__main__")(settings)


def _gateway(settings: GatewaySettings) -> int:
    """Answer clients over HTTP in OpenAI's form, by the ranks of a pool, whatever befalls them."""
    return _run_of("equipoise.gateway.__main__")(settings)


def _status(settings: StatusSettings) -> int:
    """Show a pool: balance, ranks, rollout, decisions. Exit status 3 when not all ranks serve."""
    return _run_of("equipoise.cli.live.status")(settings)


def _rebalance(settings: RebalanceSettings) -> int:
    """Plan now and roll out what is worth it. Exit status 3 if it is not."""
    return _order("rebalance")(settings)


def _pause(settings: OrderSettings) -> int:
    """Adopt no plan until `resume`; what is being rolled out comes to its end."""
    return _order("pause")(settings)


def _resume(settings: OrderSettings) -> int:
    """Plan again after `pause` or `rollback`."""
    return _order("resume")(settings)


def _rollback(settings: RollbackSettings) -> int:
    """Place experts as an earlier generation did, as a new one, and pause planning."""
    return _order("rollback")(settings)


def _pin(settings: PinSettings) -> int:
    """Keep a placement, whatever traffic says, until `unpin`."""
    return _order("pin")(settings)


def _unpin(settings: OrderSettings) -> int:
    """Plan again after `pin`."""
    return _order("unpin")(settings)


def _preview(settings: PreviewSettings) -> int:
    """Say what a plan would do now, and do nothing."""
    return _order("preview")(settings)


def _demo(settings: DemoSettings) -> int:
    """Watch a fleet on this machine drift out of balance and come back."""
    return _run_of("equipoise.cli.demo.run")(settings)


def _plan(settings: PlanSettings) -> int:
    """Plan a layout for recorded loads: its balance, its price, and a file for any engine."""
    return _run_of("equipoise.cli.offline.plan")(settings)


def _replay(settings: ReplaySettings) -> int:
    """Replay recorded windows under several policies: what the balancer would have done."""
    return _run_of("equipoise.cli.offline.replay")(settings)


def _whatif(settings: WhatIfSettings) -> int:
    """Compare numbers of GPUs and of redundant slots for recorded loads, and choose one."""
    return _run_of("equipoise.cli.offline.whatif")(settings)


def _generate(settings: GenerateSettings) -> int:
    """Let a model go on with a text: in this process, or at a URL."""
    return _run_of("equipoise.cli.generate.run")(settings)


def _bench_serve(settings: BenchServeSettings) -> int:
    """Measure how fast a server of OpenAI's form answers. Exit status 1 when a request failed."""
    return _run_of("equipoise.cli.bench.serve")(settings)


def _convert(settings: ConvertSettings) -> int:
    """Write one engine's file of loads or of a layout as another's."""
    return _run_of("equipoise.cli.offline.convert")(settings)


def _convert_checkpoint(settings: ConvertCheckpointSettings) -> int:
    """Write a model's weights in FP8 or in BF16, or into other files."""
    return _run_of("equipoise.cli.checkpoint.convert")(settings)


def _run_of(module: str) -> Callable[[Any], int]:
    """The `run` of a command's module, imported now."""
    run: Callable[[Any], int] = importlib.import_module(module).run
    return run


def _order(name: str) -> Callable[[Any], int]:
    """A command of the orders' module, imported now."""
    orders = importlib.import_module("equipoise.cli.live.operations")
    order: Callable[[Any], int] = getattr(orders, name)
    return order


def _words_for_users(error: Exception) -> str | None:
    """What to tell about a fault that is not ours; None for one that is."""
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").partition(".")[0]
        if missing in _EXTRA_OF_PACKAGE:
            return f"this needs {missing}: pip install 'equipoise[{_EXTRA_OF_PACKAGE[missing]}]'"
    if type(error).__module__.partition(".")[0] in _OWN_PACKAGES:
        return str(error)
    return None


app.command("balancer")(command_from(BalancerSettings, _balancer))
app.command("worker")(command_from(WorkerSettings, _worker))
app.command("gateway")(command_from(GatewaySettings, _gateway))
app.command("status")(command_from(StatusSettings, _status))
app.command("rebalance")(command_from(RebalanceSettings, _rebalance))
app.command("pause")(command_from(OrderSettings, _pause))
app.command("resume")(command_from(OrderSettings, _resume))
app.command("rollback")(command_from(RollbackSettings, _rollback))
app.command("pin")(command_from(PinSettings, _pin))
app.command("unpin")(command_from(OrderSettings, _unpin))
app.command("preview")(command_from(PreviewSettings, _preview))
add_look_commands(app)
app.command("demo")(command_from(DemoSettings, _demo))
app.command("plan")(command_from(PlanSettings, _plan))
app.command("replay")(command_from(ReplaySettings, _replay))
app.command("whatif")(command_from(WhatIfSettings, _whatif))
app.command("generate")(command_from(GenerateSettings, _generate))
bench = typer.Typer(help="Measure what serves.", no_args_is_help=True)
bench.command("serve")(command_from(BenchServeSettings, _bench_serve))
app.add_typer(bench, name="bench")
app.command("convert")(command_from(ConvertSettings, _convert))
checkpoint = typer.Typer(help="Prepare a model's weights.", no_args_is_help=True)
checkpoint.command("convert")(command_from(ConvertCheckpointSettings, _convert_checkpoint))
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(policy_app, name="policy")


if __name__ == "__main__":
    main()
