"""`Plant`: real code broken on purpose."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.schedule import USUAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """One planted fault."""

    breaks: str
    """What is broken, in a sentence."""

    patches: Callable[[], list[tuple[Any, str, Any]]]
    """Target, attribute and replacement of each patch."""

    kinds: tuple[str, ...] = USUAL
    """Kinds of faults of the schedules that search for it."""


def always(value: Any) -> Callable[..., Any]:
    """A function that returns a value, whatever it is called with."""
    return lambda *_args, **_about: value
