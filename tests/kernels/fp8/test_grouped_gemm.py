from dataclasses import replace

import pytest
import torch

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import QuantizedRows, QuantizedWeight
from equipoise_kernels.fp8.gemm.dense import gemm_reference
from equipoise_kernels.fp8.gemm.grouped import (
    GroupedGemmConfig,
    grouped_gemm,
    grouped_gemm_reference,
    grouped_gemm_triton,
)
from equipoise_kernels.fp8.gemm.schedule import (
    GROUP_ALIGNMENT,
    ContiguousRows,
    MaskedRows,
    PrefixSumRows,
)
from equipoise_kernels.fp8.testing.cases import spread_rows, spread_weight
from tests.support.guarded_tensors import guarded

NUM_SLOTS, NUM_COLUMNS, DIM = 5, 160, 256
SLOTS = [3, 0, 4]
SWAPPED = GroupedGemmConfig(
    block_m=32, block_n=64, swap_ab=True, num_warps=4, num_stages=3, ctas_per_sm=2
)
PLAIN = replace(SWAPPED, block_m=64, block_n=128, swap_ab=False)
COUNTS = [[0, 0, 0], [1, 0, 33], [40, 128, 2]]


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def slot_weight(weight, slot):
    return QuantizedWeight(codes=weight.codes[slot], scales=weight.scales[slot])


def flat_case(counts, generator):
    """Rows of groups that start at multiples of 128, and where each group's rows are."""
    starts, ends, position = [], [], 0
    for count in counts:
        starts.append(position)
        ends.append(position + count)
        position = -(-(position + count) // GROUP_ALIGNMENT) * GROUP_ALIGNMENT
    num_rows = max(position, 1)
    rows = {
        group: range(start, end)
        for group, (start, end) in enumerate(zip(starts, ends, strict=True))
    }
    return spread_rows((num_rows, DIM), generator), rows, ends


def group_of_row(rows, num_rows):
    ids = torch.full((num_rows,), -1, dtype=torch.int32)
    for group, places in rows.items():
        ids[places.start : places.stop] = group
    return ids


def assert_rows(out, index, a, weight, slot):
    """A group's outputs are the product with its slot's weights."""
    wanted = torch.empty(out.view[index].shape)
    rows = QuantizedRows(codes=a.codes[index], scales=a.scales[index])
    gemm_reference(rows, slot_weight(weight, slot), out=wanted)
    size = wanted.abs().amax(dim=1, keepdim=True)
    assert ((out.view[index] - wanted).abs() <= 2e-6 * size).all()


def run_by_name(name, a, weight, slots, schedule, out):
    if name == "reference":
        grouped_gemm_reference(a, weight, int32(slots), schedule=schedule, out=out)
    else:
        chosen = {"swapped": SWAPPED, "plain": PLAIN}[name]
        grouped_gemm_triton(a, weight, int32(slots), schedule=schedule, out=out, config=chosen)


@pytest.mark.parametrize("name", ["reference", "swapped", "plain"])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("kind", [ContiguousRows, PrefixSumRows])
def test_flat_rows_meet_their_slots_and_padding_is_not_written(
    kind, counts, name, generator, interpreted
):
    a, rows, ends = flat_case(counts, generator)
    num_rows = a.codes.shape[0]
    weight = spread_weight((NUM_SLOTS, NUM_COLUMNS, DIM), generator)
    out = guarded((num_rows, NUM_COLUMNS), torch.float32)
    if kind is ContiguousRows:
        schedule = ContiguousRows(group_of_row=group_of_row(rows, num_rows))
    else:
        schedule = PrefixSumRows(group_ends=int32(ends))
    run_by_name(name, a, weight, SLOTS, schedule, out.view)
    assert out.guard_is_intact()
    padding = torch.ones(num_rows, dtype=torch.bool)
    for group, places in rows.items():
        index = slice(places.start, places.stop)
        padding[index] = False
        if counts[group]:
            assert_rows(out, index, a, weight, SLOTS[group])
    assert out.unwritten()[padding].all()


@pytest.mark.parametrize("name", ["reference", "swapped", "plain"])
@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 0, 33], [40, -7, 999]])
def test_masked_rows_use_their_slots_and_counts_are_clamped_to_the_capacity(
    name, counts, generator, interpreted
):
    capacity = 40
    a = spread_rows((3, capacity, DIM), generator)
    weight = spread_weight((NUM_SLOTS, NUM_COLUMNS, DIM), generator)
    out = guarded((3, capacity, NUM_COLUMNS), torch.float32)
    schedule = MaskedRows(rows_of_group=int32(counts))
    run_by_name(name, a, weight, SLOTS, schedule, out.view)
    assert out.guard_is_intact()
    for group, count in enumerate(min(max(count, 0), capacity) for count in counts):
        if count:
            assert_rows(out, (group, slice(0, count)), a, weight, SLOTS[group])
        assert out.unwritten()[group, count:].all()


@pytest.mark.parametrize("name", ["reference", "swapped"])
@pytest.mark.parametrize("bad_slot", [-1, NUM_SLOTS, 2**31 - 1])
def test_outputs_of_a_group_with_a_missing_slot_are_not_written(
    name, bad_slot, generator, interpreted
):
    a = spread_rows((3, 4, DIM), generator)
    weight = spread_weight((NUM_SLOTS, NUM_COLUMNS, DIM), generator)
    out = guarded((3, 4, NUM_COLUMNS), torch.float32)
    schedule = MaskedRows(rows_of_group=int32([4, 4, 4]))
    run_by_name(name, a, weight, [1, bad_slot, 2], schedule, out.view)
    assert out.unwritten()[1].all()
    assert_rows(out, (0, slice(0, 4)), a, weight, 1)
    assert_rows(out, (2, slice(0, 4)), a, weight, 2)


@pytest.mark.parametrize("name", ["reference", "swapped"])
def test_outputs_of_rows_with_a_missing_or_wrong_group_are_not_written(
    name, generator, interpreted
):
    a = spread_rows((3 * GROUP_ALIGNMENT, DIM), generator)
    weight = spread_weight((NUM_SLOTS, NUM_COLUMNS, DIM), generator)
    out = guarded((a.codes.shape[0], NUM_COLUMNS), torch.float32)
    ids = torch.full((3 * GROUP_ALIGNMENT,), -1, dtype=torch.int32)
    ids[0:8], ids[4], ids[6] = 1, 2, 3
    ids[128:136], ids[256:260] = 3, -9
    run_by_name(name, a, weight, SLOTS, ContiguousRows(group_of_row=ids), out.view)
    written = torch.tensor([0, 1, 2, 3, 5, 7])
    assert_rows(out, written, a, weight, SLOTS[1])
    others = torch.ones(a.codes.shape[0], dtype=torch.bool)
    others[written] = False
    assert out.unwritten()[others].all()


def test_a_new_slot_map_changes_the_weights_and_nothing_else(generator, interpreted):
    a = spread_rows((2, 4, DIM), generator)
    weight = spread_weight((NUM_SLOTS, NUM_COLUMNS, DIM), generator)
    slots, outs = int32([0, 1]), []
    schedule = MaskedRows(rows_of_group=int32([4, 4]))
    for layout in ([0, 1], [4, 1], [0, 1]):
        slots.copy_(int32(layout))
        out = torch.full((2, 4, NUM_COLUMNS), float("nan"))
        grouped_gemm_triton(a, weight, slots, schedule=schedule, out=out, config=SWAPPED)
        outs.append(out)
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[0][1], outs[1][1])
    assert not torch.equal(outs[0][0], outs[1][0])


@pytest.mark.parametrize("expected_rows", [8, 30, 64])
def test_the_committed_configurations_agree_with_each_other(expected_rows, generator, interpreted):
    a = spread_rows((2, 70, DIM), generator)
    weight = spread_weight((NUM_SLOTS, NUM_COLUMNS, DIM), generator)
    out = guarded((2, 70, NUM_COLUMNS), torch.float32)
    schedule = MaskedRows(rows_of_group=int32([70, 9]), expected_rows=expected_rows)
    grouped_gemm_triton(a, weight, int32([2, 2]), schedule=schedule, out=out.view)
    assert_rows(out, (0, slice(0, 70)), a, weight, 2)
    assert_rows(out, (1, slice(0, 9)), a, weight, 2)


def test_no_groups_and_no_rows_are_fine(generator):
    weight = spread_weight((NUM_SLOTS, NUM_COLUMNS, DIM), generator)
    rows, none = spread_rows((0, DIM), generator), int32([])
    assert grouped_gemm(rows, weight, none, schedule=ContiguousRows(group_of_row=none)).shape == (
        0,
        NUM_COLUMNS,
    )
    assert grouped_gemm(
        spread_rows((4, DIM), generator), weight, none, schedule=PrefixSumRows(group_ends=none)
    ).shape == (4, NUM_COLUMNS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"slots": torch.tensor([0, 1])}, "slot_of_group must be int32"),
        ({"slots": int32([[0, 1]])}, r"slot_of_group must be \[2\]"),
        ({"schedule": MaskedRows(rows_of_group=int32([1]))}, r"rows_of_group must be \[2\]"),
        ({"schedule": MaskedRows(rows_of_group=torch.tensor([1, 1]))}, "must be int32"),
        ({"schedule": PrefixSumRows(group_ends=int32([1, 1]))}, "must have 2 dimensions"),
        ({"schedule": ContiguousRows(group_of_row=int32([0, 1]))}, "must have 2 dimensions"),
        ({"schedule": MaskedRows(rows_of_group=int32([1, 2, 3, 4])[::2])}, "contiguous"),
        ({"out": torch.empty(2, 3, NUM_COLUMNS)}, "out must be"),
    ],
)
def test_groups_that_break_the_contract_are_rejected_by_name(change, named, generator):
    a = spread_rows((2, 4, DIM), generator)
    weight = spread_weight((NUM_SLOTS, NUM_COLUMNS, DIM), generator)
    with pytest.raises(KernelInputError, match=named):
        grouped_gemm(
            a,
            weight,
            change.get("slots", int32([0, 1])),
            schedule=change.get("schedule", MaskedRows(rows_of_group=int32([1, 2]))),
            out=change.get("out"),
        )


def test_rows_of_another_number_of_groups_and_flat_weights_are_rejected(generator):
    weight = spread_weight((NUM_SLOTS, NUM_COLUMNS, DIM), generator)
    schedule = MaskedRows(rows_of_group=int32([1, 2]))
    with pytest.raises(KernelInputError, match="G = 2"):
        grouped_gemm(spread_rows((3, 4, DIM), generator), weight, int32([0, 1]), schedule=schedule)
    with pytest.raises(KernelInputError, match=r"\[S, N, K\]"):
        grouped_gemm(
            spread_rows((2, 4, DIM), generator),
            slot_weight(weight, 0),
            int32([0, 1]),
            schedule=schedule,
        )
