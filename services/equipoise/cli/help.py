"""The help of a group of commands: plain text in sections, as kubectl prints it."""

from typing import Any

from typer.core import TyperGroup

SERVICES = "Services"
INSPECT = "Inspect a running fleet"
OPERATE = "Operate a running fleet"
OFFLINE = "Work with files"
TRY = "Try and measure"
_SECTIONS = (SERVICES, INSPECT, OPERATE, OFFLINE, TRY, "Commands")


class Sections(TyperGroup):
    """Lists commands by section, each with its whole sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the sections that have commands."""
        rows: dict[str, list[tuple[str, str]]] = {section: [] for section in _SECTIONS}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            section = getattr(command, "rich_help_panel", None) or "Commands"
            rows[section].append((name, command.get_short_help_str(limit=200)))
        for section, listed in rows.items():
            if listed:
                with formatter.section(section):
                    formatter.write_dl(listed)
