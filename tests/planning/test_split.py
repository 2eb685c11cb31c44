import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from equipoise.planning.balance import rank_loads
from equipoise.planning.placing.split import split
from equipoise.planning.shares import WHOLE, whole_shares


def parted(table, load, *, num_ranks, first=None):
    rank_of_slot = np.repeat(np.arange(num_ranks), table.shape[1] // num_ranks)
    return split(table, load=load, rank_of_slot=rank_of_slot, first=first)


def busiest(table, load, parts, *, num_ranks):
    served = np.take_along_axis(load, table.astype(np.int64), axis=1) * parts
    return served.reshape(len(table), num_ranks, -1).sum(axis=2).max(axis=1)


def least_busiest(row, load, *, num_ranks):
    """The exact optimum: a linear program over parts and the highest load."""
    num_slots, size = len(row), len(row) // num_ranks
    per_rank = np.zeros((num_ranks, num_slots + 1))
    per_expert = np.zeros((len(load), num_slots + 1))
    for slot, expert in enumerate(row):
        per_rank[slot // size, slot] = load[expert]
        per_expert[expert, slot] = 1.0
    per_rank[:, -1] = -1.0
    solved = linprog(
        np.r_[np.zeros(num_slots), 1.0],
        A_ub=per_rank,
        b_ub=np.zeros(num_ranks),
        A_eq=per_expert,
        b_eq=np.ones(len(load)),
    )
    assert solved.success
    return solved.fun


@st.composite
def cases(draw):
    num_ranks, size = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, num_ranks * size))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    extra = rng.integers(0, num_experts, num_ranks * size - num_experts)
    row = rng.permutation(np.r_[np.arange(num_experts), extra]).astype(np.int32)
    load = rng.lognormal(0.0, draw(st.floats(0.1, 2.0)), num_experts)
    load[rng.random(num_experts) < 0.2] = 0.0
    return row[None], load[None], num_ranks


@settings(max_examples=150, deadline=None)
@given(cases())
def test_no_other_split_has_a_less_busy_busiest_rank(case):
    table, load, num_ranks = case
    parts = parted(table, load, num_ranks=num_ranks)
    assert (parts >= 0).all()
    np.testing.assert_allclose(np.bincount(table[0], weights=parts[0]), 1.0)
    best = least_busiest(table[0], load[0], num_ranks=num_ranks)
    mean = load.sum() / num_ranks
    assert busiest(table, load, parts, num_ranks=num_ranks)[0] <= best + 0.01 * mean


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 2**32 - 1))
def test_a_split_is_never_worse_than_the_one_it_starts_from(case, seed):
    table, load, num_ranks = case
    first = np.random.default_rng(seed).random(table.shape) + 0.01
    first /= np.bincount(table[0], weights=first[0])[table]
    parts = parted(table, load, num_ranks=num_ranks, first=first)
    before = busiest(table, load, first, num_ranks=num_ranks)
    assert busiest(table, load, parts, num_ranks=num_ranks) <= before * (1 + 1e-9)


def test_a_hot_expert_leaves_the_rank_that_is_busy_with_another():
    # Expert 0 brings 6; beside it rank 0 has 4 already and rank 1 nothing worth a word.
    table, load = np.array([[0, 1, 0, 2]], dtype=np.int32), np.array([[6.0, 4.0, 0.0]])
    parts = parted(table, load, num_ranks=2)
    np.testing.assert_allclose(parts, [[1 / 6, 1.0, 5 / 6, 1.0]])
    shares = whole_shares(parts, table, num_experts=3)
    assert shares.sum() == 3 * WHOLE
    loads = rank_loads(table, load=load, num_ranks=2, share_of_slot=shares)
    np.testing.assert_allclose(loads, [[5.0, 5.0]], atol=6.0 / WHOLE)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_single_replicas_keep_the_whole_share(num_ranks):
    table = np.arange(3, dtype=np.int32)[None]
    np.testing.assert_array_equal(parted(table, np.ones((1, 3)), num_ranks=num_ranks), 1.0)
