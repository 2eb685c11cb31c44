"""Layout changes: applied to their base they give the target, or an error."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.change import LayoutChange, changes_by_layers
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.shares import whole_shares

BASE = contiguous_layout(num_layers=3, num_experts=8, num_ranks=4, slots_per_rank=3, generation=6)


def shuffled(seed: int, *, is_uneven: bool, generation: int):
    """A layout of other experts in some layers, split as it comes or evenly."""
    random = np.random.default_rng(seed)
    table = BASE.expert_of_slot.copy()
    for layer in np.flatnonzero(random.random(3) < 0.5):
        table[layer] = random.permutation(8).astype(np.int32)[table[layer]]
    shares = None
    if is_uneven:
        parts = random.random(table.shape)
        for layer, experts in enumerate(table):
            parts[layer] /= np.bincount(experts, weights=parts[layer])[experts]
        shares = whole_shares(parts, table, num_experts=8)
    return BASE.with_placement(table, generation=generation, share_of_slot=shares)


def swapped(layout, *, layers):
    table = layout.expert_of_slot.copy()
    for layer in layers:
        table[layer, [0, 5]] = table[layer, [5, 0]]
    return layout.with_placement(table, generation=layout.generation + 1)


@given(
    seeds=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    uneven=st.tuples(st.booleans(), st.booleans()),
)
@settings(deadline=None)
def test_a_change_applied_to_its_base_gives_the_target(seeds, uneven):
    base = shuffled(seeds[0], is_uneven=uneven[0], generation=7)
    target = shuffled(seeds[1], is_uneven=uneven[1], generation=9)
    made = LayoutChange.between(base, target).applied_to(base)
    assert made.generation == 9
    assert made.same_placement(target)


@given(
    seeds=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    uneven=st.tuples(st.booleans(), st.booleans()),
    batches=st.sampled_from(([[0], [1], [2]], [[2], [0, 1]], [[1, 2, 0]])),
)
@settings(deadline=None)
def test_batches_of_layers_lead_through_valid_layouts_to_the_target(seeds, uneven, batches):
    base = shuffled(seeds[0], is_uneven=uneven[0], generation=7)
    target = shuffled(seeds[1], is_uneven=uneven[1], generation=9)
    experts, shares, before = base.expert_of_slot.copy(), base.shares().copy(), base
    changes = changes_by_layers(base, target, batches=batches, first_generation=8)
    for generation, (batch, change) in enumerate(zip(batches, changes, strict=True), start=8):
        experts[batch], shares[batch] = target.expert_of_slot[batch], target.shares()[batch]
        meant = base.with_placement(experts, generation=generation, share_of_slot=shares)
        after = change.applied_to(before)
        assert after.generation == generation
        assert after.same_placement(meant)
        assert change.cells.tolist() == LayoutChange.between(before, meant).cells.tolist()
        before = after
    assert before.same_placement(target)
    assert before.digest() == target.digest()


def test_a_chain_of_changes_survives_pickling_and_is_indexed_like_a_sequence():
    base = shuffled(1, is_uneven=False, generation=7)
    target = shuffled(2, is_uneven=True, generation=9)
    changes = changes_by_layers(base, target, batches=[[0], [1, 2]], first_generation=8)
    arrived = pickle.loads(pickle.dumps(changes))
    assert [change.generation for change in arrived] == [8, 9]
    assert arrived[-1].digest == changes[1].digest == target.digest()
    assert arrived[-1].share_of_cell.tolist() == changes[1].share_of_cell.tolist()
    assert [change.generation for change in arrived[1:]] == [9]
    with pytest.raises(IndexError):
        arrived[2]


@given(
    seeds=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    uneven=st.tuples(st.booleans(), st.booleans()),
)
@settings(deadline=None)
def test_digests_known_from_the_base_are_those_of_the_new_layout(seeds, uneven):
    base = shuffled(seeds[0], is_uneven=uneven[0], generation=7)
    target = shuffled(seeds[1], is_uneven=uneven[1], generation=9)
    made = LayoutChange.between(base, target).applied_to(base)
    assert made.layer_digests() == replace(made).layer_digests() == target.layer_digests()


def test_a_change_has_only_the_cells_that_differ():
    change = LayoutChange.between(BASE, swapped(BASE, layers=[1]))
    assert change.cells.tolist() == [12, 17]
    assert change.share_of_cell is None


def test_a_change_of_another_layout_with_the_same_number_is_rejected():
    base, target = swapped(BASE, layers=[0]), swapped(BASE, layers=[0, 1])
    change = LayoutChange.between(base, target)
    with pytest.raises(InvalidLayoutError, match="another layout than generation 6 here"):
        change.applied_to(BASE)


def test_a_cell_that_does_not_exist_is_rejected():
    change = LayoutChange.between(BASE, replace(BASE, generation=7))
    beyond = replace(
        change, cells=np.array([36], dtype=np.uint32), expert_of_cell=np.zeros(1, dtype=np.int32)
    )
    with pytest.raises(InvalidLayoutError, match="cell 36 does not exist among 3 layers x 12"):
        beyond.applied_to(BASE)
