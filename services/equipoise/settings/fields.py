"""Fields of settings, each declared once.

The range of a number is part of its annotation, `stop_grace_s: Annotated[float, Range(0, 60)]`; the
string below a field explains it, on the command line and in the docs.
"""

import ast
import inspect
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from equipoise.settings.errors import InvalidSettingsError

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@dataclass(frozen=True, slots=True)
class Range:
    """The valid values of a number."""

    low: float
    """Lowest valid value, or the bound just below it if `is_open`."""

    high: float = math.inf
    """Highest valid value; infinity for no upper bound."""

    is_open: bool = False
    """Whether `low` itself is invalid."""

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.is_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        low, high = _plain(self.low), _plain(self.high)
        if self.is_open:
            return f"above {low}" + (f" and at most {high}" if self.high < math.inf else "")
        return f"from {low} to {high}" if self.high < math.inf else f"at least {low}"


@cache
def ranges_of(settings: type) -> Mapping[str, Range]:
    """The range of each number of a dataclass, by field."""
    hints = get_type_hints(settings, include_extras=True)
    return {
        name: one
        for name, hint in hints.items()
        for one in getattr(hint, "__metadata__", ())
        if isinstance(one, Range)
    }


def check_ranges(settings: Any, error: type[Exception] = InvalidSettingsError) -> None:
    """Check every number of a dataclass against its range; None stands for no value.

    Raises:
        InvalidSettingsError: a value is out of range; or `error`, if given.
    """
    kind: Any = type(settings)
    for name, valid in ranges_of(kind).items():
        value = getattr(settings, name)
        if value is not None and value not in valid:
            raise error(f"{name} must be {valid}, not {value}")


def explanations(settings: type) -> dict[str, str]:
    """The string below each field of a dataclass, as one line, by field."""
    inherited = [one for one in settings.__bases__ if is_dataclass(one)]
    found = {name: text for base in inherited for name, text in explanations(base).items()}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    assert isinstance(tree, ast.ClassDef)
    for statement, after in zip(tree.body, tree.body[1:], strict=False):
        match statement, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def _plain(number: float) -> str:
    return f"{number:.0f}" if float(number).is_integer() else f"{number:g}"
