"""The tables of both engines, and which layouts they cannot serve."""

import numpy as np
import pytest

from equipoise.engines.tables import replica_tables
from equipoise.planning.layout import Layout
from equipoise.planning.shares import WHOLE
from equipoise.rank.errors import StageRejectedError


def layout(rows, *, num_experts, share_of_slot=None):
    return Layout(
        generation=3,
        num_experts=num_experts,
        num_ranks=2,
        expert_of_slot=np.asarray(rows, dtype=np.int32),
        share_of_slot=share_of_slot,
    )


def test_slots_of_each_expert_ascend_and_the_rest_is_minus_one():
    made = replica_tables(
        layout([[0, 1, 2, 0, 2, 1], [0, 1, 2, 1, 0, 2]], num_experts=3), max_replicas=6
    )
    assert made.slots_of_expert.tolist() == [[[0, 3], [1, 5], [2, 4]], [[0, 4], [1, 3], [2, 5]]]
    assert made.replica_count.tolist() == [[2, 2, 2], [2, 2, 2]]


def test_tables_of_many_layers_equal_a_plain_loop():
    draw = np.random.default_rng(3)
    rows = [draw.permutation([*range(32), *draw.permutation(32)[:8]]) for _ in range(20)]
    table = np.asarray(rows, dtype=np.int32)
    one = Layout(generation=1, num_experts=32, num_ranks=1, expert_of_slot=table)
    made = replica_tables(one, max_replicas=40)
    for layer, row in enumerate(rows):
        for expert in range(32):
            slots = np.flatnonzero(row == expert).tolist()
            found = made.slots_of_expert[layer, expert].tolist()
            assert found == slots + [-1] * (len(found) - len(slots))


def test_more_replicas_than_an_engine_has_room_for_are_rejected():
    with pytest.raises(StageRejectedError, match="2 replicas, but this engine has room for 1"):
        replica_tables(layout([[0, 1, 2, 0]], num_experts=3), max_replicas=1)


def test_uneven_shares_are_rejected():
    shares = np.array([[WHOLE // 4, WHOLE, WHOLE, 3 * WHOLE // 4]], dtype=np.int32)
    one = layout([[0, 1, 2, 0]], num_experts=3, share_of_slot=shares)
    with pytest.raises(StageRejectedError, match="pin a layout with even shares"):
        replica_tables(one, max_replicas=4)
