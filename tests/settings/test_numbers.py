"""Numbers and sizes as text."""

import math

import pytest

from equipoise.settings.numbers import format_bytes, format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (0.02, "0.02"), (0.00002, "0.00002"), (3.14159, "3.14"), (99.96, "100"),
        (436.2, "436"), (1234.5, "1,230"), (2.5e7, "25,000,000"), (-1e4, "-10,000"),
        (math.inf, "inf"),
    ],
)  # fmt: skip
def test_a_number_has_no_exponent(value, text):
    assert format_number(value) == text


def test_a_number_has_the_digits_that_are_asked_for():
    assert format_number(436.2, digits=2) == "440"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (28_160_000_000, "26.2 GiB")],
)
def test_a_size_has_a_unit_that_fits(count, text):
    assert format_bytes(count) == text
