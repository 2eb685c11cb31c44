"""vllm-ascend's model runner V2 routes by a table of its own, made of vLLM's tables by its method.

Its package needs Ascend's devices, so a stand-in has that one method.
"""

import copy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equipoise.engines import releases, vllm
from equipoise.engines.errors import UnsupportedEngineError
from equipoise.engines.tables import replica_tables
from equipoise.planning.layout import Layout
from equipoise.rank.errors import StageRejectedError

EXPERTS, SLOTS, ROWS, RANK = 4, 6, 8, 1
LAYOUTS = [[0, 1, 2, 3, 0, 1], [0, 1, 3, 3, 0, 2], [3, 1, 2, 0, 3, 1]]


class LayerState:
    """Row n of its table has the slot of each expert for the n-th token of this rank."""

    def __init__(self, slots, counts):
        self.logical_to_physical_map, self.logical_replica_count = slots, counts
        self.expert_replica_routing_table = None
        self.num_rows = ROWS
        self.refresh_expert_replica_routing_table()

    def refresh_expert_replica_routing_table(self):
        counts = self.logical_replica_count
        replica = (torch.arange(self.num_rows)[:, None] + RANK + torch.arange(EXPERTS)) % counts
        made = self.logical_to_physical_map.gather(1, replica.T).T.to(torch.int32).contiguous()
        if self.expert_replica_routing_table is None:
            self.expert_replica_routing_table = made
        else:
            self.expert_replica_routing_table.copy_(made)


LayerState.__module__ = "vllm_ascend.distributed.eplb.state"


def layout_of(row, generation):
    table = np.asarray([row, row[::-1]], dtype=np.int32)
    return Layout(generation=generation, num_experts=EXPERTS, num_ranks=2, expert_of_slot=table)


@pytest.fixture
def model_state():
    made = replica_tables(layout_of(LAYOUTS[0], 1), max_replicas=16)
    slots = torch.full((2, EXPERTS, 16), -1)
    slots[:, :, : made.slots_of_expert.shape[2]] = torch.from_numpy(made.slots_of_expert)
    counts = torch.from_numpy(made.replica_count)
    layers = [
        SimpleNamespace(eplb_state=LayerState(slots[layer], counts[layer])) for layer in range(2)
    ]
    return SimpleNamespace(
        model=SimpleNamespace(moe_layers=layers),
        physical_to_logical_map=torch.from_numpy(made.expert_of_slot),
        logical_to_physical_map=slots,
        logical_replica_count=counts,
    )


def states_of(model_state):
    return [layer.eplb_state for layer in model_state.model.moe_layers]


def test_a_switch_leaves_the_routing_tables_that_the_engines_method_makes(model_state):
    tables, commit = vllm._tables_of(model_state, 2)
    states = states_of(model_state)
    in_use = [state.expert_replica_routing_table for state in states]
    for generation, row in enumerate(LAYOUTS[1:], start=2):
        before = [table.clone() for table in in_use]
        made = tables(layout_of(row, generation))
        assert all(map(torch.equal, in_use, before)), "changed before the switch"
        commit(made)
        for state, table, old in zip(states, in_use, before, strict=True):
            assert state.expert_replica_routing_table is table, "graphs keep its address"
            assert not torch.equal(table, old)
            fresh = copy.copy(state)
            fresh.expert_replica_routing_table = None
            fresh.refresh_expert_replica_routing_table()
            assert torch.equal(table, fresh.expert_replica_routing_table)


def test_a_routing_table_that_cannot_be_made_rejects_the_layout_and_changes_nothing(model_state):
    tables, _ = vllm._tables_of(model_state, 2)
    before = [state.expert_replica_routing_table.clone() for state in states_of(model_state)]
    states_of(model_state)[1].num_rows += 1
    with pytest.raises(StageRejectedError, match="layer 1 has another shape"):
        tables(layout_of(LAYOUTS[1], 2))
    for state, table in zip(states_of(model_state), before, strict=True):
        assert torch.equal(state.expert_replica_routing_table, table)


def test_both_versions_are_shown(model_state, monkeypatch):
    versions = {"vllm": "0.30.0", "vllm-ascend": "0.30.0rc1"}
    monkeypatch.setattr(vllm, "version", versions.get)
    assert vllm._engine(model_state) == "vLLM 0.30.0 with vllm-ascend 0.30.0rc1"
    for layer in model_state.model.moe_layers:
        layer.eplb_state = SimpleNamespace()
    assert vllm._engine(model_state) == "vLLM 0.30.0"


def test_a_release_whose_layers_have_no_such_table_is_left_alone_by_name(model_state):
    del states_of(model_state)[1].expert_replica_routing_table
    with pytest.raises(UnsupportedEngineError, match="no routing table for each layer"):
        vllm._tables_of(model_state, 2)


class EplbState:
    """Plans when an interval is over, as vLLM's."""

    expert_rearrangement_step, expert_rearrangement_step_interval = 7, 10
    plans = 0

    def step(self, is_dummy=False, is_profile=False, log_stats=False):
        self.cleared = True
        self.expert_rearrangement_step += 1
        if self.expert_rearrangement_step >= self.expert_rearrangement_step_interval:
            self.expert_rearrangement_step = 0
            self.plans += 1

    def _should_record_current_step(self, log_stats=False):
        return False


class DerivedState(EplbState):
    """As vllm-ascend's, it does more in each step, and calls vLLM's."""

    def step(self, is_dummy=False, is_profile=False, log_stats=False):
        self.samples = self._should_record_current_step(log_stats=log_stats)
        super().step(is_dummy=is_dummy, is_profile=is_profile, log_stats=log_stats)


@pytest.fixture
def seen(monkeypatch):
    """What the seat of a state with the plugin counts."""
    seen = []
    seat = SimpleNamespace(
        count=lambda counted: seen.append(counted.tolist()),
        on_step=lambda: None,
    )
    for name in ("step", "_should_record_current_step"):  # Put back what the plugin wraps.
        monkeypatch.setattr(EplbState, name, vars(EplbState)[name])
    module = SimpleNamespace(EplbState=EplbState)
    monkeypatch.setitem(sys.modules, "vllm.distributed.eplb.eplb_state", module)
    monkeypatch.setattr(releases, "version", lambda _name: "0.30.0")
    monkeypatch.setattr(vllm, "_take_seat", lambda _state, _settings, _seats: seat)
    vllm.install(None)
    return seen


def derived_state():
    state = DerivedState()
    state.model_states = {"m": SimpleNamespace(expert_load_pass=torch.tensor([[1], [2], [3]]))}
    return state


def test_a_derived_state_is_balanced_through_the_method_that_it_calls(seen):
    state = derived_state()
    state.step()
    assert (seen, state.cleared) == ([[[1], [2], [3]]], True)
    state.step(is_profile=True)
    assert len(seen) == 1
    assert state.samples, "every pass is counted"


def test_the_engines_own_planner_does_not_run_when_its_interval_is_over(seen):
    state = derived_state()
    for _ in range(40):
        state.step()
    assert len(seen) == 40
    assert state.plans == 0
