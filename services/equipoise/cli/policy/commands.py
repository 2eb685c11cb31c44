"""`equipoise policy …`: its commands and their options. What they do is imported when one runs."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli.live.access import Access
from equipoise.cli.live.ask_settings import ADDRESS_VARIABLE
from equipoise.cli.offline.settings import LoadsSettings, PoolSettings, ToolInputError
from equipoise.formats.format import Format
from equipoise.trust.settings import Tls

policy_app = typer.Typer(
    help="Check, show, compare and try BalancePolicy files.",
    no_args_is_help=True,
    add_completion=False,
)

_File = Annotated[Path, typer.Argument(help="A BalancePolicy file, YAML or JSON.")]
_Pool = Annotated[str, typer.Option(help="For one pool; without it, for all that differ.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@policy_app.command()
def validate(file: _File, as_json: _Json = False) -> None:
    """Say whether a file is good; else each fault with its line, and exit status 2."""
    raise typer.Exit(_module().validate(file, as_json=as_json))


@policy_app.command()
def show(file: _File, pool: _Pool = "", as_json: _Json = False) -> None:
    """Show all values that hold under a file, defaults included."""
    raise typer.Exit(_module().show(file, pool=pool, as_json=as_json))


@policy_app.command()
def diff(
    before: _File,
    after: Annotated[Path, typer.Argument(help="The file to compare it with.")],
    pool: _Pool = "",
    as_json: _Json = False,
) -> None:
    """Show what another file would change. Exit status 3 when it changes anything."""
    raise typer.Exit(_module().diff(before, after, pool=pool, as_json=as_json))


@policy_app.command()
def schema() -> None:
    """Print the JSON Schema of policy files, for editors."""
    raise typer.Exit(_module().schema())


@policy_app.command()
def preview(
    file: _File,
    *,
    pool: Annotated[str, typer.Option(help="The pool, if there are several.")] = "",
    address: Annotated[
        str,
        typer.Option(
            envvar=ADDRESS_VARIABLE, help="host:port of the balancer whose loads are planned for."
        ),
    ] = "127.0.0.1:7070",
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for its answers.")] = 5.0,
    tls_ca: Annotated[str, typer.Option(help="PEM file of the fleet's authority.")] = "",
    tls_cert: Annotated[str, typer.Option(help="PEM file of our certificate.")] = "",
    tls_key: Annotated[str, typer.Option(help="PEM file of its private key.")] = "",
    token_file: Annotated[str, typer.Option(help="File with the token to show.")] = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Speak plain text beyond this machine too.")
    ] = False,
    loads: Annotated[str, typer.Option(help="Files of loads, instead of a balancer's.")] = "",
    current: Annotated[Path | None, typer.Option(help="With --loads: the layout in use.")] = None,
    current_format: Annotated[Format | None, typer.Option(help="Its format.")] = None,
    nodes: Annotated[int, typer.Option(help="With --loads: nodes.")] = 1,
    ranks: Annotated[int | None, typer.Option(help="With --loads: ranks.")] = None,
    slots: Annotated[int | None, typer.Option(help="With --loads: slots per layer.")] = None,
    groups: Annotated[int | None, typer.Option(help="With --loads: expert groups.")] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="With --loads: the model's config.json.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Plan and judge under a file for current loads, and change nothing."""
    if not 0 < timeout_s <= 3600:
        raise ToolInputError(f"--timeout-s must be above 0 and at most 3600, not {timeout_s:g}")
    module = importlib.import_module("equipoise.cli.policy.preview")
    if not loads:
        raise typer.Exit(
            module.preview_running(
                file,
                pool=pool,
                address=address,
                credentials=Access(
                    tls=Tls(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, insecure=insecure),
                    token_file=token_file,
                ).credentials(),
                timeout_s=timeout_s,
                as_json=as_json,
            )
        )
    source = LoadsSettings(
        loads=tuple(filter(None, loads.split(","))), groups=groups, model_config=model_config
    )
    seats = PoolSettings(
        current=current, current_format=current_format, nodes=nodes, ranks=ranks, slots=slots
    )
    raise typer.Exit(
        module.preview_recorded(file, pool=pool, source=source, seats=seats, as_json=as_json)
    )


def _module() -> Any:
    return importlib.import_module("equipoise.cli.policy.files")
