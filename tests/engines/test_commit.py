"""A switch only copies, and leaves each engine's tables as its own functions make them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.engines import sglang, vllm
from equipoise.engines.tables import replica_tables
from equipoise.planning.layout import Layout
from tests.engines.seats import Ranks

FIRST = [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, 0]]
SECOND = [[0, 1, 3, 3, 0, 2], [0, 1, 2, 3, 2, 1]]
COPIES = {
    *("copy_", "index_copy_", "fill_", "index_fill_"),
    *("slice", "view", "select", "detach", "as_strided"),
}
"""Operations that need no memory, and whose shapes are checked when a layout is staged."""


class Operations(TorchDispatchMode):
    """Records the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def vllm_tables(experts, slots):
    state = SimpleNamespace(
        model=SimpleNamespace(),
        physical_to_logical_map=torch.zeros(2, slots, dtype=torch.int64),
        logical_to_physical_map=torch.full((2, experts, 8), -1),
        logical_replica_count=torch.ones(2, experts, dtype=torch.int64),
    )
    names = ("physical_to_logical_map", "logical_to_physical_map", "logical_replica_count")
    return [getattr(state, name) for name in names], *vllm._tables_of(state, 2)


def sglang_tables(experts, slots):
    one = lambda *shape: torch.zeros(2, *shape, dtype=torch.int64)  # noqa: E731
    state = SimpleNamespace(
        physical_to_logical_map=one(slots),
        physical_to_logical_map_cpu=one(slots),
        logical_to_all_physical_map=one(experts, slots),
        logical_to_all_physical_map_cpu=one(experts, slots),
        logical_to_all_physical_map_num_valid=one(experts),
        logical_to_rank_dispatch_physical_map=None,
    )
    names = (
        *("physical_to_logical_map_cpu", "logical_to_all_physical_map_cpu"),
        "logical_to_all_physical_map_num_valid",
    )
    return [getattr(state, name) for name in names], *sglang._tables_of(
        state, [0, 1], rank=0, options=None
    )


BOTH = pytest.mark.parametrize("tables_of", [vllm_tables, sglang_tables])


@BOTH
def test_a_switch_only_copies_within_memory_that_is_there(tables_of):
    ranks = Ranks(FIRST, num_experts=4).until_ready()
    _, tables, commit = tables_of(4, 6)
    layout = ranks.layout(SECOND)
    made, seat = tables(layout), ranks.seats[0]
    staged = ranks.staged(0, layout)
    with Operations() as operations:
        seat.held.switch(staged)
        commit(made)
    assert operations.names <= COPIES
    assert ranks.experts(0) == np.asarray(SECOND)[:, :3].tolist()


@BOTH
def test_columns_that_fewer_replicas_leave_unused_are_cleared(tables_of):
    (experts, slots, counts), tables, commit = tables_of(4, 6)
    for generation, row in enumerate(([0, 1, 2, 0, 3, 0], [0, 1, 2, 3, 1, 0], [3, 1, 2, 3, 3, 0])):
        layout = Layout(
            generation=generation + 1,
            num_experts=4,
            num_ranks=6,
            expert_of_slot=np.asarray([row, row], dtype=np.int32),
        )
        commit(tables(layout))
        wanted = replica_tables(layout, max_replicas=6)
        most = wanted.slots_of_expert.shape[2]
        assert torch.equal(experts, torch.from_numpy(wanted.expert_of_slot))
        assert torch.equal(slots[:, :, :most], torch.from_numpy(wanted.slots_of_expert))
        assert (slots[:, :, most:] == -1).all()
        assert torch.equal(counts, torch.from_numpy(wanted.replica_count))
