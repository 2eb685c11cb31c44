"""`--unit` plans, replays and compares for a published deployment unit."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from equipoise.cli.main import app
from equipoise.cli.offline.policies import policies_of
from equipoise.cli.offline.settings import (
    PlanSettings,
    PoolSettings,
    RecordingSettings,
    WhatIfSettings,
)
from equipoise.formats.files import read_placement, write_recording
from equipoise.formats.format import Format
from equipoise.formats.recording import Recording
from equipoise.planning.policy import Algorithm, Policy
from equipoise.planning.units import UNITS, UnitName
from equipoise.settings.errors import InvalidSettingsError


@pytest.fixture(scope="module")
def loads(tmp_path_factory):
    """Two windows of skewed loads of two layers of 256 experts."""
    random = np.random.default_rng(5)
    hot = random.lognormal(sigma=0.6, size=(1, 2, 256))
    windows = np.trunc(hot * random.uniform(0.9, 1.1, (2, 2, 256)) * 10_000)
    path = tmp_path_factory.mktemp("loads") / "loads.json"
    write_recording(Recording(windows=windows, names=("a", "b")), path, form=Format.EQUIPOISE)
    return str(path)


def equipoise(*arguments):
    result = CliRunner().invoke(app, [*arguments, "--json"], env={"COLUMNS": "120"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", UnitName)
def test_a_plan_for_a_unit_has_its_ranks_slots_and_algorithm(name, loads, tmp_path):
    unit, out = UNITS[name], tmp_path / "layout.json"
    found = equipoise("plan", "--loads", loads, "--unit", name, "--out", str(out))
    assert found["num_ranks"] == unit.num_ranks
    assert found["algorithm"] == unit.algorithm
    assert found["balancedness"] > found["balancedness_current"]
    placement = read_placement(out)
    assert (placement.num_experts, placement.num_slots) == (unit.num_experts, unit.num_slots)
    if name is UnitName.PREFILL_EP32:
        # Each group's replicas are on one machine.
        nodes = np.arange(unit.num_slots) // (unit.num_slots // unit.num_nodes)
        for experts in placement.expert_of_slot:
            of_group = {(expert // 32, node) for expert, node in zip(experts, nodes, strict=True)}
            assert len(of_group) == 8
    for experts in placement.expert_of_slot if unit.routes_shared_expert else ():
        # The shared expert has a ninth of all assignments, of 320 ranks with one slot each.
        assert 20 <= np.count_nonzero(experts == 256) <= 40


def plan_settings(*, unit=UnitName.PREFILL_EP32, current=True, **options):
    pool = PoolSettings(current=Path("layout.json") if current else None)
    source = RecordingSettings(loads=("loads.json",))
    return PlanSettings(source=source, pool=pool, unit=unit, **options)


@pytest.mark.parametrize(
    ("options", "algorithm", "locality"),
    [
        ({}, Algorithm.INCREMENTAL, 0.0),
        ({"max_moves": 5}, Algorithm.INCREMENTAL, 0.0),
        ({"max_moves": 5, "current": False}, Algorithm.INCREMENTAL, 0.0),
        ({"locality": 0.25}, Algorithm.INCREMENTAL, 0.25),
        ({"algorithm": Algorithm.HIERARCHICAL}, Algorithm.HIERARCHICAL, None),
        ({"current": False}, Algorithm.HIERARCHICAL, None),
        ({"unit": UnitName.DECODE_EP144}, Algorithm.INCREMENTAL, None),
    ],
)
def test_from_a_current_layout_a_units_plan_is_incremental_and_keeps_its_hierarchy(
    options, algorithm, locality
):
    settings = plan_settings(**options)
    assert (settings.algorithm, settings.locality) == (algorithm, locality)


def test_a_replay_of_a_unit_follows_its_own_policy_unless_another_is_named(loads):
    found = equipoise("replay", "--loads", loads, "--unit", "decode-ep144")
    (_, own) = found["policies"]
    assert (own["name"], own["policy"]["algorithm"]) == ("decode-ep144", "global")
    assert own["policy"]["interval_s"] == 600
    named = equipoise("replay", "--loads", loads, "--unit", "decode-ep144", "--policy", "default")
    assert [one["name"] for one in named["policies"]] == ["never", "default"]


def test_whatif_compares_a_unit_with_fewer_redundant_slots(loads):
    found = equipoise("whatif", "--loads", loads, "--unit", "prefill-ep32")
    shapes = [(one["num_ranks"], one["num_nodes"], one["num_slots"]) for one in found["choices"]]
    assert shapes == [(32, 4, 256), (32, 4, 288)]


def test_whatif_replays_a_units_own_policy_unless_another_is_named():
    source = RecordingSettings(loads=("loads.json",))
    own = WhatIfSettings(source=source, unit=UnitName.PREFILL_EP32)
    assert policies_of([own.policy]) == {
        "prefill-ep32": Policy(algorithm=Algorithm.HIERARCHICAL, interval_s=600)
    }
    named = WhatIfSettings(source=source, unit=UnitName.PREFILL_EP32, policy="default")
    assert named.policy == "default"


@pytest.mark.parametrize(
    "option", [["--ranks", "8"], ["--ranks-per-node", "4"], ["--max-redundant", "3"]]
)
def test_whatif_takes_no_other_description_of_a_units_pools(option, loads):
    with pytest.raises(InvalidSettingsError, match="own --ranks, --ranks-per-node and --max-redu"):
        equipoise("whatif", "--loads", loads, "--unit", "prefill-ep32", *option)


@pytest.mark.parametrize("option", [["--ranks", "8"], ["--nodes", "2"], ["--slots", "300"]])
def test_a_unit_takes_no_other_description_of_the_pool(option, loads):
    with pytest.raises(InvalidSettingsError, match="has its own --ranks, --nodes and --slots"):
        equipoise("plan", "--loads", loads, "--unit", "prefill-ep32", *option)


def test_without_a_unit_the_number_of_ranks_is_required(loads):
    with pytest.raises(InvalidSettingsError, match="--ranks is missing: give the number"):
        equipoise("plan", "--loads", loads)
