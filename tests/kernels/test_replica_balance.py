"""Replicas chosen by counts: what is reached beside the optimum, and what must hold always."""

import numpy as np
import pytest
import torch

from equipoise_kernels.replica_balance import (
    ROUNDS,
    balanced_replicas,
    count_experts,
    replica_ends,
)
from equipoise_kernels.replica_choice import SHARE_BITS
from tests.support.least_maximum import least_maximum

EXPERTS, RANKS, PER_RANK, TOP_K = 24, 8, 5, 4
SEEDS = range(12)


def table(generator, *, num_experts=EXPERTS, num_ranks=RANKS, per_rank=PER_RANK):
    """Slots and counts of a layout with no expert twice on a rank."""
    held = [[] for _ in range(num_experts)]
    ranks = torch.arange(num_ranks).repeat(per_rank).tolist()
    places = [0] * num_ranks
    for index, rank in enumerate(ranks):
        options = [e for e in range(num_experts) if rank not in [s // per_rank for s in held[e]]]
        chosen = (
            index
            if index < num_experts
            else options[int(torch.randint(len(options), (), generator=generator))]
        )
        held[chosen].append(rank * per_rank + places[rank])
        places[rank] += 1
    count = torch.tensor([len(slots) for slots in held])
    slots = torch.full((num_experts, int(count.max())), -1)
    for expert, own in enumerate(held):
        slots[expert, : len(own)] = torch.tensor(sorted(own))
    return slots, count


def rows(generator, *, tokens_by_rank, num_experts=EXPERTS, skew=1.5):
    """Distinct experts of each rank's rows, some experts far more often than others."""
    bias = torch.randn(num_experts, generator=generator) * skew
    return [
        (bias - torch.rand(tokens, num_experts, generator=generator).log().neg().log())
        .topk(TOP_K)
        .indices
        for tokens in tokens_by_rank
    ]


def chosen(ids_of_rank, slots, count, *, per_rank=PER_RANK, share_ends=None):
    """The slots of every rank's assignments, as each rank chooses them for itself."""
    counts = torch.stack([count_experts(ids, num_experts=len(count)) for ids in ids_of_rank])
    return [
        slots[
            ids,
            balanced_replicas(
                ids,
                counts,
                slots,
                count,
                rank=rank,
                slots_per_rank=per_rank,
                share_ends_ER=share_ends,
            ),
        ]
        for rank, ids in enumerate(ids_of_rank)
    ]


def rank_loads(slots_of_rank, *, num_ranks=RANKS, per_rank=PER_RANK):
    slots = torch.cat([slots.flatten() for slots in slots_of_rank])
    return torch.bincount(slots // per_rank, minlength=num_ranks)


def fullest(load, slots, count, *, rounds):
    """The busiest rank's load after some rounds."""
    ends = replica_ends(load, slots, count, num_ranks=RANKS, slots_per_rank=PER_RANK, rounds=rounds)
    served = ends.diff(dim=1, prepend=torch.zeros(len(ends), 1, dtype=torch.int64))
    used = torch.arange(slots.shape[1]) < count.unsqueeze(1)
    by_rank = torch.zeros(RANKS, dtype=torch.int64)
    return int(by_rank.scatter_add_(0, slots[used] // PER_RANK, served[used]).max())


@pytest.mark.parametrize("seed", SEEDS)
def test_rounds_approach_the_exact_optimum(seed):
    generator = torch.Generator().manual_seed(seed)
    slots, count = table(generator)
    ids = rows(generator, tokens_by_rank=[200] * RANKS)
    load = sum(count_experts(one, num_experts=EXPERTS) for one in ids)
    best = least_maximum(load, slots, count, RANKS, PER_RANK)
    even, few, many = (fullest(load, slots, count, rounds=rounds) for rounds in (0, ROUNDS, 500))
    # Of each replica's part, less than one assignment is rounded.
    assert best - 1 <= many <= best + PER_RANK
    assert few - best <= 0.5 * (even - best) + PER_RANK
    assert rank_loads(chosen(ids, slots, count)).max() == few


@pytest.mark.parametrize("seed", SEEDS)
def test_every_assignment_goes_to_a_replica_of_its_expert(seed):
    generator = torch.Generator().manual_seed(seed)
    slots, count = table(generator)
    ids = rows(generator, tokens_by_rank=[0, 1, 70, 3, 0, 200, 9, 40])
    for own, into in zip(ids, chosen(ids, slots, count), strict=True):
        assert (slots[own] == into.unsqueeze(-1)).any(-1).all()
        assert (into >= 0).all()


def test_replicas_get_what_their_ends_say_whatever_rank_the_rows_are_on():
    generator = torch.Generator().manual_seed(3)
    slots, count = table(generator)
    ids = rows(generator, tokens_by_rank=[5, 0, 90, 20, 61, 7, 33, 8])
    load = sum(count_experts(one, num_experts=EXPERTS) for one in ids)
    ends = replica_ends(load, slots, count, num_ranks=RANKS, slots_per_rank=PER_RANK)
    served = torch.bincount(
        torch.cat([into.flatten() for into in chosen(ids, slots, count)]),
        minlength=RANKS * PER_RANK,
    )
    for expert in range(EXPERTS):
        own = slots[expert, : count[expert]]
        assert served[own].cumsum(0).equal(ends[expert, : count[expert]])
        assert (ends[expert, count[expert] - 1 :] == load[expert]).all()


def test_an_expert_alone_on_its_ranks_is_split_into_equal_parts():
    slots, count = torch.tensor([[0, 1, 2]]), torch.tensor([3])
    ends = replica_ends(torch.tensor([300]), slots, count, num_ranks=3, slots_per_rank=1)
    assert ends.tolist() == [[100, 200, 300]]


def test_a_replica_beside_a_loaded_expert_gets_less():
    # Expert 0 has a replica on each rank; expert 1 is on rank 1 only.
    slots, count = torch.tensor([[0, 2], [3, -1]]), torch.tensor([2, 1])
    load = torch.tensor([100, 40])
    ends = replica_ends(load, slots, count, num_ranks=2, slots_per_rank=2)
    assert ends.tolist() == [[70, 100], [40, 40]]


def test_a_replica_on_a_rank_above_the_level_gets_nothing():
    slots, count = torch.tensor([[0, 2], [3, -1]]), torch.tensor([2, 1])
    ends = replica_ends(torch.tensor([10, 40]), slots, count, num_ranks=2, slots_per_rank=2)
    assert ends.tolist() == [[10, 10], [40, 40]]


def test_levelling_starts_from_the_shares_of_the_layout():
    # The ranks stay level whatever experts 0 and 1 exchange between them, so their shares remain.
    slots, count = torch.tensor([[0, 2], [1, 3]]), torch.tensor([2, 2])
    ends = torch.tensor([[1 << 13, 1 << 15], [3 << 13, 1 << 15]])
    found = replica_ends(
        torch.tensor([400, 400]), slots, count, num_ranks=2, slots_per_rank=2, share_ends_ER=ends
    )
    assert found.tolist() == [[100, 400], [300, 400]]


def test_shares_are_kept_on_average_by_traffic_that_they_were_planned_for():
    # Two thirds of expert 0 on rank 0, a third on rank 1, beside expert 1: level in the mean.
    slots, count = torch.tensor([[0, 2], [3, -1]]), torch.tensor([2, 1])
    third = (1 << SHARE_BITS) // 3
    ends = torch.tensor([[2 * third, 1 << SHARE_BITS], [1 << SHARE_BITS] * 2])
    rng, served = np.random.default_rng(0), torch.zeros(2)
    for _ in range(300):
        load = torch.from_numpy(rng.poisson((90, 30)))
        found = replica_ends(load, slots, count, num_ranks=2, slots_per_rank=2, share_ends_ER=ends)
        served += found[0].diff(prepend=torch.zeros(1, dtype=torch.int64))
    assert served[0] / served.sum() == pytest.approx(2 / 3, abs=0.01)


def test_no_rows_choose_nothing():
    slots, count = table(torch.Generator().manual_seed(0))
    empty = [torch.empty(0, TOP_K, dtype=torch.int64)] * RANKS
    assert [into.shape for into in chosen(empty, slots, count)] == [(0, TOP_K)] * RANKS


@pytest.mark.parametrize("load", [0, 1, 2**24 - 1])
def test_loads_at_their_limits_are_split_without_a_gap(load):
    slots, count = torch.arange(33).view(1, 33), torch.tensor([33])
    (ends,) = replica_ends(torch.tensor([load]), slots, count, num_ranks=33, slots_per_rank=1)
    assert ends[-1] == load
    assert ends.diff(prepend=torch.zeros(1, dtype=torch.int64)).max() <= load // 33 + 1
