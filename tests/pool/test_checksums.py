"""Checksums of slots become checksums of experts, and disagreement has a name."""

import numpy as np

from equipoise.planning.layout import contiguous_layout
from equipoise.pool.layouts import ChecksumTable

LAYOUT = contiguous_layout(num_layers=2, num_experts=6, num_ranks=2, slots_per_rank=4)
TRUTH = np.random.default_rng(0).integers(0, 256, size=(2, 6, 16), dtype=np.uint8)


def told_by(rank):
    experts = LAYOUT.expert_of_slot[:, 4 * rank : 4 * rank + 4]
    return TRUTH[np.arange(2)[:, None], experts]


def test_all_ranks_together_tell_every_expert():
    table = ChecksumTable(num_layers=2, num_experts=6)
    assert table.merge(LAYOUT, rank=0, checksums=told_by(0)) is None
    assert not table.complete
    assert table.merge(LAYOUT, rank=1, checksums=told_by(1)) is None
    assert table.complete
    assert np.array_equal(table.table(), TRUTH)


def test_telling_again_changes_nothing():
    table = ChecksumTable(num_layers=2, num_experts=6)
    for rank in (0, 1, 1, 0):
        assert table.merge(LAYOUT, rank=rank, checksums=told_by(rank)) is None
    assert np.array_equal(table.table(), TRUTH)


def test_a_rank_that_disagrees_is_named_and_not_believed():
    table = ChecksumTable(num_layers=2, num_experts=6)
    table.merge(LAYOUT, rank=0, checksums=told_by(0))
    # Slots 6 and 7 hold experts 0 and 1 again; rank 0 told of both.
    damaged = told_by(1)
    damaged[1, 3, 7] ^= 255
    fault = table.merge(LAYOUT, rank=1, checksums=damaged)
    assert fault.startswith("ranks 0 and 1 hold different bytes for expert 1 of layer 1")
    assert not table.complete, "nothing of it was taken"


def test_a_byte_that_changes_later_is_detected():
    table = ChecksumTable(num_layers=2, num_experts=6)
    for rank in (0, 1):
        table.merge(LAYOUT, rank=rank, checksums=told_by(rank))
    assert table.complete
    damaged = told_by(1)
    damaged[0, 1, 15] ^= 1
    fault = table.merge(LAYOUT, rank=1, checksums=damaged)
    assert fault.startswith("ranks 1 and 1 hold different bytes for expert 5 of layer 0")
    assert np.array_equal(table.table(), TRUTH), "it is not believed"
