import pytest
import torch

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import QuantizedRows, ScaleLayout, empty_rows
from equipoise_kernels.fp8.moe.permute import (
    PermuteConfig,
    combine,
    combine_reference,
    combine_triton,
    permute,
    permute_triton,
)
from equipoise_kernels.fp8.moe.row_order import (
    RowOrder,
    RowOrderConfig,
    most_rows,
    order_rows,
    row_order_reference,
    row_order_triton,
)
from equipoise_kernels.fp8.testing.cases import spread_normal, spread_rows
from tests.support.guarded_tensors import guarded

ORDER_CONFIG = RowOrderConfig(pairs=8, num_warps=4)
CONFIG = PermuteConfig(columns=32, num_warps=4)


def ordered(run, slots, *, num_slots, alignment, **options):
    num_rows = most_rows(slots.numel(), num_slots=num_slots, alignment=alignment) + 3
    storage = {
        "place_of_pair_TK": (slots.shape, torch.full((slots.numel() + 8,), -7, dtype=torch.int32)),
        "pair_of_row_M": ((num_rows,), torch.full((num_rows + 8,), -7, dtype=torch.int32)),
        "slot_ends_S": ((num_slots,), torch.full((num_slots + 8,), -7, dtype=torch.int32)),
    }
    out = RowOrder(**{name: s[4:-4].view(shape) for name, (shape, s) in storage.items()})
    run(slots, alignment=alignment, out=out, **options)
    assert all((s[:4] == -7).all() and (s[-4:] == -7).all() for _, s in storage.values())
    return out


def naive_order(slots, *, num_slots, alignment, num_rows):
    """The contract, pair by pair."""
    places, pairs, ends, place = [-1] * slots.numel(), [-1] * num_rows, [], 0
    for slot in range(num_slots):
        place = -(-place // alignment) * alignment
        for pair, wanted in enumerate(slots.flatten().tolist()):
            if wanted == slot:
                places[pair], pairs[place] = place, pair
                place += 1
        ends.append(place)
    return places, pairs, ends


CASES = [(7, 3, 5, 4), (1, 1, 1, 1), (12, 2, 3, 1), (5, 4, 33, 8), (0, 2, 3, 4)]


@pytest.mark.parametrize(("num_rows", "top_k", "num_slots", "alignment"), CASES)
def test_pairs_lie_slot_by_slot_in_their_own_order(
    num_rows, top_k, num_slots, alignment, generator, interpreted
):
    # Some belong to no slot: before the first one, or after the last.
    slots = torch.randint(-1, num_slots + 2, (num_rows, top_k), generator=generator)
    for run, options in ((row_order_reference, {}), (row_order_triton, {"config": ORDER_CONFIG})):
        order = ordered(run, slots, num_slots=num_slots, alignment=alignment, **options)
        places, pairs, ends = naive_order(
            slots, num_slots=num_slots, alignment=alignment, num_rows=len(order.pair_of_row_M)
        )
        assert order.place_of_pair_TK.flatten().tolist() == places
        assert order.pair_of_row_M.tolist() == pairs
        # Where a slot without rows ends is where it would begin.
        starts = [0, *(-(-end // alignment) * alignment for end in ends)]
        assert [max(e, s) for e, s in zip(ends, starts, strict=False)] == (
            order.slot_ends_S.tolist()
        )


def test_the_committed_configuration_orders_too(generator, interpreted):
    slots = torch.randint(0, 4, (9, 2), generator=generator)
    seen = ordered(row_order_triton, slots, num_slots=4, alignment=128)
    wanted = order_rows(slots, num_slots=4, alignment=128)
    assert torch.equal(seen.place_of_pair_TK, wanted.place_of_pair_TK)


def test_all_rows_for_one_slot_fit_and_so_does_one_for_each():
    for slots in (torch.full((9, 1), 2), torch.arange(9).view(9, 1)):
        order = order_rows(slots, num_slots=9, alignment=16)
        assert (order.place_of_pair_TK >= 0).all()


@pytest.fixture
def order():
    slots = torch.tensor([[0, 2], [2, -1], [1, 2], [5, 0], [-1, -1]])
    return order_rows(slots, num_slots=3, alignment=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_rows_of_every_dtype_go_to_their_places_and_nowhere_else(
    dtype, order, generator, interpreted
):
    x = torch.randn(5, 40, generator=generator).to(dtype)
    out = guarded((len(order.pair_of_row_M), 40), dtype)
    permute_triton((x.view(torch.int32),), order, outs=(out.view.view(torch.int32),), config=CONFIG)
    wanted = guarded(out.view.shape, dtype)
    permute(x, order, out=wanted.view)
    assert out.guard_is_intact()
    assert torch.equal(out.storage.view(torch.uint8), wanted.storage.view(torch.uint8))
    assert torch.equal(out.unwritten().all(dim=1), order.pair_of_row_M < 0)
    for pair, place in enumerate(order.place_of_pair_TK.flatten().tolist()):
        if place >= 0:
            assert torch.equal(out.view[place].float(), x[pair // 2].float())


@pytest.mark.parametrize("layout", ScaleLayout)
def test_quantised_rows_take_their_scales_along(layout, order, generator, interpreted):
    x = spread_rows((5, 256), generator, layout=layout)
    out = empty_rows((len(order.pair_of_row_M), 256), device="cpu", layout=layout)
    permute(x, order, out=out)
    kernel = empty_rows((len(order.pair_of_row_M), 256), device="cpu", layout=layout)
    parts, outs = ((rows.codes.view(torch.int32), rows.scales) for rows in (x, kernel))
    permute_triton(parts, order, outs=outs, config=CONFIG)
    own = order.pair_of_row_M >= 0
    assert torch.equal(kernel.scales[own], out.scales[own])
    assert torch.equal(kernel.codes[own].float(), out.codes[own].float())
    rows = order.pair_of_row_M[own].to(torch.int64) // 2
    assert torch.equal(out.dequantized()[own], x.dequantized()[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_are_weighed_and_summed_in_the_order_of_choices(
    dtype, order, generator, interpreted
):
    rows = spread_normal((len(order.pair_of_row_M), 40), generator, dtype=dtype)
    rows[order.pair_of_row_M < 0] = float("nan")
    weights = torch.rand(5, 2, generator=generator)
    weights[3, 0] = float("nan")  # of a choice without a place
    out = guarded((5, 40), dtype)
    combine_triton(rows, order, weights, out=out.view, config=CONFIG)
    wanted = torch.empty(5, 40, dtype=dtype)
    combine_reference(rows, order, weights, out=wanted)
    assert out.guard_is_intact()
    assert torch.equal(out.view, wanted)
    assert (wanted[4] == 0).all()
    places = order.place_of_pair_TK[0].to(torch.int64)
    exact = (weights[0].double().unsqueeze(1) * rows[places].double()).sum(0)
    torch.testing.assert_close(wanted[0].double(), exact, rtol=2**-7, atol=1e-6)


def test_permute_and_combine_accept_no_rows(interpreted):
    order = order_rows(torch.empty(0, 2, dtype=torch.int64), num_slots=3)
    assert order.slot_ends_S.tolist() == [0, 0, 0]
    out = permute(torch.empty(0, 8), order)
    permute_triton((torch.empty(0, 8),), order, outs=(out,))
    combine_triton(out, order, torch.empty(0, 2), out=torch.empty(0, 8))
    assert combine(out, order, torch.empty(0, 2)).shape == (0, 8)


def test_a_permutation_and_its_combination_give_rows_back(generator):
    slots = torch.randint(0, 6, (20, 3), generator=generator)
    order = order_rows(slots, num_slots=6, alignment=8)
    x = torch.randn(20, 16, generator=generator)
    back = combine(permute(x, order), order, torch.full((20, 3), 0.25))
    assert torch.equal(back, x * 0.75)


@pytest.mark.parametrize(
    ("slots", "options", "named"),
    [
        (torch.zeros(3, 2, dtype=torch.int32), {}, "slots must be int64"),
        (torch.zeros(3, dtype=torch.int64), {}, r"slots must be \[T, K\]"),
        (torch.zeros(2, 3, dtype=torch.int64).t(), {}, "slots must be contiguous"),
        (torch.zeros(3, 2, dtype=torch.int64), {"num_slots": 0}, "need slots"),
        (torch.zeros(3, 2, dtype=torch.int64), {"alignment": 0}, "need slots"),
        (torch.zeros(3, 2, dtype=torch.int64), {"alignment": 2**30}, "more than int32"),
    ],
)
def test_slots_that_break_the_contract_are_rejected_by_name(slots, options, named):
    with pytest.raises(KernelInputError, match=named):
        order_rows(slots, **{"num_slots": 4} | options)


def test_a_buffer_that_may_overflow_is_rejected(order):
    small = RowOrder(
        place_of_pair_TK=order.place_of_pair_TK,
        pair_of_row_M=order.pair_of_row_M[:-1],
        slot_ends_S=order.slot_ends_S,
    )
    with pytest.raises(KernelInputError, match=r"most_rows\(\)"):
        order_rows(torch.zeros(5, 2, dtype=torch.int64), num_slots=3, alignment=4, out=small)
    with pytest.raises(KernelInputError, match="slot_ends must be int32"):
        RowOrder(
            place_of_pair_TK=order.place_of_pair_TK,
            pair_of_row_M=order.pair_of_row_M,
            slot_ends_S=order.slot_ends_S.long(),
        )


def test_rows_that_break_the_contract_are_rejected_by_name(order):
    rows = len(order.pair_of_row_M)
    quantised = QuantizedRows(
        codes=torch.zeros(5, 128, dtype=torch.float8_e4m3fn), scales=torch.ones(5, 1)
    )
    rejected = [
        (lambda: permute(torch.zeros(4, 8), order), "x must be"),
        (lambda: permute(torch.zeros(5, 8, 1), order), r"x must be \[T, columns\]"),
        (lambda: permute(torch.zeros(5, 7, dtype=torch.bfloat16), order), "multiples of 4 bytes"),
        (lambda: permute(torch.zeros(5, 9, dtype=torch.bfloat16)[:, 1:], order), "4 bytes"),
        (lambda: permute(quantised, order, out=torch.zeros(rows, 128)), "both be quantised"),
        (lambda: permute(torch.zeros(5, 8), order, out=torch.zeros(rows, 4)), "out must be"),
        (lambda: combine(torch.zeros(3, 8), order, torch.zeros(5, 2)), "rows must be"),
        (lambda: combine(torch.zeros(rows, 8), order, torch.zeros(5, 3)), "weights must be"),
        (lambda: combine(torch.zeros(rows, 8, dtype=torch.int32), order, torch.zeros(5, 2)),
         "rows must be bfloat16"),
    ]  # fmt: skip
    for call, named in rejected:
        with pytest.raises(KernelInputError, match=named):
            call()
