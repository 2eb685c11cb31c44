"""Each pipeline stage is a pool of its own, whatever the engine counts as its layers."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equipoise.engines import sglang, vllm
from equipoise.engines.errors import UnsupportedEngineError
from equipoise.engines.settings import settings_from
from equipoise.planning.layout import Layout

SETTINGS = settings_from(
    {
        "EQUIPOISE_BALANCER": "127.0.0.1:7070",
        "EQUIPOISE_POOL": "p",
        "EQUIPOISE_LISTEN": "127.0.0.1:0",
        "EQUIPOISE_WORKER": "w",
    }
)
EXPERTS, SLOTS = 4, 6
FIRST = [0, 1, 2, 3, 0, 1]
SECOND = [0, 1, 3, 3, 0, 2]
NUM_ROWS = 8
"""Rows of an engine's tables for the whole model; two of them are of this stage."""


def weights():
    return [torch.zeros(SLOTS // 2, 5), torch.zeros(SLOTS // 2, 1)]


def tables_of(*shape):
    return torch.full((NUM_ROWS, *shape), -7)


def vllm_state(*, stages=2, num_layers=2):
    experts, counts = tables_of(SLOTS), tables_of(EXPERTS)
    experts[:num_layers], counts[:num_layers] = torch.tensor(FIRST), torch.tensor([2, 2, 1, 1])
    parallel = SimpleNamespace(
        eplb_config=SimpleNamespace(
            use_async=False, step_interval=10**9, window_size=1, num_redundant_experts=2
        ),
        enable_elastic_ep=False,
        pipeline_parallel_size=stages,
    )
    state = SimpleNamespace(
        model=SimpleNamespace(expert_weights=[weights() for _ in range(num_layers)]),
        physical_to_logical_map=experts,
        logical_to_physical_map=tables_of(EXPERTS, 16),
        logical_replica_count=counts,
    )
    return SimpleNamespace(parallel_config=parallel, model_states={"m": state}), state


@pytest.fixture
def vllm_groups(monkeypatch):
    groups = SimpleNamespace(
        get_eplb_group=lambda: SimpleNamespace(cpu_group=None, rank_in_group=1, world_size=2),
        get_pp_group=lambda: SimpleNamespace(rank_in_group=1),
    )
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", groups)
    monkeypatch.setattr(vllm, "version", lambda _name: "0.33.0")


def called_by_first_runner(function, *args):
    """Call as the first of vLLM's two model runners does."""
    module = {"__name__": "vllm.v1.worker.gpu_model_runner"}
    exec("def step(function, *args): return function(*args)", module)
    return module["step"](function, *args)


def pool_of(seat):
    return seat._on_ready.__self__._settings.pool


def layout_of(row, *, num_layers=2):
    table = np.asarray([row] * num_layers, dtype=np.int32)
    return Layout(generation=2, num_experts=EXPERTS, num_ranks=2, expert_of_slot=table)


@pytest.mark.parametrize(("stages", "pool"), [(1, "p"), (2, "p-stage1")])
@pytest.mark.usefixtures("vllm_groups")
def test_a_stage_of_vllm_has_the_first_rows_and_a_pool_of_its_own(stages, pool):
    whole, state = vllm_state(stages=stages)
    seat = vllm.make_seat(whole, SETTINGS)
    assert (pool_of(seat), seat.worker) == (pool, "w-1")
    assert seat.model.shape.num_layers == 2
    assert seat.model.expert_of_slot.tolist() == [FIRST] * 2
    seat.model.commit(seat.model.tables(layout_of(SECOND)))
    assert state.physical_to_logical_map[:2].tolist() == [SECOND] * 2
    assert state.logical_replica_count[:2].tolist() == [[2, 1, 1, 2]] * 2
    for table in (
        state.physical_to_logical_map,
        state.logical_to_physical_map,
        state.logical_replica_count,
    ):
        assert (table[2:] == -7).all(), "rows of other stages"


@pytest.mark.usefixtures("vllm_groups")
def test_a_stage_that_vllms_first_runner_does_not_step_is_left_alone_by_name():
    last, _ = vllm_state(stages=2)
    assert pool_of(called_by_first_runner(vllm.make_seat, last, SETTINGS)) == "p-stage1"
    first, _ = vllm_state(stages=3)
    assert pool_of(vllm.make_seat(first, SETTINGS)) == "p-stage1"
    with pytest.raises(UnsupportedEngineError, match="VLLM_USE_V2_MODEL_RUNNER=1"):
        called_by_first_runner(vllm.make_seat, first, SETTINGS)


@pytest.mark.usefixtures("vllm_groups")
def test_a_stage_of_vllm_without_experts_is_left_alone_by_name():
    whole, _ = vllm_state(num_layers=0)
    with pytest.raises(UnsupportedEngineError, match="no experts to balance"):
        vllm.make_seat(whole, SETTINGS)


LAYERS = [5, 7]
"""A dense layer lies between them; SGLang numbers layers over the whole model."""


def sglang_metadata():
    experts, candidates = tables_of(SLOTS), tables_of(EXPERTS, SLOTS)
    experts[LAYERS] = torch.tensor(FIRST)
    return SimpleNamespace(
        num_logical_experts=EXPERTS,
        physical_to_logical_map=experts,
        physical_to_logical_map_cpu=experts.clone(),
        logical_to_all_physical_map=candidates,
        logical_to_all_physical_map_cpu=candidates.clone(),
        logical_to_all_physical_map_num_valid=tables_of(EXPERTS),
        logical_to_rank_dispatch_physical_map=None,
    )


class Bare:
    """A model that does not list its experts."""


def sglang_seat(monkeypatch, metadata, *, stages=2, model=None):
    """The seat, and the ranks that met for its group."""
    location = SimpleNamespace(get_global_expert_location_metadata=lambda: metadata)
    monkeypatch.setitem(sys.modules, "sglang.srt.eplb.expert_location", location)
    monkeypatch.setattr(sglang, "version", lambda _name: "0.5.23")
    monkeypatch.setattr(sglang.dist, "get_world_size", lambda: 2 * stages)
    met = []
    monkeypatch.setattr(sglang.dist, "new_group", lambda ranks, **options: met.append(ranks))
    options = SimpleNamespace(
        eplb_rebalance_num_iterations=10**9,
        ep_num_redundant_experts=2,
        expert_distribution_recorder_buffer_size=1,
        expert_distribution_recorder_mode="stat",
        ep_dispatch_algorithm="dynamic",
    )
    weights_of_layer = {layer: weights() for layer in LAYERS}
    runner = SimpleNamespace(
        server_args=options,
        model=model or SimpleNamespace(routed_experts_weights_of_layer=weights_of_layer),
        moe_ep_rank=1,
        moe_ep_size=2,
        pp_rank=stages - 1,
        pp_size=stages,
    )
    hooks = sglang.Hooks(SETTINGS)
    return hooks, hooks._take_seat(SimpleNamespace(_model_runner=runner)), met


@pytest.mark.parametrize(("stages", "pool", "group"), [(1, "p", [0, 1]), (2, "p-stage1", [2, 3])])
def test_a_stage_of_sglang_has_its_layers_numbers_and_a_pool_of_its_own(
    stages, pool, group, monkeypatch
):
    metadata = sglang_metadata()
    _, seat, met = sglang_seat(monkeypatch, metadata, stages=stages)
    assert (pool_of(seat), seat.worker, met) == (pool, "w-1", [group])
    assert seat.model.counted_rows == LAYERS
    assert seat.model.shape.num_layers == 2
    assert seat.model.expert_of_slot.tolist() == [FIRST] * 2
    seat.model.commit(seat.model.tables(layout_of(SECOND)))
    others = [layer for layer in range(NUM_ROWS) if layer not in LAYERS]
    assert metadata.physical_to_logical_map[LAYERS].tolist() == [SECOND] * 2
    for table in vars(metadata).values():
        if isinstance(table, torch.Tensor):
            assert (table[LAYERS] != -7).all()
            assert (table[others] == -7).all(), "rows of dense layers and of other stages"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Bare(), "--pp-size 1"),
        (SimpleNamespace(routed_experts_weights_of_layer={}), "no experts to balance"),
    ],
)
def test_a_stage_of_sglang_without_a_list_of_experts_is_left_alone_by_name(
    model, reason, monkeypatch
):
    with pytest.raises(UnsupportedEngineError, match=reason):
        sglang_seat(monkeypatch, sglang_metadata(), model=model)
