"""Ranges in annotations, and what the error of a value outside its range says."""

import math
from dataclasses import dataclass
from typing import Annotated

import pytest

from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import Range, check_ranges, explanations, ranges_of


@dataclass(frozen=True, kw_only=True)
class Example:
    share: Annotated[float, Range(0, 1)] = 0.5
    """Share of the load,
    without a unit."""

    count: Annotated[int, Range(1)] = 1
    """Number of things."""

    name: str = ""
    """Any text."""


@dataclass(frozen=True, kw_only=True)
class Longer(Example):
    wait_s: Annotated[float, Range(0, 0.25, is_open=True)] = 0.1
    """Seconds."""


def test_values_on_a_bound_are_valid():
    for share in (0, 1):
        check_ranges(Longer(share=share, wait_s=0.25))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"share": 1.5}, "share must be from 0 to 1, not 1.5"),
        ({"share": math.nan}, "share must be from 0 to 1, not nan"),
        ({"count": 0}, "count must be at least 1, not 0"),
        ({"wait_s": 0}, "wait_s must be above 0 and at most 0.25, not 0"),
        ({"wait_s": math.inf}, "wait_s must be above 0 and at most 0.25, not inf"),
    ],
)
def test_an_error_names_the_field_the_range_and_the_value(values, words):
    with pytest.raises(InvalidSettingsError) as raised:
        check_ranges(Longer(**values))
    assert str(raised.value) == words


def test_an_open_range_without_an_upper_bound_names_one_bound():
    assert str(Range(0, is_open=True)) == "above 0"


def test_ranges_and_explanations_include_those_of_base_classes():
    assert list(ranges_of(Longer)) == ["share", "count", "wait_s"]
    assert explanations(Longer) == {
        "share": "Share of the load, without a unit.",
        "count": "Number of things.",
        "name": "Any text.",
        "wait_s": "Seconds.",
    }
