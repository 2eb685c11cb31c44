"""The command of the GPU benchmark: a process per case, its bounds, and the report."""

import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from equipoise_kernels.fp8.bench import __main__ as command
from equipoise_kernels.fp8.bench.case import CaseInput, CaseOutput, CaseRunner
from equipoise_kernels.fp8.bench.clocks import parsed_clocks
from equipoise_kernels.fp8.bench.report import GATES, Sample
from equipoise_kernels.fp8.bench.tables import NOTHING, table

HERE = {"copy_tb_s": 4.3, "bf16_tflops": 790.0}
PREPARED = CaseOutput(machine=HERE, backends={"gemm": "triton"}, obstacles={"gemm=x": "absent"})


def runs(outputs, *, only=(), budget_s=300.0, cases=(("A1",), ("A4", "A5"), ("E3",))):
    """A run whose processes find `outputs`; also the inputs, and the report after every case."""
    run, inputs, reports = command.Run(seed=5), [], []

    def run_one(case):
        inputs.append(case)
        return PREPARED if not case.gates else outputs[case.gates]

    command.measure(
        run,
        only=only,
        budget_s=budget_s,
        after_case=lambda: reports.append(json.loads(json.dumps(run.report()))),
        run_one=run_one,
        cases=cases,
    )
    return run, inputs, reports


def verdicts(report):
    return {gate["name"]: gate["verdict"] for gate in report["gates"] if gate["samples"]}


def test_a_case_that_hangs_fails_its_gates_and_the_others_still_run():
    fast = asdict(Sample(gate="A4", shape="s0", value=1.0))
    outputs = {
        ("A1",): CaseOutput(fault="was ended after 120 s"),
        ("A4", "A5"): CaseOutput(samples=[fast]),
        ("E3",): CaseOutput(samples=[asdict(Sample(gate="E3", shape="s", value=1.0))]),
    }
    _, inputs, reports = runs(outputs)
    assert [verdicts(report) for report in reports] == [
        {},
        {"A1": "failed"},
        {"A1": "failed", "A4": "stretch"},
        {"A1": "failed", "A4": "stretch", "E3": "must"},
    ]
    assert "was ended after" in reports[1]["gates"][0]["reasons"][0]
    assert all(one.machine == HERE and one.backends == {"gemm": "triton"} for one in inputs[1:])
    assert reports[-1]["obstacles"] == {"gemm=x": "absent"}
    _, inputs, _ = runs(outputs, only=["A5"])
    assert [one.gates for one in inputs] == [(), ("A4", "A5")]


def test_gates_without_time_are_named_and_a_machine_that_cannot_be_measured_fails_all():
    run, inputs, _ = runs({("A1",): CaseOutput(), ("A4", "A5"): CaseOutput()}, budget_s=60.0)
    assert all(0 < one.within_s <= 60.0 for one in inputs)
    assert run.out_of_time == ["E3"]
    run = command.Run(seed=5)
    command.measure(
        run, only=[], budget_s=60.0, after_case=list,
        run_one=lambda case: CaseOutput(fault="no memory"), cases=[("A1",), ("C1",)],
    )  # fmt: skip
    assert verdicts(run.report()) == {"A1": "failed", "C1": "failed"}
    assert run.report()["void_because"] == "the machine was not measured"


HANGS = """
import subprocess, sys, time
sys.stdin.read()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open("CHILD", "w").write(str(child.pid))
time.sleep(60)
"""
WRITES = """
import json, sys
case = json.load(sys.stdin)
json.dump({"fault": "", "machine": {"copy_tb_s": case["seed"]}}, open(sys.argv[1], "w"))
"""


def _runs(stat):
    try:
        return stat.read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_case_is_ended_at_its_bound_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    hangs = HANGS.replace("CHILD", str(tmp_path / "child"))
    with CaseRunner((sys.executable, "-c", hangs)) as run_one:
        ended = run_one(CaseInput(within_s=5.0))
    assert ended.fault == "was ended after 5 s"
    child = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    until_s = time.monotonic() + 30.0
    while _runs(child):  # It was killed, and ends once the machine gives it time to.
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["child"]


def test_a_cases_process_gives_its_output_or_the_reason_why_not():
    with CaseRunner((sys.executable, "-c", WRITES)) as run_one:
        assert run_one(CaseInput(seed=7)).machine == {"copy_tb_s": 7}
        assert run_one(CaseInput(seed=8)).machine == {"copy_tb_s": 8}
    with CaseRunner((sys.executable, "-c", "raise SystemExit('no memory')")) as run_one:
        assert run_one(CaseInput()).fault == "ended with status 1: no memory"


def test_clocks_are_read_with_the_reasons_of_a_slow_one():
    line = "1410, 2619, 1980, 612.33, 700.00, 71, 0x0000000000000024\n"
    clocks = parsed_clocks(line)
    assert (clocks["sm_mhz"], clocks["power_w"]) == (1410.0, 612.33)
    assert clocks["throttled"] == ["software power cap", "software thermal slowdown"]
    assert parsed_clocks("[N/A], [N/A], 1980, [N/A], 700.00, 71, [N/A]") == {
        "max_sm_mhz": 1980.0, "power_limit_w": 700.0, "temperature_c": 71.0, "throttled": [],
    }  # fmt: skip


def test_the_readme_has_the_table_of_the_recorded_results(tmp_path):
    assert table(tmp_path) == NOTHING
    outputs = {("A4", "A5"): CaseOutput(samples=[asdict(Sample(gate="A4", shape="s", value=0.7))])}
    _, _, reports = runs(outputs, cases=[("A4", "A5")])
    (tmp_path / "nvidia_h200_2026-01-01.json").write_text(json.dumps(reports[-1]))
    text = table(tmp_path)
    assert "| A4 | dense, few rows: weight bytes/s / copy | 0.5 | 0.65 | 0.7 (target) |" in text
    assert "| B1 | masked: unique bytes/s / copy | 0.6 | 0.75 | - (not run) |" in text
    root = Path(__file__).parents[3]
    assert table(root / "results" / "gpu") in (root / "kernels" / "README.md").read_text()


def test_every_gate_is_measured_by_some_case():
    measured = {name for names in command.CASES for name in names} | set(command._BESIDE)
    assert measured == set(GATES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("interpreting", [True, False])
def test_without_a_gpu_the_command_reports_it_and_writes_nothing(
    interpreting, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(command, "is_interpreting", lambda: interpreting)
    assert command.main(["--out", str(tmp_path / "x.json"), "--only", "A4"]) == command.NO_DEVICE
    expected = "TRITON_INTERPRET" if interpreting else "no CUDA GPU"
    assert expected in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_gate_that_does_not_exist_is_rejected(capsys):
    with pytest.raises(SystemExit):
        command.main(["--only", "Z9"])
    assert "invalid choice" in capsys.readouterr().err
