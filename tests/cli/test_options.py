import shlex
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from equipoise.balancer.settings import BalancerSettings
from equipoise.cli.demo.settings import DemoSettings
from equipoise.cli.live.settings import StatusSettings
from equipoise.cli.main import app as program
from equipoise.cli.options import ARGUMENT, REPEATED, options_from_settings
from equipoise.planning.policy import Policy
from equipoise.settings.fields import explanations
from equipoise.worker.settings import WorkerSettings


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Inner:
    half_life_s: float = 2.5
    """Seconds."""

    def __post_init__(self):
        if self.half_life_s <= 0:
            raise ValueError("half_life_s must be above 0")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str = "a"
    """What people
    call it."""
    colour: Colour = Colour.RED
    """Of the thing."""
    words: tuple[str, ...] = ("one", "two")
    """Some."""
    file: Path | None = None
    """Where to."""
    found: int = field(default_factory=lambda: 7)
    """Made at the start."""
    loud: bool = False
    """Or not."""
    careful: bool = True
    """Or not."""
    inner: Inner = field(default_factory=Inner)
    """The rest."""


def settings_from(kind, line):
    """The settings that a command line makes, and what was printed."""
    made = []
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    def command(settings):
        made.append(settings)
        return 0

    command.__annotations__ = {"settings": kind, "return": int}
    app.command()(options_from_settings(command))
    result = CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return (made[0] if made else None), result


@pytest.mark.parametrize(
    "kind", [Outer, BalancerSettings, WorkerSettings, StatusSettings, DemoSettings]
)
def test_no_options_make_the_default_settings(kind):
    assert settings_from(kind, "")[0] == kind()


@pytest.mark.parametrize("line", ["--words x,y", "--words x --words y", "--words x, --words=,y"])
def test_lists_are_comma_separated_or_repeated(line):
    assert settings_from(Outer, line)[0].words == ("x", "y")


def test_every_kind_of_field_can_be_given():
    line = (
        "--name b --colour blue --words x,y,z --file out.json --found 9 --loud --no-careful "
        "--half-life-s 0.5"
    )
    assert settings_from(Outer, line)[0] == Outer(
        name="b",
        colour=Colour.BLUE,
        words=("x", "y", "z"),
        file=Path("out.json"),
        found=9,
        loud=True,
        careful=False,
        inner=Inner(half_life_s=0.5),
    )


@dataclass(frozen=True, kw_only=True)
class Repeating:
    policy: tuple[str, ...] = field(default=(), metadata={REPEATED: True})
    """One of several."""
    words: tuple[str, ...] = ()
    """Some."""


def test_an_option_may_be_given_several_times_with_commas_in_it():
    made, _ = settings_from(Repeating, "--policy a=x=1,y=2 --policy b --words x,y")
    assert made == Repeating(policy=("a=x=1,y=2", "b"), words=("x", "y"))
    assert settings_from(Repeating, "")[0] == Repeating()
    assert "default: ()" not in settings_from(Repeating, "--help")[1].output


@dataclass(frozen=True, kw_only=True)
class Speaking:
    words: str = field(default="", metadata={ARGUMENT: True})
    """What is said."""
    loud: bool = False
    """Or not."""


def test_a_field_can_be_a_positional_argument():
    assert settings_from(Speaking, "'two words' --loud")[0] == Speaking(
        words="two words", loud=True
    )
    assert settings_from(Speaking, "")[0] == Speaking()
    assert "What is said." in settings_from(Speaking, "--help")[1].output


def test_the_policy_is_part_of_the_balancers_options():
    made, _ = settings_from(BalancerSettings, "--interval-s 4 --algorithm global --store s.sqlite")
    assert made.defaults == Policy(interval_s=4.0, algorithm="global")
    assert made.store == "s.sqlite"


def test_the_help_has_each_fields_docstring_and_default():
    _, result = settings_from(Outer, "--help")
    for words in (
        "What people call it. [default: a]",
        "Seconds. [default: 2.5]",
        "[default: one,two]",
    ):
        assert words in " ".join(result.output.split())
    assert "--no-loud" not in result.output
    assert "--no-careful" in result.output


def test_a_word_that_no_option_has_is_a_usage_error():
    _, result = settings_from(Outer, "--colour green")
    assert result.exit_code == 2
    assert "green" in result.output


def test_exceptions_of_settings_pass_through():
    with pytest.raises(ValueError, match="half_life_s must be above 0"):
        settings_from(Outer, "--half-life-s 0")


def test_explanations_are_the_strings_below_the_fields():
    assert explanations(Inner) == {"half_life_s": "Seconds."}
    assert explanations(Outer)["name"] == "What people call it."


def test_the_address_comes_from_the_environment_unless_it_is_given():
    runner = CliRunner()
    environment = {"EQUIPOISE_ADDRESS": "nonsense"}
    for command in (["status"], ["pause"], ["loads"], ["layout", "show"]):
        error = runner.invoke(program, command, env=environment).exception
        expected = "--address must be host:port with a port from 1 to 65535, not 'nonsense'"
        assert str(error) == expected
    error = runner.invoke(program, ["status", "--address", "also:bad"], env=environment).exception
    assert "'also:bad'" in str(error)


def test_a_shell_completes_commands():
    asked = {
        "_EQUIPOISE_COMPLETE": "complete_bash",
        "COMP_WORDS": "equipoise layout ex",
        "COMP_CWORD": "2",
    }
    answer = CliRunner().invoke(program, [], prog_name="equipoise", env=asked)
    assert answer.output.split() == ["export"]
