"""Durations and bytes with units."""

import pytest

from equipoise.policy.quantities import read_bytes, read_seconds, write_bytes, write_seconds


@pytest.mark.parametrize(
    ("text", "seconds"), [("10s", 10), ("250ms", 0.25), ("1h30m", 5400), ("0s", 0), ("1.5m", 90)]
)
def test_durations_are_read_with_units(text, seconds):
    assert read_seconds(text) == seconds
    assert read_seconds(write_seconds(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "number"), [("256Mi", 2**28), ("1G", 10**9), ("1.5k", 1500), (17, 17), ("17", 17)]
)
def test_bytes_are_read_as_kubernetes_writes_them(text, number):
    assert read_bytes(text) == number
    assert read_bytes(write_bytes(number)) == number
