"""The commands that talk to a running balancer."""

import typer

from equipoise.cli.help import INSPECT, OPERATE, Sections
from equipoise.cli.live.settings import (
    AuditSettings,
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
from equipoise.cli.options import options_from_settings
from equipoise.cli.policy.settings import (
    PolicyDiffSettings,
    PolicyPreviewSettings,
    PolicyShowSettings,
    PolicyValidateSettings,
)

commands = typer.Typer()
layout = typer.Typer(
    cls=Sections, help="Show, compare, export and import layouts.", no_args_is_help=True
)
policy = typer.Typer(
    cls=Sections, help="Check, show, compare and preview policy files.", no_args_is_help=True
)


@commands.command(rich_help_panel=INSPECT)
@options_from_settings
def status(settings: StatusSettings) -> int:
    """Show the balance, ranks, rollout and latest decisions of a pool.

    Exits with status 3 unless every rank serves.
    """
    from equipoise.cli.live.status import run

    return run(settings)


@commands.command(rich_help_panel=INSPECT)
@options_from_settings
def decisions(settings: DecisionsSettings) -> int:
    """List past decisions with their reasons, newest first."""
    from equipoise.cli.live.decisions import run

    return run(settings)


@commands.command(rich_help_panel=INSPECT)
@options_from_settings
def audit(settings: AuditSettings) -> int:
    """List operators' past requests with caller and outcome, newest first."""
    from equipoise.cli.live.decisions import audit

    return audit(settings)


@commands.command(rich_help_panel=INSPECT)
@options_from_settings
def epochs(settings: BalancerClientSettings) -> int:
    """List recent membership changes with their reasons."""
    from equipoise.cli.live.decisions import epochs

    return epochs(settings)


@commands.command(rich_help_panel=INSPECT)
@options_from_settings
def loads(settings: LoadsSettings) -> int:
    """Show the latest window's load by layer and rank as a heat map."""
    from equipoise.cli.live.loads import run

    return run(settings)


commands.add_typer(layout, name="layout", rich_help_panel=INSPECT)


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

    Exits with status 3 if the balancer rejects it.
    """
    from equipoise.cli.live.layouts import import_

    return import_(settings)


@commands.command(rich_help_panel=OPERATE)
@options_from_settings
def rebalance(settings: RebalanceSettings) -> int:
    """Plan now, and roll the plan out if it is worth its moves.

    Exits with status 3 if the balancer rejects it.
    """
    from equipoise.cli.live.operations import rebalance

    return rebalance(settings)


@commands.command(rich_help_panel=OPERATE)
@options_from_settings
def pause(settings: OperationSettings) -> int:
    """Stop adopting plans until `resume`.

    A rollout in progress still completes. Exits with status 3 if the balancer rejects it.
    """
    from equipoise.cli.live.operations import pause

    return pause(settings)


@commands.command(rich_help_panel=OPERATE)
@options_from_settings
def resume(settings: OperationSettings) -> int:
    """Adopt plans again after `pause` or `rollback`.

    Exits with status 3 if the balancer rejects it.
    """
    from equipoise.cli.live.operations import resume

    return resume(settings)


@commands.command(rich_help_panel=OPERATE)
@options_from_settings
def rollback(settings: RollbackSettings) -> int:
    """Restore an earlier placement as a new generation, and pause.

    Exits with status 3 if the balancer rejects it.
    """
    from equipoise.cli.live.operations import rollback

    return rollback(settings)


@commands.command(rich_help_panel=OPERATE)
@options_from_settings
def pin(settings: PinSettings) -> int:
    """Keep one placement, whatever the traffic, until `unpin`.

    Exits with status 3 if the balancer rejects it.
    """
    from equipoise.cli.live.operations import pin

    return pin(settings)


@commands.command(rich_help_panel=OPERATE)
@options_from_settings
def unpin(settings: OperationSettings) -> int:
    """Adopt plans again after `pin`.

    Exits with status 3 if the balancer rejects it.
    """
    from equipoise.cli.live.operations import unpin

    return unpin(settings)


@commands.command(rich_help_panel=OPERATE)
@options_from_settings
def preview(settings: PreviewSettings) -> int:
    """Plan now and show the result without rolling it out.

    Exits with status 3 if the balancer would not roll it out.
    """
    from equipoise.cli.live.operations import preview

    return preview(settings)


commands.add_typer(policy, name="policy", rich_help_panel=OPERATE)


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
