import pytest
import torch

from equipoise_kernels.fp8 import tune, tune_plans
from equipoise_kernels.fp8.bench import mla_inputs, moe_inputs, prefill_cases
from equipoise_kernels.fp8.bench.timing import Timing
from equipoise_kernels.fp8.configurations import operations
from equipoise_kernels.fp8.gemm.dense import CONFIG_SPACE
from equipoise_kernels.fp8.testing.committed import TUNABLES

FAST, SLOW = CONFIG_SPACE[0], CONFIG_SPACE[1]


def test_shapes_with_a_better_configuration_of_their_own_come_before_the_best_for_all():
    times = {(1, 1): [1.0, 9.0], (2, 2): [1.0, 9.0], (3, 3): [4.0, 3.0]}
    special, default = tune.best_entries(times, [FAST, SLOW], max_rows=16)
    assert (special.shapes, special.config["num_stages"]) == (((3, 3),), SLOW.num_stages)
    assert (default.shapes, default.max_rows) == (None, 16)
    assert default.config["num_stages"] == FAST.num_stages


def test_times_that_are_the_same_but_for_noise_add_no_entry_and_no_kernel():
    times = {(1, 1): [1.0, 0.98], (2, 2): [1.0, 1.5]}
    (default,) = tune.best_entries(times, [FAST, SLOW], max_rows=None)
    assert default.config["num_stages"] == FAST.num_stages
    times = {(1, 1): [2.0, 1.005, 1.0], (2, 2): [1.0, 3.0, 3.0]}
    special, _ = tune.best_entries(times, [FAST, SLOW, CONFIG_SPACE[2]], max_rows=None)
    assert special.config["num_stages"] == SLOW.num_stages


def test_a_configuration_that_does_not_run_is_never_chosen(generator):
    class Timer:
        def interleaved(self, candidates):
            return {"tuned": Timing(median_us=5.0, spread=0.0)}

    def problem(rows, shape, generator):
        def launches(config):
            def call():
                if config is FAST:
                    raise RuntimeError("out of resources")

            return [call]

        return launches

    plan = tune.TuningPlan(buckets=(16, 64), shapes=((1, 1),), problem=problem)
    entries = tune.tuned(plan, [FAST, SLOW], timer=Timer(), generator=generator)
    assert [entry.max_rows for entry in entries] == [16, None]
    assert all(entry.config["num_stages"] == SLOW.num_stages for entry in entries)


@pytest.mark.parametrize("operation", tune.PLANS)
def test_what_tuning_times_is_a_launch_of_the_operation(operation, generator, interpreted):
    shape = (128, 128) if "gemm" in operation else (4 if operation == "row_order" else 128,)
    plan, config = tune.PLANS[operation], TUNABLES[operation].configs[0]
    with pytest.MonkeyPatch.context() as patch:
        for module in (tune_plans, mla_inputs, prefill_cases):
            patch.setattr(module, "num_copies", lambda num_bytes: 2)
        patch.setattr(tune_plans, "_GROUPS", 2)
        patch.setattr(tune_plans, "ALIGNMENT", 1)
        patch.setattr(moe_inputs, "ALIGNMENT", 1)
        calls = plan.problem(3, shape, generator)(config)
    assert len(calls) == 2
    for call in calls:
        call()


def test_every_committed_operation_can_be_tuned():
    assert set(tune.PLANS) == set(TUNABLES) == set(operations())


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_the_command_reports_it_and_changes_nothing(monkeypatch, capsys):
    monkeypatch.setattr("equipoise_kernels.fp8.bench.__main__.is_interpreting", lambda: False)
    assert tune.main(["--only", "gemm"]) == tune.NO_DEVICE
    assert "no CUDA GPU" in capsys.readouterr().err
