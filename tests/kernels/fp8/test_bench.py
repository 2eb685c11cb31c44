"""The GPU benchmark as far as a machine without a GPU can run it.

Cases run whole, with kernels in the interpreter, on tiny shapes, and a timer that counts instead of
measuring: what is tested is that they run, notice wrong results and fill the report.
"""

import random
from dataclasses import replace

import pytest
import torch

from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.bench import (
    all_to_all_cases,
    checks,
    dense_cases,
    grouped_cases,
    layer_cases,
    mla_cases,
    mla_inputs,
    moe_cases,
    moe_inputs,
    prefill_cases,
    process_cases,
    quant_cases,
)
from equipoise_kernels.fp8.bench.bench import Bench
from equipoise_kernels.fp8.bench.exchange_rank import Arguments, ExchangeRecord
from equipoise_kernels.fp8.bench.report import GATES, GateStatus, Machine, judge
from equipoise_kernels.fp8.bench.timing import Timing
from equipoise_kernels.fp8.gemm import dense
from equipoise_kernels.fp8.moe.replica_balance import replica_balance_reference
from equipoise_kernels.fp8.moe.route import route_reference
from equipoise_kernels.fp8.moe.routes import RoutingRule
from equipoise_kernels.fp8.testing import virtual_ranks
from equipoise_kernels.fp8.testing.cases import spread_rows, spread_weight

H200 = Machine(copy_tb_s=4.3, bf16_tflops=790.0)
KERNELS = ("gemm_kernel", "grouped_gemm_kernel", "group_quant_kernel", "rms_norm_quant_kernel",
           "silu_mul_quant_kernel", "route_kernel", "replica_ends_kernel", "permute_kernel",
           "combine_kernel", "send_rows_kernel", "mla_decode_kernel",
           "mla_prefill_kernel")  # fmt: skip


class OneMicrosecond:
    """Calls everything once and says that it took a microsecond."""

    def __init__(self, names=KERNELS):
        self.names = names

    def interleaved(self, candidates):
        for calls in candidates.values():
            for call in calls:
                call()
        return {name: Timing(median_us=1.0, spread=0.0) for name in candidates}

    def eager_us(self, call):
        call()
        return 1.0

    def kernel_names(self, call):
        return list(self.names)


@pytest.fixture
def bench(monkeypatch, interpreted, generator):
    for module in (
        dense_cases,
        grouped_cases,
        mla_inputs,
        moe_cases,
        prefill_cases,
        quant_cases,
    ):
        if hasattr(module, "num_copies"):
            monkeypatch.setattr(module, "num_copies", lambda num_bytes: 2)
    monkeypatch.setattr(moe_inputs, "ALIGNMENT", 4)
    monkeypatch.setattr(checks, "_REPEATS", 2)
    monkeypatch.setattr(grouped_cases, "_CAPACITY", 8)
    monkeypatch.setattr(grouped_cases, "_MAPS", 2)
    return Bench(timer=OneMicrosecond(), generator=generator, rng=random.Random(1), machine=H200)


def test_dense_cases_run_and_their_results_are_right(bench):
    samples = dense_cases.few_rows(bench, [(3, 160, 256)])
    assert [(s.gate, list(s.faults)) for s in samples if s.gate != "A5"] == []
    large = dense_cases.large(bench, [(17, 160, 256)])
    assert [s.gate for s in large] == ["A1", "A2"]
    assert not large[0].faults
    assert large[0].value == 1.0
    assert large[0].raw["triton_tflops"] == pytest.approx(2e-6 * 17 * 160 * 256)


def test_an_anchor_that_does_not_run_is_named_and_fails_its_gate(bench):
    (_, against_cublas) = dense_cases.large(bench, [(4, 128, 128)])
    assert any(fault.startswith("block does not run") for fault in against_cublas.faults)
    assert judge(GATES["A2"], [against_cublas]).verdict is GateStatus.FAILED


def test_a_wrong_product_fails_the_gate_however_fast_it_is(bench, monkeypatch):
    def forgets_scales(a, weight, *, out):
        out.copy_(a.codes.float() @ weight.codes.float().T)

    monkeypatch.setattr(dense, "gemm_triton", forgets_scales)
    sample = dense_cases.large(bench, [(3, 128, 256)])[0]
    assert any("away from float64" in fault for fault in sample.faults)
    assert judge(GATES["A1"], [sample]).verdict is GateStatus.FAILED


def test_another_kernel_than_the_intended_one_fails_the_gate(bench):
    silent = Bench(timer=OneMicrosecond(["ampere_sgemm"]), generator=bench.generator,
                   rng=bench.rng, machine=H200)  # fmt: skip
    sample = dense_cases.large(silent, [(3, 128, 128)])[0]
    assert any("no kernel named gemm_kernel" in fault for fault in sample.faults)


def test_grouped_cases_run_in_every_schedule_and_their_results_are_right(bench):
    load = grouped_cases.RowCounts(counts=(3, 0, 5), num_columns=64, dim=128)
    masked = grouped_cases.masked(bench, [load])
    assert [s.gate for s in masked] == ["B1", "B5"]
    assert not masked[0].faults
    assert masked[0].value == pytest.approx(load.unique_bytes / 4.3 / 1e6)
    assert load.unique_bytes == 2 * 64 * 128 + 8 * (128 + 2 * 64)
    for sample in grouped_cases.flat(bench, [load]):
        assert sample.gate == "B3"
        assert not sample.faults
    (flipped,) = grouped_cases.flipped_map(bench, load)
    assert (flipped.value, list(flipped.faults)) == (1.0, [])
    assert grouped_cases.loaded(bench, [load])[0].gate == "B2"


def test_a_write_beyond_the_rows_of_a_group_is_noticed(bench, monkeypatch):
    right = grouped_cases.grouped_gemm_triton

    def overruns(a, weight, slots, *, schedule, out):
        right(a, weight, slots, schedule=schedule, out=out)
        out[1, -1] = 0.0

    monkeypatch.setattr(grouped_cases, "grouped_gemm_triton", overruns)
    load = grouped_cases.RowCounts(counts=(3, 0), num_columns=128, dim=128)
    assert "rows of no group were written" in grouped_cases.masked(bench, [load])[0].faults


def test_quantisation_cases_run_and_their_results_are_right(bench):
    many, few = quant_cases.many_rows(bench, 5, 256), quant_cases.few_rows(bench, 5, 256)
    assert [s.faults for s in many + few] == [[]] * 6
    assert {s.gate for s in many} == {"C1"}
    assert [s.value for s in few] == [1.0] * 3
    num_bytes = 5 * 256 * 3 + 5 * 2 * 4
    assert many[0].value == pytest.approx(num_bytes / 1e6 / 4.3)


RULE = RoutingRule(num_experts=8, num_groups=2, top_groups=1, top_k=2, normalize=True, scale=1.0)


def test_routing_cases_run_and_notice_another_choice(bench, monkeypatch):
    # What torch compiles needs a compiler; what it computes is the reference's.
    monkeypatch.setattr(moe_cases, "compiled", lambda function: function)
    (sample,) = moe_cases.routing(bench, [5], RULE)
    assert (sample.gate, sample.value, list(sample.faults)) == ("C3", 1.0, [])

    def forgets_the_layer(*args, **options):
        route_reference(*args, **options | {"layer": 0})

    monkeypatch.setattr(moe_cases, "route_triton", forgets_the_layer)
    (sample,) = moe_cases.routing(bench, [5], RULE)
    assert "slots or their counts differ from the reference" in sample.faults


def test_balancing_cases_run_and_notice_another_slot(bench, monkeypatch):
    (sample,) = moe_cases.balancing(bench, [(5, 4, 4)], RULE)
    assert (sample.gate, sample.value, list(sample.faults)) == ("C5", 1.0, [])

    def forgets_ranks_before(*args, **options):
        replica_balance_reference(*args, **options | {"rank": 0})

    monkeypatch.setattr(moe_cases, "replica_balance_triton", forgets_ranks_before)
    (sample,) = moe_cases.balancing(bench, [(5, 4, 4)], RULE)
    assert "slots differ from the reference" in sample.faults


def test_cases_of_moved_rows_run_and_their_results_are_right(bench):
    permuted, combined = moe_cases.moving(bench, 5, 128, RULE)
    assert (permuted.gate, combined.gate) == ("C4", "C4")
    assert not permuted.faults
    assert not combined.faults
    # None of 5 rows is padding: each is read once, and written for both of its choices.
    assert permuted.value == pytest.approx((5 + 10) * (128 + 4) / 1e6 / 4.3)
    assert combined.value == pytest.approx(2 * 128 * (10 + 5) / 1e6 / 4.3)


def test_attention_cases_run_and_their_results_are_right(bench):
    samples = mla_cases.attention(bench, lengths=[[18, 5]], long=46, heads=(3, 2))
    assert [s.gate for s in samples] == ["D1", "D2", "D3"]
    assert [s.faults for s in samples] == [[], [], []]
    many, few, long = samples
    assert many.value == pytest.approx(2 * 23 * 3 * (576 + 512) / 1e6 / 790.0)
    assert few.value == pytest.approx(23 * 576 * 2 / 1e6 / 4.3)
    # All calls take a microsecond, so the rates are as the positions.
    assert long.value == pytest.approx(23 / 46)


def test_attention_that_does_not_read_every_position_fails_the_gate(bench, monkeypatch):
    right = mla_inputs.mla_decode_triton

    def forgets_some(query, cache, *, lengths_B, **options):
        right(query, cache, lengths_B=lengths_B - 4, **options)

    monkeypatch.setattr(mla_inputs, "mla_decode_triton", forgets_some)
    many, *_ = mla_cases.attention(bench, lengths=[[9, 16]], long=16, heads=(2, 1))
    assert any("away from float64" in fault for fault in many.faults)


def test_prefill_cases_run_and_their_results_are_right(bench):
    samples = prefill_cases.attention(bench, shapes=[[(5, 5), (2, 9)]], heads=2)
    assert [(s.gate, s.faults) for s in samples] == [("D4", [])]
    # Pairs of a query and a key that it sees.
    pairs = 5 * 6 / 2 + 8 + 9
    assert samples[0].value == pytest.approx(2 * pairs * 2 * (192 + 128) / 1e6 / 790.0)


def test_a_prompt_that_sees_its_future_fails_the_gate(bench, monkeypatch):
    right = prefill_cases.mla_prefill_triton

    def sees_more(inputs, **options):
        segments = inputs.segments_S6.clone()
        segments[:, 5] -= 3
        right(replace(inputs, segments_S6=segments), **options)

    monkeypatch.setattr(prefill_cases, "mla_prefill_triton", sees_more)
    (sample,) = prefill_cases.attention(bench, shapes=[[(6, 6)]], heads=2)
    assert any("away from float64" in fault for fault in sample.faults)


def test_a_layer_of_decode_runs_and_its_sums_are_right(bench, monkeypatch):
    rule = RoutingRule(
        num_experts=3, num_groups=1, top_groups=1, top_k=2, normalize=True, scale=1.0
    )
    sizes = {"num_tokens": 3, "rule": rule, "dim": 128, "expert_dim": 128}
    (sample,) = layer_cases.decode_layer(bench, **sizes)
    assert (sample.gate, list(sample.faults)) == ("F1", [])
    floors = [value for name, value in sample.raw.items() if name.endswith("_floor_us")]
    assert sample.value == pytest.approx(1 / sum(floors))
    assert sample.raw["permute_floor_us"] == pytest.approx((3 + 6) * 128 / 1e6 / 4.3)

    right = layer_cases.SILU_MUL_QUANT.backends["triton"]

    def forgets_a_row(x, *, rows_per_group, **options):
        right(x, rows_per_group=rows_per_group - 1, **options)

    monkeypatch.setitem(layer_cases.SILU_MUL_QUANT.backends, "triton", forgets_a_row)
    (sample,) = layer_cases.decode_layer(bench, **sizes)
    assert any("away from float64" in fault for fault in sample.faults)


def test_rows_lie_in_their_slots_by_token_and_no_choice_has_no_place():
    order, counts = layer_cases.slot_places(torch.tensor([[2, 0], [-1, 2], [2, 1]]), 3, 4)
    assert counts.tolist() == [1, 1, 3]
    assert order.place_of_pair_TK.tolist() == [[8, 0], [-1, 9], [10, 4]]
    assert order.pair_of_row_M.tolist() == [1, -1, -1, -1, 5, -1, -1, -1, 0, 3, 4, -1]
    assert order.slot_ends_S.tolist() == [1, 5, 11]


@pytest.mark.parametrize("measure", [all_to_all_cases.many_tokens, all_to_all_cases.few_tokens])
def test_exchanges_between_virtual_ranks_run_and_their_sums_are_right(bench, measure):
    shape = EpShape(
        rank=0, num_ranks=2, slots_per_rank=2, top_k=2, dim=128, max_tokens=3, payload=Payload.BF16
    )
    (sample,) = measure(bench, shape)
    assert list(sample.faults) == []
    num_bytes = 256 * (6 + 3 * 12) + 3 * 256 * 12 + 512 * 6
    assert sample.raw["tb_s"] == pytest.approx(num_bytes / 1e6)
    assert sample.value == pytest.approx(num_bytes / 1e6 / 4.3 if sample.gate == "E1" else 0.5)


def test_a_wrong_sum_fails_the_gate(bench, monkeypatch):
    shape = EpShape(
        rank=0, num_ranks=1, slots_per_rank=2, top_k=2, dim=128, max_tokens=3, payload=Payload.BF16
    )
    right = virtual_ranks.VirtualRanks.exchange

    def wrong(self):
        right(self)
        self.sums[0][2, 100] += 1e-6

    monkeypatch.setattr(virtual_ranks.VirtualRanks, "exchange", wrong)
    (sample,) = all_to_all_cases.many_tokens(bench, shape)
    assert any("last bit" in fault for fault in sample.faults)


def test_processes_exchange_and_name_the_one_that_is_killed(bench):
    (sample,) = process_cases.processes(
        bench, num_ranks=2, exchanges=2, within_s=60.0, timeout_s=5.0
    )
    assert (sample.gate, sample.value, list(sample.faults)) == ("E3", 1.0, [])
    assert sample.raw["rank_0_waited_s"] >= 5.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"exchanges": 9}, "time for 9 exchanges only, 10 are needed"),
        ({"wrong": 1}, "1 sums are not right"),
        (
            {"missing": (1,), "words": "rank 1 is late"},
            "rank 2 is dead, but it reported: rank 1 is late",
        ),
        ({"waited_s": 11.0}, "11.0 s"),
    ],
)
def test_what_a_process_saw_wrong_fails_the_gate(change, named, bench, monkeypatch):
    right = {"exchanges": 10, "wrong": 0, "missing": (2,), "words": "", "waited_s": 5.0}
    reports = {0: ExchangeRecord(**right), 1: ExchangeRecord(**right | change)}
    monkeypatch.setattr(process_cases, "_ran", lambda arguments: (reports, []))
    (sample,) = process_cases.processes(bench, exchanges=10, timeout_s=5.0)
    (fault,) = sample.faults
    assert named in fault
    assert judge(GATES["E3"], [sample]).verdict is GateStatus.FAILED


def test_a_process_that_fails_or_does_not_end_is_named(bench, tmp_path, monkeypatch):
    arguments = Arguments(
        num_ranks=2, rendezvous=str(tmp_path / "no" / "folder"), device="cpu", exchanges=1,
        within_s=1.0, timeout_s=1.0, seed=0,
    )  # fmt: skip
    monkeypatch.setattr(process_cases, "_STARTING_S", -1.5)
    assert process_cases._ran(arguments) == ({}, ["ranks were not done within 0.5 s"])
    monkeypatch.setattr(process_cases.sys, "executable", "/bin/false")
    assert process_cases._ran(arguments) == ({}, ["rank 0 failed: without a word"])


def test_blocks_are_checked_one_by_one(generator):
    a, weight = spread_rows((130, 128), generator), spread_weight((256, 128), generator)
    out = torch.empty(130, 256)
    dense.gemm_reference(a, weight, out=out)
    assert checks.product_faults(out, a, weight) == []
    tiny = out[128:, :128]
    tiny *= 1.5
    faults = checks.product_faults(out, a, weight)
    assert any("128 x 128 block" in fault for fault in faults)
    tiny.fill_(float("nan"))
    assert len(checks.product_faults(out, a, weight)) == 2


def test_calls_that_give_other_bits_each_time_are_noticed():
    out = torch.zeros(3)
    assert checks.repeat_faults(lambda: out.fill_(1.0), out) == []
    assert checks.repeat_faults(lambda: out.add_(1.0), out)
