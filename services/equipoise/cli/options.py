"""`options_from_settings`: a command's options, one per field of its settings.

Settings are frozen dataclasses that check themselves. They declare names, defaults and help texts
once; this module turns them into a typer command, and a command line back into settings.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from equipoise.planning.errors import InvalidPolicyError
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import explanations

S = TypeVar("S")

REPEATED = "repeated"
"""Metadata key: the option may be repeated, and commas are part of its values."""

ARGUMENT = "argument"
"""Metadata key: the field is a positional argument."""

ENVIRONMENT = "environment"
"""Metadata key: the environment variable that replaces the default."""


def options_from_settings(command: Callable[[S], int]) -> Callable[..., None]:
    """Make a typer command from a function that takes settings and returns an exit status.

    Each field becomes an option; so do the fields of settings inside settings. A field without a
    default is required. A tuple of strings takes comma-separated values and may be repeated.
    Errors of the settings name options as they are typed.
    """
    hints = get_type_hints(command)
    (settings,) = (hint for name, hint in hints.items() if name != "return")

    def run(**values: Any) -> None:
        try:
            chosen = _build(settings, values)
        except (InvalidPolicyError, InvalidSettingsError) as error:
            raise type(error)(_as_typed(str(error), values)) from None
        raise typer.Exit(command(chosen))

    parameters = _parameters(settings)
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


def _parameters(settings: type) -> list[inspect.Parameter]:
    types = get_type_hints(settings)
    texts = explanations(settings)
    parameters: list[inspect.Parameter] = []
    for field in fields(settings):
        if is_dataclass(types[field.name]):
            parameters += _parameters(types[field.name])
        else:
            parameters.append(_parameter(field, types[field.name], texts[field.name]))
    return parameters


def _parameter(field: Field[Any], kind: Any, text: str) -> inspect.Parameter:
    """The typer parameter of a field."""
    details: dict[str, Any] = {"help": text, "envvar": field.metadata.get(ENVIRONMENT)}
    names: tuple[str, ...] = ()
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    if field.default_factory is not MISSING:
        # The settings compute it.
        default, kind = None, kind | None
        details["show_default"] = "computed at startup"
    if get_origin(kind) is tuple:
        if field.metadata.get(REPEATED):
            details["show_default"] = False
        else:
            details["metavar"] = "<name,name,...>"
            details["show_default"] = False
            if isinstance(default, tuple) and default:
                # As it would be typed: typer puts a default that is given as text in parentheses.
                details["help"] = f"{text}  [default: {','.join(default)}]"
        kind = list[str]
        if isinstance(default, tuple):
            default = list(default)
    elif choices := _choices(kind):
        details["metavar"] = "<name>"
        details["help"] = f"{text} One of {', '.join(choices)}."
    elif default is False:
        # A flag that is off by default needs no --no-... form.
        names = (f"--{field.name.replace('_', '-')}",)
    if field.metadata.get(ARGUMENT):
        option = typer.Argument(help=text, show_default=False)
    else:
        option = typer.Option(*names, **details)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def _as_typed(message: str, names: Iterable[str]) -> str:
    """Replace the names of fields by those of options.

    Names of a single word may be ordinary words, so they count at the beginning only.
    """
    several = "|".join(name for name in names if "_" in name) or "$."
    first = "|".join(names)
    fields_named = rf"(?<![\w-])(?:no_)?(?:{several})(?!\w)|^(?:{first})(?= )"
    return re.sub(fields_named, lambda found: f"--{found[0].replace('_', '-')}", message)


def _choices(kind: Any) -> list[str]:
    """The values of an enumeration, which may be optional; empty for other types."""
    return [
        choice.value
        for one in (kind, *get_args(kind))
        if isinstance(one, type) and issubclass(one, Enum)
        for choice in one
    ]


def _build(settings: type[S], values: dict[str, Any]) -> S:
    types = get_type_hints(settings)
    chosen: dict[str, Any] = {}
    for field in fields(settings):  # type: ignore[arg-type]  # settings are dataclasses
        if is_dataclass(types[field.name]):
            chosen[field.name] = _build(types[field.name], values)
        elif field.metadata.get(REPEATED):
            chosen[field.name] = tuple(values[field.name])
        elif isinstance(values[field.name], list):
            words = (word for value in values[field.name] for word in value.split(","))
            chosen[field.name] = tuple(filter(None, words))
        elif values[field.name] is not None:
            chosen[field.name] = values[field.name]
    return settings(**chosen)
