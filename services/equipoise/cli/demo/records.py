"""What the balancer told during a demo, turned into `outcome`'s records."""

from collections.abc import Iterable

from equipoise.cli.demo.outcome import Span, Switch, Window
from equipoise_api.v1 import status_pb2

_UNTIL_TOLD_S = 0.25  # from the last Staged to the last Switched: a step, and a message


def windows_of(told: Iterable[status_pb2.WindowStatus]) -> tuple[Window, ...]:
    """Windows that had traffic, in the order they closed."""
    return tuple(
        Window(
            closed_s=window.closed_unix_s,
            balancedness=window.balancedness,
            max_over_mean=window.max_over_mean,
            generation=window.generation,
        )
        for window in sorted(told, key=lambda window: window.closed_unix_s)
        if window.assignments
    )


def switches_of(told: Iterable[status_pb2.SwitchStatus]) -> tuple[Switch, ...]:
    """Switches by generation."""
    return tuple(
        Switch(
            generation=switch.generation,
            span=Span(switch.time_unix_s - switch.staging_s - _UNTIL_TOLD_S, switch.time_unix_s),
            stall_ms=switch.max_stall_us / 1e3,
            median_step_ms=switch.median_step_us / 1e3,
            moves=switch.moves,
        )
        for switch in sorted(told, key=lambda switch: switch.generation)
    )
