"""The plugin for vLLM: wraps `EplbState.step`, which vLLM calls after each pass on all EP ranks.

Entry point `vllm.general_plugins`. vLLM keeps its slots, tables and kernels; its own planner must
be silent, by the options that `SILENT_PLANNER` names. vllm-ascend's state derives from vLLM's.
"""

import copy
import functools
import importlib
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.engines.errors import UnsupportedEngineError, attempt
from equipoise.engines.lockstep import Lockstep
from equipoise.engines.logs import LOADED, log_by
from equipoise.engines.model import EngineModel
from equipoise.engines.releases import check_release
from equipoise.engines.seat import EngineSeat
from equipoise.engines.seating import take_seat
from equipoise.engines.settings import EngineSettings, settings_from
from equipoise.engines.slots import EngineSlots, while_in_use
from equipoise.engines.tables import replica_tables
from equipoise.planning.layout import Layout
from equipoise.planning.topology import ModelShape
from equipoise.rank.errors import StageRejectedError

SILENT_PLANNER = (
    '--enable-eplb --eplb-config \'{"num_redundant_experts": R, "window_size": 1, '
    '"step_interval": 1000000000, "use_async": false}\''
)
"""vLLM's options with which only Equipoise plans."""

OLDEST, NEWEST = "0.20", "0.33.0"
"""The oldest release with this seam, and the newest that was tested."""

_STEP = ("self", "is_dummy", "is_profile", "log_stats")
_SILENT_INTERVAL = 10**8
_FIRST_RUNNER = "vllm.v1.worker.gpu_model_runner"
_WORKERS = "vllm.v1.worker.worker_base"
_SEAT = "equipoise_seat"
"""Attribute of an `EplbState` that has one."""
_UPDATES = ("reload_weights", "update_weights", "finish_weight_update")
"""Methods of workers that write weights in place; older releases have the first only."""
_SLEEP, _WAKE = "sleep", "wake_up"
"""Methods of workers that release the memory of weights, and bring it back."""

_log = logging.getLogger(__name__)


def register() -> None:
    """Wrap `EplbState.step` as the environment says; if it cannot be, the log says why."""
    log_by("vllm")
    attempt(_register)


def _register() -> None:
    settings = settings_from()
    install(settings)
    _log.info(LOADED, settings.pool, SILENT_PLANNER)


def install(settings: EngineSettings) -> None:
    """Wrap `EplbState.step` once.

    Raises:
        UnsupportedEngineError: this release of vLLM differs from those that are supported.
    """
    state = importlib.import_module("vllm.distributed.eplb.eplb_state").EplbState
    if hasattr(state.step, "equipoise"):
        return
    check_seam(state)
    original = state.step
    original_record = state._should_record_current_step  # noqa: SLF001 - no public name
    seats: list[EngineSeat] = []

    @functools.wraps(original)
    def step(
        self: Any, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False
    ) -> None:
        if is_profile:
            original(self, is_dummy, is_profile, log_stats)
            return
        if not hasattr(self, _SEAT):
            setattr(self, _SEAT, _take_seat(self, settings, seats))
        seat: EngineSeat | None = getattr(self, _SEAT)
        if seat is None:
            original(self, is_dummy, is_profile, log_stats)
            return
        if not is_dummy:  # vLLM clears its counters next.
            (model_state,) = self.model_states.values()
            seat.count(model_state.expert_load_pass)
        # Its planner would run when the interval is over: after a month of fast passes.
        if self.expert_rearrangement_step + 1 >= self.expert_rearrangement_step_interval:
            self.expert_rearrangement_step = 0
        original(self, is_dummy, is_profile, log_stats)
        seat.on_step()

    def should_record(self: Any, log_stats: bool = False) -> bool:
        """Count in every pass while this state is balanced from outside."""
        return getattr(self, _SEAT, None) is not None or original_record(self, log_stats)

    vars(step)["equipoise"] = seats
    state.step = step
    state._should_record_current_step = should_record  # noqa: SLF001 - no public name


def _watch_weights(seats: Sequence[EngineSeat]) -> None:
    """Notice at once what workers do to the weights; updates by other ways are found by hashing.

    Each platform has a worker of its own.
    """
    base = getattr(sys.modules.get(_WORKERS), "WorkerBase", None)
    workers = [] if base is None else list(_with_subclasses(base))
    for worker in workers:
        for name in (*_UPDATES, _SLEEP, _WAKE):
            original = getattr(worker, name, None)
            if original is not None and not hasattr(original, "equipoise"):
                setattr(worker, name, _noticed(name, original, seats))
    if not any(hasattr(worker, name) for worker in workers for name in _UPDATES):
        _log.warning(
            "vLLM's worker has none of %s: updates of the weights are noticed late",
            ", ".join(_UPDATES),
        )


def _with_subclasses(base: type[Any]) -> Iterator[type[Any]]:
    yield base
    for one in base.__subclasses__():
        yield from _with_subclasses(one)


def _noticed(
    name: str, original: Callable[..., object], seats: Sequence[EngineSeat]
) -> Callable[..., object]:
    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> object:
        if name in _UPDATES:
            try:
                return original(*args, **named)
            finally:  # A failed update may have written some weights.
                for seat in seats:
                    seat.note_update()
        if name == _SLEEP:
            for seat in seats:
                seat.note_release()
        returned = original(*args, **named)  # If it fails, it is unknown what is in memory.
        if name == _WAKE:
            for seat in seats:
                seat.note_restore(named.get("tags", args[1] if len(args) > 1 else None))
        return returned

    vars(call)["equipoise"] = seats
    return call


def check_seam(state: type) -> None:
    """Check that everything the plugin touches is there.

    Raises:
        UnsupportedEngineError: this release of vLLM differs from those that are supported.
    """
    release = check_release("vLLM", "vllm", oldest=OLDEST, newest=NEWEST)
    found = tuple(inspect.signature(getattr(state, "step", lambda: None)).parameters)
    if found != _STEP or not hasattr(state, "_should_record_current_step"):
        raise UnsupportedEngineError(
            f"EplbState.step of vLLM {release} takes {found}, not {_STEP}: install another release"
        )


def _take_seat(state: Any, settings: EngineSettings, seats: list[EngineSeat]) -> EngineSeat | None:
    """Return the seat of an engine, among the `seats` from now on; None if it cannot be balanced.

    All ranks have the same configuration, so all or none have a seat.
    """
    seat = attempt(lambda: make_seat(state, settings))
    if seat is not None:
        seats.append(seat)
        _watch_weights(seats)
    return seat


def make_seat(state: Any, settings: EngineSettings) -> EngineSeat:
    """Return the seat of an `EplbState` whose planner is silent.

    Raises:
        UnsupportedEngineError: its configuration is not supported; names the option.
    """
    parallel = state.parallel_config
    _check(parallel, num_models=len(state.model_states))
    (model_state,) = state.model_states.values()
    groups = importlib.import_module("vllm.distributed.parallel_state")
    group, stages = groups.get_eplb_group(), getattr(parallel, "pipeline_parallel_size", 1)
    if stages > 1:
        stage = int(groups.get_pp_group().rank_in_group)
        if stage + 1 < stages and _is_called_by(_FIRST_RUNNER):
            raise UnsupportedEngineError(
                "vLLM's first model runner counts no passes in the stages before the last: set "
                "VLLM_USE_V2_MODEL_RUNNER=1"
            )
        settings = settings.of_stage(stage, stages)
    lockstep = Lockstep(group.cpu_group, rank=group.rank_in_group, num_ranks=group.world_size)
    # Only the MoE layers of this stage, numbered from 0; tables may have rows for the whole model.
    slots = [EngineSlots(list(tensors)) for tensors in model_state.model.expert_weights]
    if not slots:
        raise UnsupportedEngineError("this pipeline stage has no experts to balance")
    table = model_state.physical_to_logical_map[: len(slots)].cpu().numpy().astype(np.int32)
    num_experts = int(model_state.logical_replica_count.shape[1])
    num_groups = int(getattr(model_state.model, "num_expert_groups", None) or 1)
    tables, commit = _tables_of(model_state, len(slots))
    return take_seat(
        EngineModel(
            engine=_engine(model_state),
            shape=ModelShape(
                num_layers=len(slots),
                num_experts=num_experts,
                num_groups=1 if num_experts % num_groups else num_groups,
                expert_bytes=slots[0].expert_bytes,
            ),
            expert_of_slot=table,
            slots=slots,
            tables=while_in_use(tables, slots, model_state.model),
            commit=commit,
            max_replicas=int(model_state.logical_to_physical_map.shape[2]),
            counted_rows=range(len(slots)),
        ),
        lockstep,
        settings,
    )


def _check(parallel: Any, *, num_models: int) -> None:
    eplb = parallel.eplb_config
    silent = SILENT_PLANNER.replace(" R,", f" {eplb.num_redundant_experts},")
    problems = (
        (num_models != 1, "it has a draft model with experts: start it without one"),
        (
            getattr(parallel, "enable_elastic_ep", False),
            "elastic EP is on: remove --enable-elastic-ep",
        ),
        (
            eplb.use_async or eplb.step_interval < _SILENT_INTERVAL or eplb.window_size != 1,
            f"vLLM's own planner is active: start it with {silent}",
        ),
    )
    for is_wrong, remedy in problems:
        if is_wrong:
            raise UnsupportedEngineError(remedy)


def _is_called_by(module: str) -> bool:
    """Whether a function of a module is on this thread's stack."""
    return any(frame.f_globals.get("__name__") == module for frame, _ in traceback.walk_stack(None))


def _engine(model_state: Any) -> str:
    own = f"vLLM {version('vllm')}"
    is_ascend = any(map(_is_ascend, _layer_states(model_state)))
    return f"{own} with vllm-ascend {version('vllm-ascend')}" if is_ascend else own


def _layer_states(model_state: Any) -> list[Any]:
    """What each MoE layer reads of the tables, by layer; None if a release keeps it elsewhere."""
    layers = getattr(model_state.model, "moe_layers", ())
    return [getattr(layer, "eplb_state", None) for layer in layers]


def _is_ascend(layer_state: Any) -> bool:
    return type(layer_state).__module__.startswith("vllm_ascend.")


def _tables_of(
    model_state: Any, num_layers: int
) -> tuple[Callable[[Layout], list[Tensor]], Callable[[list[Tensor]], None]]:
    """Return what makes the tables of a layout, and what copies them into place.

    vLLM's own commit makes its three in Python on the engine's thread and copies all 1024 columns;
    only as many as the most replicas are ever read. vllm-ascend has one more for each layer.
    """
    slot_of = model_state.logical_to_physical_map[:num_layers]
    expert_of = model_state.physical_to_logical_map[:num_layers]
    count = model_state.logical_replica_count[:num_layers]
    layer_states = _layer_states(model_state)
    ascend = layer_states if any(map(_is_ascend, layer_states)) else []
    routing = _routing_tables(ascend)
    used = int(count.max())

    def tables(layout: Layout) -> list[Tensor]:
        made = replica_tables(layout, max_replicas=slot_of.shape[2])
        pairs = zip(made, (expert_of, slot_of, count), strict=True)
        cast = [torch.from_numpy(table).to(like.dtype) for table, like in pairs]
        cast += _routes(ascend, slots=cast[1], counts=cast[2])
        return cast if expert_of.device.type == "cpu" else [one.pin_memory() for one in cast]

    def commit(made: list[Tensor]) -> None:
        nonlocal used
        experts, slots, counts, *routes = made
        most = slots.shape[2]
        expert_of.copy_(experts, non_blocking=True)
        slot_of[:, :, :most].copy_(slots, non_blocking=True)
        slot_of[:, :, most:used].fill_(-1)
        count.copy_(counts, non_blocking=True)
        for table, rows in zip(routing, routes, strict=True):
            table.copy_(rows, non_blocking=True)
        used = most

    return tables, commit


def _routing_tables(layer_states: Sequence[Any]) -> list[Tensor]:
    """Return the tables that vllm-ascend's kernels read, which its graphs keep the addresses of.

    Raises:
        UnsupportedEngineError: this release has none, or has them elsewhere.
    """
    tables = []
    for state in layer_states:
        table = getattr(state, "expert_replica_routing_table", None)
        if not isinstance(table, Tensor) or not hasattr(
            state, "refresh_expert_replica_routing_table"
        ):
            raise UnsupportedEngineError(
                "this release of vllm-ascend has no routing table for each layer: install another "
                "one"
            )
        tables.append(table)
    return tables


def _routes(layer_states: Sequence[Any], *, slots: Tensor, counts: Tensor) -> list[Tensor]:
    """Make routing tables of vLLM's tables, on the host and by vllm-ascend's own method.

    Raises:
        StageRejectedError: it made a table of another shape than the one in use.
    """
    made = []
    for layer, state in enumerate(layer_states):
        # A copy: the state in use must not change before the switch.
        draft = copy.copy(state)
        draft.logical_to_physical_map, draft.logical_replica_count = slots[layer], counts[layer]
        draft.expert_replica_routing_table = None
        draft.refresh_expert_replica_routing_table()
        made.append(draft.expert_replica_routing_table)
        if made[-1].shape != state.expert_replica_routing_table.shape:
            raise StageRejectedError(
                f"vllm-ascend's routing table of layer {layer} has another shape for this layout"
            )
    return made
