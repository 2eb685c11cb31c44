"""Gates, their samples, and the judgement; pure, so that tests need no GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

SCHEMA = 1
# How far two runs of one kernel may differ.
NOISE = 0.03


class GateStatus(Enum):
    """Outcome of a gate."""

    FAILED = "failed"
    MUST = "must"
    TARGET = "target"
    STRETCH = "stretch"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A figure and its bars."""

    name: str
    """Such as "A1"."""
    metric: str
    """Human-readable."""
    must: float
    """Bar of the geometric mean; without a `floor`, of every shape too."""
    target: float | None = None
    """Bar to aim for."""
    stretch: float | None = None
    """Bar beyond the target, or None."""
    floor: float | None = None
    """Bar of every single shape, or None."""
    is_more_better: bool = True
    """Whether values must be at least the bars, rather than at most."""

    def reached(self, value: float, bar: float | None, *, noise: float = 0.0) -> bool:
        """Whether a value reaches the bar."""
        if bar is None or math.isnan(value):
            return False
        return value >= bar * (1 - noise) if self.is_more_better else value <= bar * (1 + noise)


GATES: Mapping[str, Gate] = {
    gate.name: gate
    for gate in (
        Gate(name="A1", metric="dense Triton, large: TFLOPS / bf16", must=0.75, target=1.0,
             stretch=1.3, floor=0.60),
        Gate(name="A2", metric="dense Triton, large: TFLOPS / cuBLAS block-scaled", must=0.45,
             target=0.60, stretch=0.75),
        Gate(name="A3", metric="dense default backend, large: TFLOPS / bf16", must=1.4, target=1.6),
        Gate(name="A4", metric="dense, few rows: weight bytes/s / copy", must=0.50, target=0.65,
             stretch=0.80),
        Gate(name="A5", metric="dense, few rows: time / row-scaled cuBLAS", must=1.25, target=1.0,
             is_more_better=False),
        Gate(name="B1", metric="masked: unique bytes/s / copy", must=0.60, target=0.75,
             stretch=0.85),
        Gate(name="B2", metric="masked, loaded: time / bound", must=2.0, target=1.5,
             is_more_better=False),
        Gate(name="B3", metric="flat: useful TFLOPS / dense of as many rows", must=0.85,
             target=0.95),
        Gate(name="B4", metric="flat, Zipf: useful TFLOPS / even groups", must=0.70, target=0.85),
        Gate(name="B5", metric="grouped: time / bf16 grouped_mm", must=1.0, target=0.65,
             is_more_better=False),
        Gate(name="C1", metric="quantisation, large: bytes/s / copy", must=0.70, target=0.80,
             stretch=0.90),
        Gate(name="C2", metric="quantisation, few rows: microseconds", must=5.0, target=3.5,
             is_more_better=False),
        Gate(name="C3", metric="route: compiled reference / time", must=3.0, target=6.0),
        Gate(name="C4", metric="permute, combine: bytes/s / copy", must=0.60, target=0.75),
        Gate(name="C5", metric="replica balance: torch's time / time", must=5.0, target=10.0),
        Gate(name="D1", metric="attention, 128 heads: TFLOPS / bf16", must=0.35, target=0.50,
             stretch=0.65),
        Gate(name="D2", metric="attention, 16 heads: cache bytes/s / copy", must=0.60,
             target=0.75),
        Gate(name="D3", metric="attention, one long sequence: time / that at D2's rate", must=2.0,
             target=1.5, is_more_better=False),
        Gate(name="D4", metric="prompts: TFLOPS / bf16", must=0.35, target=0.50, stretch=0.65),
        Gate(name="E1", metric="8 virtual ranks, many tokens: bytes/s / copy", must=0.50,
             target=0.65),
        Gate(name="E2", metric="8 virtual ranks, few tokens: microseconds of a rank", must=80.0,
             target=50.0, is_more_better=False),
        Gate(name="E3", metric="processes on one GPU: right exchanges, dead rank named",
             must=1.0),
        Gate(name="F1", metric="MoE layer of decode: time / sum of floors", must=1.8, target=1.4,
             is_more_better=False),
        Gate(name="F2", metric="slot map flipped under one graph: right outputs", must=1.0),
        Gate(name="R6", metric="eager call: microseconds of Python", must=30.0,
             is_more_better=False),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One shape of one gate."""

    gate: str
    """The gate's name."""
    shape: str
    """Human-readable."""
    value: float
    """In the gate's metric."""
    raw: Mapping[str, float] = field(default_factory=dict)
    """Figures that the value was computed from, with units in their names."""
    faults: Sequence[str] = ()
    """Faults of the result or the run; a sample with faults fails its gate."""
    is_held_out: bool = False
    """Whether the shape was drawn at run time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A gate's outcome: geometric mean over shapes, the worst shape, and why it failed."""

    gate: Gate
    verdict: GateStatus
    mean: float | None
    worst: float | None
    reasons: Sequence[str]
    samples: Sequence[Sample]


def judge(gate: Gate, samples: Sequence[Sample]) -> Judgement:
    """Compare samples with the gate's bars: one bad shape fails it, however good the mean."""
    if not samples:
        return Judgement(
            gate=gate, verdict=GateStatus.NOT_RUN, mean=None, worst=None, reasons=(), samples=()
        )
    values = [sample.value for sample in samples]
    is_positive = all(value > 0 for value in values)
    mean = math.exp(sum(map(math.log, values)) / len(values)) if is_positive else math.nan
    reasons = [f"{s.shape}: {fault}" for s in samples for fault in s.faults]
    bar = gate.must if gate.floor is None else gate.floor
    reasons += [
        f"{s.shape}: {s.value:.3g}, the bar is {bar:g}"
        for s in samples
        if not gate.reached(s.value, bar, noise=NOISE)
    ]
    if not gate.reached(mean, gate.must, noise=NOISE):
        reasons.append(f"the mean is {mean:.3g}, the bar is {gate.must:g}")
    verdict = GateStatus.FAILED if reasons else _level(gate, mean)
    worst = min(values) if gate.is_more_better else max(values)
    return Judgement(
        gate=gate, verdict=verdict, mean=mean, worst=worst, reasons=reasons, samples=samples
    )


def _level(gate: Gate, mean: float) -> GateStatus:
    if gate.reached(mean, gate.stretch):
        return GateStatus.STRETCH
    return GateStatus.TARGET if gate.reached(mean, gate.target) else GateStatus.MUST


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The GPU's own figures, measured in the same run."""

    copy_tb_s: float
    """Bytes read and written by the driver's copy or a kernel's, whichever is faster, TB/s."""
    bf16_tflops: float
    """Of an 8192^3 product."""

    def void_because(self, device: str) -> str | None:
        """Return why a run on this machine is void, or None; a card without figures never is."""
        known = LEAST.get(device)
        if known is None:
            return None
        if self.copy_tb_s < known.copy_tb_s:
            return f"a copy runs at {self.copy_tb_s:.2f} TB/s, {device} reaches {known.copy_tb_s:g}"
        if self.bf16_tflops < known.bf16_tflops:
            return (
                f"bf16 runs at {self.bf16_tflops:.0f} TFLOPS, {device} reaches "
                f"{known.bf16_tflops:g}"
            )
        return None


LEAST: Mapping[str, Machine] = {
    "nvidia_h200": Machine(copy_tb_s=3.9, bf16_tflops=700.0),
    # 3.0 TB/s and 608 to 700 TFLOPS were seen on idle cards.
    "nvidia_h100_80gb_hbm3": Machine(copy_tb_s=2.7, bf16_tflops=550.0),
}
"""Figures that every sound card of a name reaches; less means that something else uses it."""


def as_json(
    judgements: Sequence[Judgement], *, machine: Machine | None, context: Mapping[str, Any]
) -> dict[str, Any]:
    """Format the report to write: context (date, versions, seed, choices) first."""
    return {
        "schema": SCHEMA,
        **context,
        "machine": None if machine is None else asdict(machine),
        "void_because": (
            "the machine was not measured"
            if machine is None
            else machine.void_because(context["device"])
        ),
        "gates": [_judgement_as_json(judgement) for judgement in judgements],
    }


def has_passed(report: Mapping[str, Any]) -> bool:
    """Whether a run is valid and no gate failed."""
    verdicts = {gate["verdict"] for gate in report["gates"]}
    return report["void_because"] is None and GateStatus.FAILED.value not in verdicts


def as_text(report: Mapping[str, Any]) -> str:
    """Format one line per gate."""
    lines = [f"{report['device']}  seed {report['seed']}"]
    for gate in report["gates"]:
        mean = "      -" if gate["mean"] is None else f"{gate['mean']:7.3f}"
        lines.append(f"{gate['name']}  {gate['verdict']:8s} {mean}  {gate['metric']}")
        lines += [f"      {reason}" for reason in gate["reasons"]]
    if report["void_because"]:
        lines.append(f"VOID: {report['void_because']}")
    return "\n".join(lines)


def _judgement_as_json(judgement: Judgement) -> dict[str, Any]:
    """JSON has no NaN: an unknown mean or value becomes null."""
    return {
        **asdict(judgement.gate),
        "verdict": judgement.verdict.value,
        "mean": _finite(judgement.mean),
        "worst": _finite(judgement.worst),
        "reasons": list(judgement.reasons),
        "samples": [
            {**asdict(sample), "value": _finite(sample.value), "faults": list(sample.faults)}
            for sample in judgement.samples
        ],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
