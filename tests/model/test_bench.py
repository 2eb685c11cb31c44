import dataclasses

import torch

from equipoise_kernels.fp8.bench.timing import Timing
from equipoise_model.bench.__main__ import as_text, main
from equipoise_model.bench.layer import LayerTiming, time_layer
from equipoise_model.config import Fp8Config
from tests.support.fp8_models import NARROW
from tests.support.kernel_backends import use_backends


class CallingTimer:
    """Calls everything once and says that it took a millisecond."""

    def __init__(self):
        self.results = []

    def interleaved(self, candidates):
        self.results += [call() for calls in candidates.values() for call in calls]
        return dict.fromkeys(candidates, Timing(median_us=1000.0, spread=0.1))


def test_a_layer_is_timed_for_each_phase_on_rows_that_reach_experts(monkeypatch):
    use_backends(monkeypatch, "reference")
    timer = CallingTimer()
    timings = time_layer(
        dataclasses.replace(NARROW, quantization_config=Fp8Config()),
        timer=timer,
        generator=torch.Generator().manual_seed(0),
        rows={"decode": 3, "prefill": 9},
    )
    assert [(one.phase, one.rows, one.tokens_per_s) for one in timings] == [
        ("decode", 3, 3000.0),
        ("prefill", 9, 9000.0),
    ]
    assert [result.shape for result in timer.results] == [(3, 128), (9, 128)]
    assert all(result.isfinite().all() and result.any() for result in timer.results)


def test_the_report_lists_what_was_timed():
    timing = LayerTiming(phase="decode", rows=128, median_us=500.0, spread=0.01)
    report = {
        "layer": "a layer",
        "device": "nvidia_h200",
        "timings": [dataclasses.asdict(timing) | {"tokens_per_s": timing.tokens_per_s}],
    }
    assert as_text(report).splitlines() == [
        "a layer, on nvidia_h200",
        "  decode     128 rows      500.0 us       256000 tokens/s",
    ]


def test_without_a_gpu_nothing_is_measured_or_written(tmp_path, capsys):
    if torch.cuda.is_available():
        return
    assert main(["--out", str(tmp_path / "report.json")]) == 2
    assert "nothing written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
