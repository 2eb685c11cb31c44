import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout
from equipoise.planning.shares import WHOLE, even_shares, fault_in_shares, whole_shares


def layout_with(shares, *, row=(0, 1, 0, 2), generation=1):
    return Layout(
        generation=generation,
        num_experts=3,
        num_ranks=2,
        expert_of_slot=np.array([row], dtype=np.int32),
        share_of_slot=None if shares is None else np.array([shares], dtype=np.int32),
    )


@st.composite
def tables(draw):
    num_experts, extra = draw(st.integers(1, 9)), draw(st.integers(0, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = [
        rng.permutation(np.r_[np.arange(num_experts), rng.integers(0, num_experts, extra)])
        for _ in range(draw(st.integers(1, 3)))
    ]
    return np.array(rows, dtype=np.int32), num_experts, rng


@given(tables())
def test_even_shares_sum_up_and_differ_by_one_at_most(case):
    table, num_experts, _ = case
    shares = even_shares(table, num_experts=num_experts)
    assert fault_in_shares(shares, table, num_experts=num_experts) is None
    for layer, row in enumerate(table):
        for expert in range(num_experts):
            assert np.ptp(shares[layer, row == expert]) <= 1


@given(tables())
def test_parts_become_whole_shares_that_sum_up_and_are_off_by_one_at_most(case):
    table, num_experts, rng = case
    parts = rng.random(table.shape)
    for layer, row in enumerate(table):
        parts[layer] /= np.bincount(row, weights=parts[layer])[row]
    shares = whole_shares(parts, table, num_experts=num_experts)
    assert fault_in_shares(shares, table, num_experts=num_experts) is None
    assert np.abs(shares - parts * WHOLE).max() <= 1.0


def test_a_layout_keeps_uneven_shares_and_forgets_even_ones():
    uneven = layout_with([30_000, WHOLE, 2_768, WHOLE])
    assert uneven.share_of_slot is not None
    assert not uneven.share_of_slot.flags.writeable
    np.testing.assert_array_equal(uneven.shares(), [[30_000, WHOLE, 2_768, WHOLE]])
    even = layout_with([WHOLE // 2, WHOLE, WHOLE // 2, WHOLE])
    assert even.share_of_slot is None
    np.testing.assert_array_equal(even.shares(), [[WHOLE // 2, WHOLE, WHOLE // 2, WHOLE]])


def test_layouts_that_differ_in_shares_alone_are_not_the_same():
    even, uneven = layout_with(None), layout_with([30_000, WHOLE, 2_768, WHOLE])
    assert not even.same_placement(uneven)
    assert not uneven.same_placement(even)
    assert not uneven.same_placement(layout_with([29_999, WHOLE, 2_769, WHOLE]))
    assert uneven.same_placement(layout_with([30_000, WHOLE, 2_768, WHOLE], generation=9))
    assert uneven.with_placement(uneven.expert_of_slot, generation=2).same_placement(even)


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([30_000, WHOLE, 2_767, WHOLE], "layer 0: the shares of expert 0 sum to 32767, not 32768"),
        ([WHOLE + 1, WHOLE, -1, WHOLE], "slot 0 has a share of 32769, but shares range from 0 to"),
        ([-1, WHOLE, WHOLE + 1, WHOLE], "slot 0 has a share of -1"),
        ([WHOLE], r"shares have the shape \(1, 1\), slots \(1, 4\)"),
    ],
)
def test_shares_that_do_not_sum_to_the_whole_are_rejected(shares, words):
    with pytest.raises(InvalidLayoutError, match=words):
        layout_with(shares)


def test_a_replica_may_have_a_share_of_zero():
    assert layout_with([WHOLE, WHOLE, 0, WHOLE]).shares().tolist() == [[WHOLE, WHOLE, 0, WHOLE]]
