"""`StatusSettings`: what a person may ask a balancer for. Starts nothing."""

from dataclasses import dataclass

from equipoise.cli.live.ask_settings import AskSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSettings(AskSettings):
    """One look at a pool, or a long one. JSON is one object, or one a line with `watch`."""

    watch: bool = False
    """Go on showing what changes, until Ctrl-C."""
