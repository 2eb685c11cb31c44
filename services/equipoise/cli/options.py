"""Command-line options made from settings: one option a field, explained by the field's docstring.

Settings are frozen dataclasses that check themselves. Their names, defaults and explanations are
written there once; this turns them into a typer command and back into the settings.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from equipoise.settings.fields import explanations

S = TypeVar("S")

REPEATED = "repeated"
ARGUMENT = "argument"
ENVIRONMENT = "environment"


def command_from(settings: type[S], act: Callable[[S], int]) -> Callable[..., None]:
    """A function for typer with an option for each field of `settings`, and of settings within.

    It builds the settings, which may raise their own exceptions, hands them to `act` and exits with
    the status that returns. A tuple of words is an option with commas that may be given several
    times, too; with `REPEATED` in the field's metadata commas do not part words. `ARGUMENT` makes a
    field a word that stands by itself, `ENVIRONMENT` names a variable of the environment that goes
    before its default.
    """

    def command(**values: Any) -> None:
        raise typer.Exit(act(_build(settings, values)))

    parameters = _parameters(settings)
    command.__doc__ = act.__doc__
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


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
    """A field with a default of its own; one that is made at the start is left to the settings."""
    default = None if field.default is MISSING else field.default
    option: dict[str, Any] = {"help": text, "envvar": field.metadata.get(ENVIRONMENT)}
    names: tuple[str, ...] = ()
    if field.default is MISSING:
        option["show_default"] = "found at the start"
        kind |= None
    if field.metadata.get(ARGUMENT):
        return inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, typer.Argument(help=text, show_default=False)],
        )
    if field.metadata.get(REPEATED):
        default, kind = [], list[str]
        option["show_default"] = False
    elif isinstance(default, tuple):
        option["metavar"] = "WORD,WORD..."
        option["show_default"] = ",".join(default) or False
        default, kind = list(default), list[str]
    elif default is False:
        # A switch that is off needs no second name for leaving it off.
        names = (f"--{field.name.replace('_', '-')}",)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, typer.Option(*names, **option)],
    )


def _build(settings: type[S], values: dict[str, Any]) -> S:
    types = get_type_hints(settings)
    given: dict[str, Any] = {}
    for field in fields(settings):  # type: ignore[arg-type]  # settings are dataclasses
        if is_dataclass(types[field.name]):
            given[field.name] = _build(types[field.name], values)
        elif field.metadata.get(REPEATED):
            given[field.name] = tuple(values[field.name])
        elif isinstance(field.default, tuple):
            words = (word for value in values[field.name] for word in value.split(","))
            given[field.name] = tuple(filter(None, words))
        elif values[field.name] is not None:
            given[field.name] = values[field.name]
    return settings(**given)
