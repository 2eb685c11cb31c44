"""`kubectl equipoise …`: the commands of `equipoise`, towards the balancer of a release.

Owns which command needs a balancer and where kubectl is to look for one. A command that asks, and
is told no address, gets one by `kubectl port-forward` for as long as it runs.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import typer

from equipoise.cli.kubectl.port_forward import ForwardError, forwarded
from equipoise.cli.live.settings import ADDRESS_VARIABLE, BALANCER_NAME_VARIABLE

_OF_KUBECTL = {
    "-n": "--namespace",
    "--namespace": "--namespace",
    "--context": "--context",
    "--kubeconfig": "--kubeconfig",
}
"""Options that are kubectl's, as people type them."""
_RELEASE = "--release"
_HELP_LENGTH = 200
_NO_FILES = 4
"""What kubectl takes from a completion for: propose nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A command line, parted: `arguments` for our command, `of_kubectl` for every kubectl."""

    arguments: tuple[str, ...]
    of_kubectl: tuple[str, ...] = ()
    release: str = ""


def main() -> NoReturn:
    """Run a command; end with its exit status."""
    try:
        from equipoise.cli.main import app
        from equipoise.cli.main import main as run

        call = parted(sys.argv[1:])
        sys.argv = ["kubectl equipoise", *call.arguments]
        if ADDRESS_VARIABLE in os.environ or not asks_a_balancer(app, call.arguments):
            run()
        _end_in_order()
        with forwarded(call.of_kubectl, release=call.release) as (address, name):
            os.environ[ADDRESS_VARIABLE] = address
            if name:
                os.environ.setdefault(BALANCER_NAME_VARIABLE, name)
            run()
    except ForwardError as error:
        print(f"kubectl equipoise: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("kubectl equipoise: interrupted", file=sys.stderr)
        sys.exit(130)


def complete() -> None:
    """Answer kubectl, which asks by `kubectl_complete-equipoise` what may follow."""
    from equipoise.cli.main import app

    with suppress(ForwardError):  # In the middle of an option of kubectl's.
        *before, begun = parted(sys.argv[1:]).arguments or ("",)
        for word, meaning in following(app, before, begun=begun):
            print(f"{word}\t{meaning}")
    print(f":{_NO_FILES}")


def parted(arguments: Sequence[str]) -> Call:
    """What kubectl is to be told, apart from what our command is."""
    ours: list[str] = []
    of_kubectl: list[str] = []
    release = ""
    rest = iter(arguments)
    for argument in rest:
        name, sign, value = argument.partition("=")
        if name not in {*_OF_KUBECTL, _RELEASE}:
            ours.append(argument)
            continue
        if not sign:
            value = next(rest, "")
        if not value:
            raise ForwardError(f"{name} wants a value")
        if name == _RELEASE:
            release = value
        else:
            of_kubectl.append(f"{_OF_KUBECTL[name]}={value}")
    return Call(arguments=tuple(ours), of_kubectl=tuple(of_kubectl), release=release)


def asks_a_balancer(app: typer.Typer, arguments: Sequence[str]) -> bool:
    """Whether the command has an address to ask, and was told none, nor asked for its help."""
    if {"-h", "--help"} & set(arguments):
        return False
    # What is recorded needs no balancer.
    if {"--address", "--loads"} & {argument.partition("=")[0] for argument in arguments}:
        return False
    command = _command(app, arguments)
    return any(parameter.name == "address" for parameter in command.params)


def following(app: typer.Typer, before: Sequence[str], *, begun: str) -> Iterator[tuple[str, str]]:
    """Commands and options that may follow, with what they mean, that begin with `begun`."""
    command = _command(app, before)
    for name, below in getattr(command, "commands", {}).items():
        if name.startswith(begun):
            yield name, below.get_short_help_str(_HELP_LENGTH)
    for parameter in command.params if begun.startswith("-") else ():
        for option in parameter.opts:
            if option.startswith("--") and option.startswith(begun):
                yield option, " ".join(str(getattr(parameter, "help", "")).split())


def _end_in_order() -> None:
    """Leave blocks when this process is asked to end, so that kubectl does not stay behind.

    A terminal that is closed asks that, too.
    """

    def end(number: int, _frame: object) -> NoReturn:
        sys.exit(128 + number)

    for one in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(one) is signal.SIG_DFL:  # `nohup` has it ignored.
            signal.signal(one, end)


def _command(app: typer.Typer, arguments: Sequence[str]) -> Any:
    """The command, or group of commands, that these words lead to."""
    command: Any = typer.main.get_command(app)
    for argument in arguments:
        command = getattr(command, "commands", {}).get(argument, command)
    return command
