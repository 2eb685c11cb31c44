"""Kernels that balance replicas give the bits of their torch twin."""

import pytest
import torch

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.fp8.moe import replica_balance
from equipoise_kernels.fp8.moe.replica_balance import (
    LayoutSizes,
    balance_to_slots,
    replica_balance_reference,
    replica_balance_triton,
    replica_ends_triton,
)
from equipoise_kernels.fp8.moe.routes import SlotTables
from equipoise_kernels.replica_balance import balanced_replicas, count_experts, replica_ends
from equipoise_kernels.replica_choice import SHARE_BITS
from tests.support.guarded_tensors import guarded

BOTH = {"reference": replica_balance_reference, "triton": replica_balance_triton}
# Experts, ranks, slots per rank, most replicas: powers of two and others, all slots taken and some
# empty, no replicas at all, one expert, one rank, and an expert on every rank.
LAYOUTS = [(8, 4, 4, 4), (24, 7, 5, 5), (6, 3, 2, 1), (1, 3, 2, 3), (5, 1, 9, 4), (12, 16, 1, 3),
           (33, 5, 11, 9)]  # fmt: skip


def tables(sizes, generator, *, with_shares, empty=0):
    """A layout in which all slots but `empty` ones are taken, each by one replica."""
    num_experts, num_ranks, per_rank, most = sizes
    count = torch.ones(num_experts, dtype=torch.int64)
    for _ in range(num_ranks * per_rank - num_experts - empty):
        free = (count < most).nonzero().flatten()
        if len(free) > 0:
            # Some experts have far more than others.
            count[free[torch.randint((len(free) + 1) // 2, (), generator=generator)]] += 1
    used = torch.arange(most) < count.unsqueeze(1)
    slots = torch.full((num_experts, most), -1)
    slots[used] = torch.randperm(num_ranks * per_rank, generator=generator)[: int(count.sum())]
    if not with_shares:
        return SlotTables(slots_of_expert_ER=slots, replica_count_E=count)
    parts = torch.rand(num_experts, most, generator=generator) ** 4 * used + 1e-9
    ends = (parts.cumsum(1) / parts.sum(1, keepdim=True) * (1 << SHARE_BITS)).to(torch.int64)
    ends[torch.arange(most) >= count.unsqueeze(1) - 1] = 1 << SHARE_BITS
    return SlotTables(slots_of_expert_ER=slots, replica_count_E=count, share_ends_ER=ends)


def choices(tokens_by_rank, num_experts, generator, *, top_k=3):
    """Experts of each rank's rows, some far more often than others."""
    bias = torch.randn(num_experts, generator=generator) * 2
    top_k = min(top_k, num_experts)
    return [
        (bias + torch.randn(tokens, num_experts, generator=generator)).topk(top_k).indices
        for tokens in tokens_by_rank
    ]


def counted(ids_of_rank, num_experts):
    return torch.stack([count_experts(ids, num_experts=num_experts) for ids in ids_of_rank])


def same_ends(counts, layout, *, per_rank):
    """Compare the first kernel with `replica_ends` for every expert with several replicas."""
    seen = replica_ends_triton(counts, layout, slots_per_rank=per_rank)
    wanted = replica_ends(
        counts.sum(0),
        layout.slots_of_expert_ER,
        layout.replica_count_E,
        num_ranks=len(counts),
        slots_per_rank=per_rank,
        share_ends_ER=layout.share_ends_ER,
    )
    several = layout.replica_count_E > 1
    return torch.equal(seen[several], wanted[several])


@pytest.mark.parametrize("empty", [0, 2])
@pytest.mark.parametrize("with_shares", [False, True])
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_every_rank_chooses_the_slots_of_the_torch_twin(
    sizes, with_shares, empty, generator, interpreted
):
    num_experts, num_ranks, per_rank, _ = sizes
    layout = tables(sizes, generator, with_shares=with_shares, empty=empty)
    tokens = torch.randint(0, 60, (num_ranks,), generator=generator).tolist()
    ids_of_rank = choices(tokens, num_experts, generator)
    counts = counted(ids_of_rank, num_experts)
    assert same_ends(counts, layout, per_rank=per_rank)
    for rank in {0, num_ranks // 2, num_ranks - 1}:
        ids = ids_of_rank[rank]
        replicas = balanced_replicas(
            ids,
            counts,
            layout.slots_of_expert_ER,
            layout.replica_count_E,
            rank=rank,
            slots_per_rank=per_rank,
            share_ends_ER=layout.share_ends_ER,
        )
        for run in BOTH.values():
            out = guarded(ids.shape, torch.int64, column_guard=0)
            run(ids, counts, layout, rank=rank, slots_per_rank=per_rank, out_TK=out.view)
            assert out.guard_is_intact()
            assert torch.equal(out.view, layout.slots_of_expert_ER[ids, replicas])


@pytest.mark.parametrize("with_shares", [False, True])
@pytest.mark.parametrize("most", [1, 40, 5000, 2**24 - 1])
def test_divisions_are_the_same_from_no_load_to_the_largest(
    most, with_shares, generator, interpreted
):
    for sizes in LAYOUTS[:4]:
        num_experts, num_ranks, per_rank, _ = sizes
        layout = tables(sizes, generator, with_shares=with_shares)
        # Many experts have nothing, and one rank has nearly all.
        counts = torch.randint(0, most + 1, (num_ranks, num_experts), generator=generator)
        counts[:, torch.rand(num_experts, generator=generator) < 0.4] = 0
        counts[1:] //= 1 << 20
        counts[0] -= counts[1:].sum(0)
        assert same_ends(counts.clamp(min=0), layout, per_rank=per_rank)
        full = torch.zeros(num_ranks, num_experts, dtype=torch.int64)
        assert same_ends(full, layout, per_rank=per_rank)
        full[-1] = most
        assert same_ends(full, layout, per_rank=per_rank)


@pytest.mark.parametrize("sizes", [(256, 32, 10, 8), (256, 32, 9, 33), (256, 144, 2, 6)])
def test_layouts_of_deepseeks_size_are_divided_the_same(sizes, generator, interpreted):
    num_experts, num_ranks, per_rank, _ = sizes
    layout = tables(sizes, generator, with_shares=True)
    counts = counted(choices([16] * num_ranks, num_experts, generator, top_k=8), num_experts)
    assert same_ends(counts, layout, per_rank=per_rank)


def test_choices_across_blocks_keep_their_order(generator, interpreted, monkeypatch):
    monkeypatch.setattr(replica_balance, "_PAIRS", 8)
    layout = tables((8, 4, 4, 4), generator, with_shares=True)
    ids_of_rank = choices([30, 11, 0, 5], 8, generator)
    counts = counted(ids_of_rank, 8)
    for rank, ids in enumerate(ids_of_rank[:2]):
        out = {name: torch.empty_like(ids) for name in BOTH}
        for name, run in BOTH.items():
            run(ids, counts, layout, rank=rank, slots_per_rank=4, out_TK=out[name])
        assert torch.equal(out["triton"], out["reference"])


def test_padding_has_no_slot_and_takes_no_place(generator, interpreted):
    layout = tables((8, 4, 4, 4), generator, with_shares=False)
    ids_of_rank = choices([9, 7, 5, 3], 8, generator)
    counts = counted(ids_of_rank, 8)
    ids, padded = ids_of_rank[1], torch.full((12, 3), -1)
    padded[2:9] = ids
    padded[10] = 8
    for run in BOTH.values():
        alone, out = torch.empty_like(ids), torch.empty_like(padded)
        run(ids, counts, layout, rank=1, slots_per_rank=4, out_TK=alone)
        run(padded, counts, layout, rank=1, slots_per_rank=4, out_TK=out)
        assert torch.equal(out[2:9], alone)
        assert (out[[0, 1, 9, 10, 11]] == -1).all()


def test_tables_may_be_columns_of_wider_ones(generator, interpreted):
    layout = tables((8, 4, 4, 4), generator, with_shares=True)
    wide = torch.full((2, 8, 7), -3)
    wide[0, :, :4], wide[1, :, :4] = layout.slots_of_expert_ER, layout.share_ends_ER
    columns = SlotTables(
        slots_of_expert_ER=wide[0, :, :4],
        replica_count_E=layout.replica_count_E,
        share_ends_ER=wide[1, :, :4],
    )
    (ids,) = choices([20], 8, generator)
    counts = counted([ids] * 4, 8)
    seen, wanted = torch.empty_like(ids), torch.empty_like(ids)
    replica_balance_triton(ids, counts, columns, rank=2, slots_per_rank=4, out_TK=seen)
    replica_balance_reference(ids, counts, layout, rank=2, slots_per_rank=4, out_TK=wanted)
    assert torch.equal(seen, wanted)


def test_a_layout_beyond_the_bound_is_computed_by_the_twin(generator, interpreted, monkeypatch):
    layout = tables((8, 4, 4, 4), generator, with_shares=False)
    (ids,) = choices([20], 8, generator)
    counts = counted([ids] * 4, 8)
    monkeypatch.setattr(replica_balance, "MAX_ELEMENTS", 15)
    monkeypatch.setattr(replica_balance, "replica_ends_kernel", None)
    seen, wanted = torch.empty_like(ids), torch.empty_like(ids)
    replica_balance_triton(ids, counts, layout, rank=2, slots_per_rank=4, out_TK=seen)
    replica_balance_reference(ids, counts, layout, rank=2, slots_per_rank=4, out_TK=wanted)
    assert torch.equal(seen, wanted)


@pytest.mark.parametrize(
    ("sizes", "fit"),
    [
        ((256, 32, 9, 64), True),
        ((256, 32, 9, 65), False),
        ((256, 32, 10, 32), True),
        ((256, 144, 2, 33), True),
        ((256, 64, 8, 8), True),
        ((256, 64, 8, 9), False),
        ((1, 4, 1024, 1), False),
    ],
)
def test_the_bound_is_2048_replicas_of_replicated_experts(sizes, fit):
    names = ("num_experts", "num_ranks", "slots_per_rank", "most_replicas")
    assert LayoutSizes(**dict(zip(names, sizes, strict=True))).fit is fit


def test_no_rows_choose_nothing(generator):
    layout = tables((8, 4, 4, 4), generator, with_shares=False)
    ids, counts = torch.empty(0, 3, dtype=torch.int64), torch.zeros(4, 8, dtype=torch.int64)
    assert balance_to_slots(ids, counts, layout, rank=0, slots_per_rank=4).shape == (0, 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"expert_ids_TK": torch.zeros(2, 3, dtype=torch.int32)}, "expert_ids must be int64"),
        ({"expert_ids_TK": torch.zeros(6, dtype=torch.int64)}, "must be matrices"),
        ({"counts_RE": torch.zeros(8, 4, dtype=torch.int64).T}, "counts must be contiguous"),
        ({"counts_RE": torch.zeros(4, 9, dtype=torch.int64)}, "replica_count must be"),
        ({"rank": 4}, "need a rank of 4"),
        ({"slots_per_rank": 1}, "8 experts need as many slots"),
    ],
)
def test_arguments_that_break_the_contract_are_named(change, named, generator):
    arguments = {
        "expert_ids_TK": torch.zeros(2, 3, dtype=torch.int64),
        "counts_RE": torch.zeros(4, 8, dtype=torch.int64),
        "tables": tables((8, 4, 4, 4), generator, with_shares=False),
        "rank": 0,
        "slots_per_rank": 4,
    }
    with pytest.raises(KernelInputError, match=named):
        balance_to_slots(**arguments | change)
