"""`kubectl equipoise ...`: the commands of `equipoise`, connected to a release's balancer.

A command that needs a balancer and has no address gets one through `kubectl port-forward` while it
runs.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import typer
from click import HelpFormatter

from equipoise.cli.kubectl.port_forward import ForwardError, forwarded
from equipoise.cli.live.settings import ADDRESS_VARIABLE, BALANCER_NAME_VARIABLE

_RELEASE = "--release"
_OPTIONS = {
    "--namespace": "Namespace of the release. Default: the context's.",
    "--context": "Context of the kubeconfig file.",
    "--kubeconfig": "Kubeconfig file.",
    "--as": "User to impersonate.",
    "--as-group": "Group to impersonate. Repeatable.",
    _RELEASE: "Release to connect to, if the namespace has several.",
}
"""Options of every command, and their help. All but the release are kubectl's own."""
_SHORT = {"-n": "--namespace"}
_HELP_FLAGS = {"-h", "--help"}
_HELP_LENGTH = 200
_HELP_WIDTH = 120
_NO_FILES = 4
"""Completion directive of kubectl: do not complete file names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A command line, split into its parts."""

    arguments: tuple[str, ...]
    """Arguments of `equipoise`."""

    of_kubectl: tuple[str, ...] = ()
    """Options for every call of kubectl."""

    release: str = ""
    """Release to connect to; empty for the only one."""


def main() -> NoReturn:
    """Run a command and exit with its status."""
    try:
        from equipoise.cli.main import app
        from equipoise.cli.main import main as run

        line = parted(sys.argv[1:])
        sys.argv = ["kubectl equipoise", *line.arguments]
        if not line.arguments or _HELP_FLAGS & set(line.arguments):
            _run_help(run)
        if ADDRESS_VARIABLE in os.environ or not asks_a_balancer(app, line.arguments):
            run()
        _exit_on_signals()
        with forwarded(line.of_kubectl, release=line.release) as (address, name):
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
    """Print completions, for kubectl's `kubectl_complete-equipoise`."""
    from equipoise.cli.main import app

    with suppress(ForwardError):  # The value of a kubectl option is being typed.
        *before, begun = parted(sys.argv[1:]).arguments or ("",)
        for word, meaning in following(app, before, begun=begun):
            print(f"{word}\t{meaning}")
    print(f":{_NO_FILES}")


def parted(arguments: Sequence[str]) -> CommandLine:
    """Separate kubectl's options from the command's.

    Raises:
        ForwardError: an option has no value.
    """
    ours: list[str] = []
    of_kubectl: list[str] = []
    release = ""
    rest = iter(arguments)
    for argument in rest:
        name, sign, value = argument.partition("=")
        option = _SHORT.get(name, name)
        if option not in _OPTIONS:
            ours.append(argument)
            continue
        if not sign:
            value = next(rest, "")
        if not value:
            raise ForwardError(f"{name} needs a value")
        if option == _RELEASE:
            release = value
        else:
            of_kubectl.append(f"{option}={value}")
    return CommandLine(arguments=tuple(ours), of_kubectl=tuple(of_kubectl), release=release)


def asks_a_balancer(app: typer.Typer, arguments: Sequence[str]) -> bool:
    """Whether the command takes an address and got none; False for --help."""
    if _HELP_FLAGS & set(arguments):
        return False
    # Recorded loads need no balancer.
    if {"--address", "--loads"} & {argument.partition("=")[0] for argument in arguments}:
        return False
    command = _command(app, arguments)
    return any(parameter.name == "address" for parameter in command.params)


def following(app: typer.Typer, before: Sequence[str], *, begun: str) -> Iterator[tuple[str, str]]:
    """Yield the commands and options that start with `begun`, with their help."""
    command = _command(app, before)
    for name, below in getattr(command, "commands", {}).items():
        if name.startswith(begun):
            yield name, below.get_short_help_str(_HELP_LENGTH)
    for parameter in command.params if begun.startswith("-") else ():
        for option in parameter.opts:
            if option.startswith("--") and option.startswith(begun):
                yield option, " ".join(str(getattr(parameter, "help", "")).split())
    for option, text in _OPTIONS.items():
        if begun.startswith("-") and option.startswith(begun):
            yield option, text


def _run_help(run: Callable[[], NoReturn]) -> NoReturn:
    """Show the help of `equipoise`, then the options that kubectl adds to it."""
    try:
        run()
    finally:
        formatter = HelpFormatter(max_width=_HELP_WIDTH)
        rows = [(_named(option), text) for option, text in _OPTIONS.items()]
        with formatter.section("\nConnection to the cluster, for every command"):
            formatter.write_dl(rows)
        print(formatter.getvalue(), end="")


def _named(option: str) -> str:
    short = next((f"{name}, " for name, long in _SHORT.items() if long == option), "")
    return f"{short}{option} TEXT"


def _exit_on_signals() -> None:
    """Exit on SIGTERM and SIGHUP by an exception, so that `kubectl port-forward` is stopped."""

    def end(number: int, _frame: object) -> NoReturn:
        sys.exit(128 + number)

    for one in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(one) is signal.SIG_DFL:  # `nohup` ignores SIGHUP.
            signal.signal(one, end)


def _command(app: typer.Typer, arguments: Sequence[str]) -> Any:
    """The command or group that the arguments name."""
    command: Any = typer.main.get_command(app)
    for argument in arguments:
        command = getattr(command, "commands", {}).get(argument, command)
    return command
