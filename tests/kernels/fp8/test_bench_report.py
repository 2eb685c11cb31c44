"""Gates of the GPU benchmark: what a report says of them, and when a run passes."""

import json

import pytest

from equipoise_kernels.fp8.bench.report import (
    GATES,
    Gate,
    GateStatus,
    Machine,
    Sample,
    as_json,
    as_text,
    has_passed,
    judge,
)

H200 = Machine(copy_tb_s=4.3, bf16_tflops=790.0)


def gate(**changes):
    return Gate(
        **{"name": "X", "metric": "m", "must": 0.5, "target": 0.7, "stretch": 0.9} | changes
    )


def samples(*values):
    return [Sample(gate="X", shape=f"s{i}", value=value) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.95, 0.9], GateStatus.STRETCH),
        ([0.95, 0.6], GateStatus.TARGET),
        ([0.5, 0.6], GateStatus.MUST),
        ([0.486, 0.6], GateStatus.MUST),
        ([0.48, 2.0], GateStatus.FAILED),
        ([float("nan"), 2.0], GateStatus.FAILED),
        ([0.0, 2.0], GateStatus.FAILED),
        ([], GateStatus.NOT_RUN),
    ],
)
def test_one_shape_below_the_bar_fails_a_gate_and_noise_is_forgiven(values, verdict):
    assert judge(gate(), samples(*values)).verdict is verdict


def test_a_floor_is_for_every_shape_and_must_for_the_mean():
    with_floor = gate(must=0.75, target=0.9, stretch=None, floor=0.6)
    assert judge(with_floor, samples(0.6, 1.0)).verdict is GateStatus.MUST
    assert judge(with_floor, samples(0.5, 1.6)).verdict is GateStatus.FAILED
    assert judge(with_floor, samples(0.65, 0.7)).verdict is GateStatus.FAILED


def test_lower_is_better_for_some_gates():
    times = gate(must=1.25, target=1.0, stretch=None, is_more_better=False)
    assert judge(times, samples(1.2, 1.2)).verdict is GateStatus.MUST
    assert judge(times, samples(0.9, 1.0)).verdict is GateStatus.TARGET
    assert judge(times, samples(0.9, 1.3)).verdict is GateStatus.FAILED
    assert judge(times, samples(0.9, 1.1)).worst == 1.1


def report(*values, machine=H200, faults=()):
    found = [Sample(gate="A4", shape="s", value=value, faults=faults) for value in values]
    judgements = [judge(g, found if g.name == "A4" else []) for g in GATES.values()]
    return as_json(judgements, machine=machine, context={"device": "nvidia_h200", "seed": 7})


def test_a_report_is_json_with_the_outcome_of_every_gate():
    written = json.loads(json.dumps(report(0.7, float("nan")), allow_nan=False))
    gates = {entry["name"]: entry for entry in written["gates"]}
    assert set(gates) == set(GATES)
    assert gates["A4"]["verdict"] == "failed"
    assert gates["A4"]["mean"] is None
    assert gates["A4"]["samples"][1]["value"] is None
    assert gates["B1"]["verdict"] == "not run"
    assert "A4  failed" in as_text(written)


def test_a_run_passes_if_it_is_valid_and_nothing_failed():
    assert has_passed(report(0.7))
    assert not has_passed(report(0.3))
    assert not has_passed(report(0.7, faults=["wrong"]))
    slow = report(0.7, machine=Machine(copy_tb_s=3.0, bf16_tflops=790.0))
    assert not has_passed(slow)
    assert "3.00 TB/s" in as_text(slow)
    assert "700" in Machine(copy_tb_s=4.3, bf16_tflops=600.0).void_because("nvidia_h200")
    h100 = Machine(copy_tb_s=2.9, bf16_tflops=600.0)
    assert h100.void_because("nvidia_h100_80gb_hbm3") is None
    assert "2.7" in Machine(copy_tb_s=1.5, bf16_tflops=600.0).void_because("nvidia_h100_80gb_hbm3")
    assert h100.void_because("another_card") is None
