"""`equipoise policy`: output and exit statuses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from equipoise.cli.policy.files import diff, schema, show, validate
from equipoise.cli.policy.preview import Situation, decided, run
from equipoise.cli.policy.settings import (
    PolicyDiffSettings,
    PolicyPreviewSettings,
    PolicyShowSettings,
    PolicyValidateSettings,
)
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.phase import Phase
from equipoise.planning.policy import Policy
from equipoise.planning.topology import ModelShape, Topology
from equipoise.policy.reading import read_policy
from equipoise.policy.reference import document_of, field_table, json_schema
from equipoise.policy.setting import SETTINGS
from equipoise.settings.errors import InvalidSettingsError

DOCS = Path(__file__).parents[2] / "docs"
HEAD = "apiVersion: equipoise.dev/v1alpha1\nkind: BalancePolicy\n"


@pytest.fixture
def write(tmp_path):
    def write(body, name="policy.yaml"):
        path = tmp_path / name
        path.write_text(HEAD + body)
        return path

    return write


def test_validate_prints_the_hashes_of_a_valid_file(write, capsys):
    path = write("pools: {decode: {interval: 3s}}")
    assert validate(PolicyValidateSettings(file=path)) == 0
    assert f"{path} is valid: policy " in capsys.readouterr().out
    assert validate(PolicyValidateSettings(file=path, json=True)) == 0
    hashes = json.loads(capsys.readouterr().out)["hashes"]
    assert set(hashes) == {"decode", "all other pools"}


def test_validate_prints_one_line_per_fault_and_returns_2(write, capsys):
    path = write("defaults:\n  intervall: 3s\n  pause: 1\n")
    assert validate(PolicyValidateSettings(file=path)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["line 4", "line 5"]
    assert validate(PolicyValidateSettings(file=path, json=True)) == 2
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert faults[1] == {
        "path": "defaults.pause",
        "line": 5,
        "value": "1",
        "why": "must be true or false",
    }


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InvalidSettingsError, match="No such file"):
        validate(PolicyValidateSettings(file=tmp_path / "none.yaml"))


def test_show_prints_an_equivalent_policy(write, capsys):
    path = write("defaults: {averages: {slowHalfLife: 90s}, waves: {maxBytes: 3000}}")
    assert show(PolicyShowSettings(file=path, pool="any")) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    again = read_policy(yaml.safe_dump({**yaml.safe_load(HEAD), "defaults": shown}), source="it")
    assert again.defaults == read_policy(path.read_text(), source="f").defaults


def test_diff_lists_differences_by_pool_and_returns_3(write, capsys):
    before = write("pools: {decode: {interval: 3s}}", "before.yaml")
    after = write("defaults: {planning: {riskZ: 1}}\npools: {decode: {interval: 4s}}", "after.yaml")
    assert diff(PolicyDiffSettings(before=before, after=after)) == 3
    assert capsys.readouterr().out.splitlines() == [
        "decode: interval 3s → 4s",
        "decode: planning.riskZ 0 → 1",
        "all other pools: planning.riskZ 0 → 1",
    ]
    assert diff(PolicyDiffSettings(before=before, after=before)) == 0


BY_PHASE = "pools: {{d: {{phase: decode, interval: {interval}}}, own: {{interval: 7s}}}}"


def test_show_and_diff_of_a_pool_heed_its_phase(write, capsys):
    before = write(BY_PHASE.format(interval="5s"), "before.yaml")
    after = write(BY_PHASE.format(interval="50s"), "after.yaml")
    files = {"before": before, "after": after}
    assert diff(PolicyDiffSettings(**files, pool="decode-1", phase=Phase.DECODE)) == 3
    assert capsys.readouterr().out == "decode-1: interval 5s → 50s\n"
    assert diff(PolicyDiffSettings(**files, pool="decode-1", phase=Phase.MIXED)) == 0
    assert diff(PolicyDiffSettings(**files, pool="own")) == 0, "it has an entry of its own"
    capsys.readouterr()
    assert show(PolicyShowSettings(file=after, pool="decode-1", phase=Phase.DECODE)) == 0
    assert yaml.safe_load(capsys.readouterr().out)["interval"] == "50s"


def test_a_pool_whose_phase_decides_and_is_not_given_is_an_input_error(write):
    plain, by_phase = write("", "plain.yaml"), write(BY_PHASE.format(interval="5s"))
    words = r"no pool named decode-1: add --phase"
    with pytest.raises(InvalidSettingsError, match=words):
        diff(PolicyDiffSettings(before=plain, after=by_phase, pool="decode-1"))
    with pytest.raises(InvalidSettingsError, match=words):
        show(PolicyShowSettings(file=by_phase, pool="decode-1"))
    assert show(PolicyShowSettings(file=plain, pool="decode-1")) == 0
    with pytest.raises(InvalidSettingsError, match="phase is that of a pool"):
        PolicyShowSettings(file=plain, phase=Phase.DECODE)
    with pytest.raises(InvalidSettingsError, match="phase is that of a pool"):
        PolicyDiffSettings(before=plain, after=plain, phase=Phase.DECODE)


def test_the_published_schema_is_current(capsys):
    schema()
    printed = capsys.readouterr().out
    published = (DOCS / "policy.schema.json").read_text()
    assert published == printed, (
        "equipoise policy schema > docs/policy.schema.json; python helm/embed_policy.py"
    )


def test_the_schema_accepts_valid_policies_only():
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.check_schema(json_schema())
    assert validator.is_valid(document_of(Policy()))
    head = yaml.safe_load(HEAD)
    assert not validator.is_valid({**head, "default": {}})
    assert not validator.is_valid({**head, "defaults": {"interval": 10}})
    assert not validator.is_valid({**head, "pools": {"a": {"planning": {"riskZ": 11}}}})


def test_the_documented_fields_are_current():
    assert field_table() in (DOCS / "policy.md").read_text(), "print(field_table()) into it"
    assert field_table().count("\n| `") == len(SETTINGS)


def test_the_example_in_the_docs_is_valid():
    text = (DOCS / "policy.md").read_text()
    example = text.partition("```yaml\n")[2].partition("```")[0]
    read = read_policy(example, source="docs/policy.md")
    assert read.pools["decode"].interval_s != read.defaults.interval_s


@pytest.fixture
def situation():
    load = np.ones((2, 8))
    load[:, 0] = 20.0
    return Situation(
        pool="tiny",
        current=contiguous_layout(num_layers=2, num_experts=8, num_ranks=4, slots_per_rank=3),
        model=ModelShape(num_layers=2, num_experts=8, num_groups=1, expert_bytes=1000),
        topology=Topology(node_of_rank=("a",) * 4, slots_per_rank=3),
        slow=load * 10,
        slow_samples=270_000.0,
        fast=load * 10,
        window=load * 1000,
        last_switch_s=None,
    )


def test_a_preview_decides_as_the_balancer_would(situation):
    yes = decided(situation, Policy(), now=100.0).verdict
    assert yes.accepted
    assert yes.moves
    paused = decided(situation, Policy(pause=True), now=100.0).verdict
    assert not paused.accepted
    assert "pause" in paused.reason
    picky = decided(situation, Policy(min_gain=1.0), now=100.0).verdict
    assert "gains too little" in picky.reason
    unproven = decided(replace(situation, slow_samples=4.0), Policy(), now=100.0).verdict
    assert "found no better layout" in unproven.reason


def test_a_preview_of_recorded_loads_needs_no_balancer(write, tmp_path, capsys):
    counts = np.ones((1, 2, 8), dtype=int) * 1000
    counts[:, :, 0] = 20_000
    loads = tmp_path / "loads.json"
    loads.write_text(json.dumps({"logical_count": counts.tolist()}))
    settings = PolicyPreviewSettings(
        file=write("defaults: {judging: {minAssignments: 10}}"),
        loads=(str(loads),),
        ranks=4,
        slots=12,
        json=True,
    )
    status = run(settings)
    shown = json.loads(capsys.readouterr().out)
    assert (status, shown["accepted"]) == (0, True)
    assert shown["balancedness_proposed"] > shown["balancedness_current"]


def test_a_preview_of_recorded_loads_heeds_the_pools_phase(write, tmp_path, capsys):
    loads = tmp_path / "loads.json"
    loads.write_text(json.dumps({"logical_count": [[[1000] * 8] * 2]}))
    settings = PolicyPreviewSettings(
        file=write("pools: {d: {phase: decode, pause: true}}"),
        loads=(str(loads),),
        ranks=4,
        slots=12,
        json=True,
    )
    with pytest.raises(InvalidSettingsError, match="add --phase"):
        run(settings)
    reasons = []
    for phase in (Phase.DECODE, Phase.PREFILL):
        assert run(replace(settings, phase=phase)) == 0
        reasons.append(json.loads(capsys.readouterr().out)["reason"])
    assert ["pause" in reason for reason in reasons] == [True, False]


@pytest.mark.parametrize("name", ["nodes", "ranks", "slots", "groups"])
def test_a_preview_of_no_ranks_or_slots_is_rejected(name):
    values = {"ranks": 4, name: 0}
    with pytest.raises(InvalidSettingsError, match=f"{name} must be at least 1, not 0"):
        PolicyPreviewSettings(file=Path("policy.yaml"), loads=("loads.json",), **values)
