"""The formats of rows in transit, on one rank; `test_ranks` covers several."""

import warnings

import pytest
import torch
from torch import distributed as dist

from equipoise_kernels.errors import GenerationMismatchError, PeerMissingError
from equipoise_kernels.formats import ScaleFormat
from equipoise_kernels.fp8.all_to_all.buffer import EpBuffer
from equipoise_kernels.fp8.all_to_all.collective import CollectiveBackend
from equipoise_kernels.fp8.all_to_all.opening import OpenedBuffer
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.peer import PeerBackend
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.all_to_all.window import virtual_windows
from equipoise_kernels.fp8.gemm.grouped import grouped_gemm
from equipoise_kernels.fp8.quant.group_quant import group_quant
from equipoise_kernels.fp8.quant.weight_quant import quantize_weight
from equipoise_model.exchange import ExchangeError
from equipoise_model.fp8 import experts as experts_module
from equipoise_model.fp8.experts import Fp8ExpertSlots
from equipoise_model.fp8.slot_exchange import ExchangedStep, SlotExchange
from equipoise_model.overlap import finish
from tests.support.kernel_backends import use_backends

NUM_SLOTS, TOP_K, DIM, ROOM = 4, 2, 256, 3


@pytest.fixture(autouse=True)
def twins(monkeypatch):
    use_backends(monkeypatch, "reference")


@pytest.fixture
def interpreted():
    """Kernels run in Triton's interpreter."""
    pytest.importorskip("triton", reason="kernels need the extra `kernels`")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
        yield


@pytest.fixture
def experts():
    generator = torch.Generator().manual_seed(2)
    slots = Fp8ExpertSlots(
        DIM, 128, num_slots=NUM_SLOTS, num_spare=1, scale_format=ScaleFormat.FP32
    )
    for own in (slots.gate_up, slots.down):
        for place in range(len(own.codes)):
            values = torch.randn(own.codes.shape[1:], generator=generator).bfloat16() / 8
            quantized = quantize_weight(values, scale_format=ScaleFormat.FP32)
            own.codes[place].copy_(quantized.codes)
            own.scales[place].copy_(quantized.scales)
    slots.place_of_slot.copy_(torch.tensor([4, 1, 0, 2]))
    return slots


def alone(backend, *, kind=CollectiveBackend):
    payload = Payload.BF16 if backend == "deep_ep" else Payload.FP8
    shape = EpShape(
        rank=0, num_ranks=1, slots_per_rank=NUM_SLOTS, top_k=TOP_K, dim=DIM, max_tokens=ROOM,
        payload=payload,
    )  # fmt: skip
    buffer = EpBuffer(shape, kind(shape, group=None, timeout_s=1.0), device="cpu")
    opened = OpenedBuffer(buffer=buffer, shape=shape, backend=backend, passed_over={})
    return SlotExchange(opened, max_captured_rows=2, timeout_s=1.0, generation=1)


def problem(num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, DIM, generator=generator).bfloat16()
    slots = torch.rand(num_rows, NUM_SLOTS, generator=generator).topk(TOP_K).indices
    slots[1:2] = -1
    return x, slots, torch.rand(num_rows, TOP_K, generator=generator)


def run(exchange, experts, num_rows, *, most_tokens=None, load=None, is_fixed=False):
    x, slots, weights = problem(num_rows)
    most_tokens = num_rows if most_tokens is None else most_tokens
    step = ExchangedStep(most_tokens=most_tokens, most_of_batches=most_tokens, is_fixed=is_fixed)
    return finish(
        exchange.stages(
            x,
            group_quant(x),
            slots_TK=slots,
            weights_TK=weights,
            experts=experts,
            load_S=torch.zeros(NUM_SLOTS, dtype=torch.int64) if load is None else load,
            step=step,
        )
    )


@pytest.mark.parametrize("backend", ["reference", "deep_ep"])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 8])
def test_packed_in_fp8_or_padded_in_bfloat16_rows_give_what_they_give_at_home(
    backend, num_rows, experts
):
    load = torch.zeros(NUM_SLOTS, dtype=torch.int64)
    # Others may have more, and this one then takes part with no rows.
    y = run(alone(backend), experts, num_rows, most_tokens=max(num_rows, 5), load=load)
    x, slots, weights = problem(num_rows)
    expected = experts.run(group_quant(x), slots, weights)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, atol=2e-2, rtol=1e-2)
    assert (y[1:2] == 0).all()
    assert load.tolist() == torch.bincount(slots[slots >= 0], minlength=NUM_SLOTS).tolist()


@pytest.mark.parametrize("backend", ["reference", "deep_ep"])
def test_tiles_are_chosen_by_the_rows_that_even_routing_brings(backend, experts, monkeypatch):
    expected = []

    def remember(rows, weight, slots, *, schedule, **options):
        expected.append(schedule.expected_rows)
        return grouped_gemm(rows, weight, slots, schedule=schedule, **options)

    monkeypatch.setattr(experts_module, "grouped_gemm", remember)
    run(alone(backend), experts, 3)
    # 3 rows, 2 choices each, over 4 slots, for both products; the second part has 1 row.
    assert expected == [2, 2]
    expected.clear()
    run(alone(backend), experts, 0, most_tokens=4)
    assert expected == [2, 2, 1, 1]


def test_padding_is_not_quantised(experts, monkeypatch):
    seen = []

    def remember(x, *, rows_per_group, **options):
        seen.append((tuple(x.shape), rows_per_group.sum().item()))
        return group_quant(x, rows_per_group=rows_per_group, **options)

    monkeypatch.setattr(experts_module, "group_quant", remember)
    run(alone("deep_ep"), experts, 3)
    _, slots, _ = problem(3)
    assert seen == [((NUM_SLOTS, ROOM, DIM), int((slots >= 0).sum()))]


def test_a_step_before_its_capture_launches_what_the_captured_one_does(experts, interpreted):
    """Otherwise the capture loads kernels, which CUDA does not permit."""
    shape = EpShape(
        rank=0, num_ranks=1, slots_per_rank=NUM_SLOTS, top_k=TOP_K, dim=DIM, max_tokens=ROOM,
        payload=Payload.FP8,
    )  # fmt: skip
    (window,) = virtual_windows(shape, device="cpu")
    buffer = EpBuffer(shape, PeerBackend(shape, window, timeout_s=5.0), device="cpu")
    opened = OpenedBuffer(buffer=buffer, shape=shape, backend="triton", passed_over={})
    exchange = SlotExchange(opened, max_captured_rows=2, timeout_s=1.0, generation=1)
    seen = []

    class Watched:
        num_slots, scale_format = NUM_SLOTS, ScaleFormat.FP32

        def run_packed(self, rows, slot_ends_S, *, expected_rows):
            seen.append((rows.codes.shape[0], expected_rows))
            return torch.zeros(rows.codes.shape, dtype=torch.bfloat16)

    for num_rows in (0, 1, 2):
        run(exchange, Watched(), num_rows, most_tokens=2, is_fixed=True)
    assert len(set(seen)) == 1
    assert seen[0][0] >= 2 * TOP_K


def test_buffer_errors_become_exchange_errors(experts):
    class Fails(CollectiveBackend):
        error = GenerationMismatchError("rank 3 runs 8", ranks=(3,))

        def check(self):
            raise self.error

        def begin_combine(self, *_arguments, **_options):
            raise self.error

    exchange = alone("reference", kind=Fails)
    with pytest.raises(ExchangeError, match="an exchange of rows failed: rank 3 runs 8"):
        exchange.check()
    Fails.error = PeerMissingError("its connection broke", ranks=(2,))
    # No rank waited, so nothing timed out.
    with pytest.raises(ExchangeError, match="an exchange of rows failed: its connection broke"):
        run(alone("reference", kind=Fails), experts, 1)
    # In a replayed graph the device has waited, before the host asks.
    with pytest.raises(ExchangeError, match="an exchange of rows timed out: its connection broke"):
        alone("reference", kind=Fails).check()


def test_a_closed_exchange_holds_no_memory_and_is_of_no_use(experts):
    exchange = alone("reference")
    assert (exchange.backend, exchange.passed_over) == ("reference", "")
    exchange.close()
    assert exchange._opened is None
    with pytest.raises(AssertionError, match="it is closed"):
        run(exchange, experts, 1)
    assert not dist.is_initialized()
