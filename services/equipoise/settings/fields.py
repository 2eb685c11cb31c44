"""Fields of settings, each declared once.

The range of a number is part of its annotation, `drain_timeout_s: Annotated[float, Range(0, 60)]`;
the string below a field explains it, on the command line and in the docs.
"""

import ast
import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from itertools import pairwise
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


@cache
def explanations(settings: type) -> Mapping[str, str]:
    """The string below each field of a dataclass, as one line, by field."""
    inherited = [one for one in settings.__bases__ if is_dataclass(one)]
    found = {name: text for base in inherited for name, text in explanations(base).items()}
    body = _classes_in(settings.__module__)[settings.__qualname__].body
    for statement, after in pairwise(body):
        match statement, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


@cache
def _classes_in(module: str) -> Mapping[str, ast.ClassDef]:
    """The classes of a module by qualified name; `inspect` would parse it again for each."""
    found: dict[str, ast.ClassDef] = {}

    def search(tree: ast.AST, path: str) -> None:
        for node in ast.iter_child_nodes(tree):
            match node:
                case ast.ClassDef(name=name):
                    found[path + name] = node
                    search(node, f"{path}{name}.")
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    search(node, f"{path}{name}.<locals>.")

    search(ast.parse(inspect.getsource(sys.modules[module])), "")
    return found


def _plain(number: float) -> str:
    return f"{number:.0f}" if float(number).is_integer() else f"{number:g}"
