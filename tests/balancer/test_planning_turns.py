"""How many plans are computed at once."""

import os

import pytest

from equipoise.balancer.planner.turns import num_at_once


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [
        ("max 100000", 4),
        ("300000 100000", 2),
        ("50000 100000", 1),
        ("not a quota", 4),
        (None, 4),
    ],
)
def test_a_container_computes_no_more_plans_than_its_part_of_a_large_machine(
    cpu_max, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    path = tmp_path / "cpu.max"
    if cpu_max is not None:
        path.write_text(f"{cpu_max}\n")
    assert num_at_once(path) == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 7})
    assert num_at_once(path) == 1
