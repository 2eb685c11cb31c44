"""The plugin for SGLang: hooks `EPLBManager.on_forward_pass_end`, called after each pass.

Entry point `sglang.srt.plugins`. While the seat is taken, SGLang's own planner is not called; its
options (`SILENT_PLANNER`) make the recorder count every pass.
"""

import importlib
import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
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

SILENT_PLANNER = (
    "--enable-eplb --ep-num-redundant-experts R --ep-dispatch-algorithm dynamic "
    "--expert-distribution-recorder-mode stat --expert-distribution-recorder-buffer-size 1 "
    "--eplb-rebalance-num-iterations 1000000000"
)
"""SGLang's options with which only Equipoise plans."""

OLDEST, NEWEST = "0.5.11", "0.5.23"
"""The oldest release with plugins, and the newest that was tested."""

_FORWARD_END = "sglang.srt.eplb.eplb_manager.EPLBManager.on_forward_pass_end"
_COUNTS = "sglang.srt.eplb.expert_distribution._StatAccumulator.append"
_UPDATERS = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",
    "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin",
)
"""Where releases have the methods that write weights in place: since 0.5.13, before."""
_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)
"""Those methods; older releases lack some."""
_RELEASE, _RESTORE = "release_memory_occupation", "resume_memory_occupation"
"""Methods of the same classes that release memory, and bring it back."""
_SILENT_ITERATIONS = 10**8
_COUNTING_MODES = ("stat", "stat_approx")
"""Of the recorder: those with which `_StatAccumulator` counts."""
_GROUP_TIMEOUT = timedelta(seconds=60)

_log = logging.getLogger(__name__)


def register() -> None:
    """Register the hooks as the environment says; if they cannot be, the log says why."""
    log_by("")  # SGLang sets up the root logger.
    attempt(_register)


def _register() -> None:
    settings = settings_from()
    release = check_release("SGLang", "sglang", oldest=OLDEST, newest=NEWEST)
    for hooked in (_FORWARD_END, _COUNTS):  # SGLang would go on with one hook, and count nothing.
        try:
            pkgutil.resolve_name(hooked)
        except (ImportError, AttributeError) as error:
            raise UnsupportedEngineError(
                f"SGLang {release} has no {hooked}: install {NEWEST}"
            ) from error
    Hooks(settings).register()
    _log.info(LOADED, settings.pool, SILENT_PLANNER)


class Hooks:
    """What SGLang calls in one process; for its engine's thread."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._seat: EngineSeat | None = None
        self._is_decided = False

    @property
    def seat(self) -> EngineSeat | None:
        """The seat of this process; None before its first pass, or if it cannot be balanced."""
        return self._seat

    def register(self) -> None:
        """Register both hooks; SGLang applies them before it starts."""
        registry = importlib.import_module("sglang.srt.plugins.hook_registry")
        around, after = registry.HookType.AROUND, registry.HookType.AFTER
        registry.HookRegistry.register(_FORWARD_END, self.end_pass, around)
        registry.HookRegistry.register(_COUNTS, self.take_counts, after)
        for name, hook in (
            *((name, self.note_update) for name in _UPDATES),
            (_RELEASE, self.note_release),
            (_RESTORE, self.note_restore),
        ):
            for place in _places_of(name):
                registry.HookRegistry.register(place, hook, around)

    def take_counts(self, _result: None, _accumulator: Any, *args: Any, **named: Any) -> None:
        """Count what the recorder counted in this pass, by physical expert; it clears that next."""
        if self._seat is not None:
            data = named["single_pass_data"] if "single_pass_data" in named else args[2]
            self._seat.count(data["global_physical_count"])

    def note_update(self, original: Callable[..., object], *args: Any, **named: Any) -> object:
        """Notice an update of the weights; those by other ways are found by hashing."""
        try:
            return original(*args, **named)
        finally:  # A failed update may have written some weights.
            if self._seat is not None:
                self._seat.note_update()

    def note_release(
        self, original: Callable[..., object], updater: Any, request: Any, *args: Any
    ) -> object:
        """Let nobody read weights whose memory is about to be released."""
        if self._seat is not None:
            self._seat.note_release(request.tags)
        return original(updater, request, *args)

    def note_restore(
        self, original: Callable[..., object], updater: Any, request: Any, *args: Any
    ) -> object:
        """Notice that the memory of the weights is back."""
        returned = original(updater, request, *args)  # If it fails, nobody reads.
        if self._seat is not None:
            self._seat.note_restore(request.tags)
        return returned

    def end_pass(self, original: Callable[[Any], None], manager: Any) -> None:
        """Take part after a pass, in place of SGLang's planner."""
        if not self._is_decided:
            self._is_decided = True
            self._seat = attempt(lambda: self._take_seat(manager))
        if self._seat is None:
            original(manager)
            return
        self._seat.on_step()

    def _take_seat(self, manager: Any) -> EngineSeat:
        """Return the seat of an `EPLBManager`; all ranks have the same configuration.

        Raises:
            UnsupportedEngineError: its configuration is not supported; names the option.
        """
        location = importlib.import_module("sglang.srt.eplb.expert_location")
        metadata = location.get_global_expert_location_metadata()
        options, model, parallel = _places(manager)
        _check(options, parallel)
        ranks, rank = int(parallel.moe_ep_size), int(parallel.moe_ep_rank)
        settings = self._settings.of_stage(int(parallel.pp_rank), int(parallel.pp_size))
        weights = _weights_of_layer(model)
        # Numbered over the whole model, dense layers and other pipeline stages included.
        layers = sorted(weights)
        slots = [EngineSlots(list(weights[layer])) for layer in layers]
        table = metadata.physical_to_logical_map_cpu[layers]
        tables, commit = _tables_of(metadata, layers, rank=rank, options=options)
        return take_seat(
            EngineModel(
                engine=f"SGLang {version('sglang')}",
                shape=ModelShape(
                    num_layers=len(slots),
                    num_experts=int(metadata.num_logical_experts),
                    num_groups=1,
                    expert_bytes=slots[0].expert_bytes,
                ),
                expert_of_slot=table.numpy().astype(np.int32),
                slots=slots,
                tables=while_in_use(tables, slots, model),
                commit=commit,
                max_replicas=int(metadata.physical_to_logical_map.shape[1]),
                counted_rows=layers,
            ),
            Lockstep(_group_of(parallel), rank=rank, num_ranks=ranks),
            settings,
        )


def _places_of(name: str) -> Iterator[str]:
    """Where this release has a method of its updater of weights."""
    for updater in _UPDATERS:
        try:
            found = pkgutil.resolve_name(updater)
        except (ImportError, AttributeError):
            continue
        if hasattr(found, name):
            yield f"{updater}.{name}"


class _Places(NamedTuple):
    """What releases of SGLang keep in different places."""

    options: Any
    """The options for experts."""
    model: Any
    parallel: Any
    """This process's place, as `moe_ep_rank` of `moe_ep_size`, and `pp_rank` of `pp_size`."""


def _places(manager: Any) -> _Places:
    """Return what an `EPLBManager` works with.

    Raises:
        UnsupportedEngineError: this release has it elsewhere.
    """
    runner = getattr(manager, "_model_runner", None)
    if runner is not None:  # Before 0.5.16.
        return _Places(runner.server_args, runner.model, runner)
    context = importlib.import_module("sglang.srt.runtime_context")
    options = getattr(manager, "_server_args", None)
    if options is None and hasattr(context, "get_exec"):  # Since 0.5.19.
        options = context.get_exec().moe
    if options is None or not hasattr(manager, "_get_model"):
        raise UnsupportedEngineError("its EPLBManager is unknown: install 0.5.23")
    return _Places(options, manager._get_model(), context.get_parallel())  # noqa: SLF001


def _weights_of_layer(model: Any) -> Mapping[int, Sequence[Tensor]]:
    """Return the tensors of each MoE layer of this process's stage.

    Raises:
        UnsupportedEngineError: there are none, or the model does not list them.
    """
    try:
        weights: Mapping[int, Sequence[Tensor]] = model.routed_experts_weights_of_layer
    except AttributeError as error:
        raise UnsupportedEngineError(
            "the model does not list its experts, as most do not in a pipeline: set --pp-size 1, "
            "or serve a model that SGLang's own EPLB supports"
        ) from error
    if not weights:
        raise UnsupportedEngineError("this pipeline stage has no experts to balance")
    return weights


def _group_of(parallel: Any) -> dist.ProcessGroup:
    """Return a CPU group of the stage's ranks.

    Only these meet for it: the first stage must not wait for one that needs its activations.
    """
    ranks, stage = int(parallel.moe_ep_size), int(parallel.pp_rank)
    group: dist.ProcessGroup = dist.new_group(
        list(range(stage * ranks, (stage + 1) * ranks)),
        backend="gloo",
        timeout=_GROUP_TIMEOUT,
        use_local_synchronization=True,
    )
    return group


def _check(options: Any, parallel: Any) -> None:
    size = dist.get_world_size() // int(parallel.pp_size)
    silent = SILENT_PLANNER.replace(" R ", f" {options.ep_num_redundant_experts} ")
    problems = (
        (
            options.eplb_rebalance_num_iterations < _SILENT_ITERATIONS
            or options.expert_distribution_recorder_buffer_size != 1,
            f"SGLang's own planner is active: start it with {silent}",
        ),
        (
            options.expert_distribution_recorder_mode not in _COUNTING_MODES,
            "--expert-distribution-recorder-mode counts no loads: use stat",
        ),
        (
            options.ep_dispatch_algorithm == "lp",
            "--ep-dispatch-algorithm lp chooses replicas by a plan of its own: use dynamic",
        ),
        (
            getattr(options, "elastic_ep_backend", None) is not None,
            "elastic EP is on: remove --elastic-ep-backend",
        ),
        (
            parallel.moe_ep_size != size,
            f"only {parallel.moe_ep_size} of {size} ranks share experts: set --ep-size {size}",
        ),
    )
    for is_wrong, remedy in problems:
        if is_wrong:
            raise UnsupportedEngineError(remedy)


def _tables_of(
    metadata: Any, layers: Sequence[int], *, rank: int, options: Any
) -> tuple[Callable[[Layout], list[tuple[Tensor, Tensor]]], Callable[[Any], None]]:
    """Return what makes SGLang's tables, and what copies them into place.

    Each logical expert keeps all its replicas as candidates. SGLang makes these tables in Python,
    with a device read for each entry, and as wide as the pool has slots; only as many columns as
    the most replicas are copied. Its own function makes the static dispatch table.
    """
    rows = torch.tensor(list(layers))
    candidates = (metadata.logical_to_all_physical_map, metadata.logical_to_all_physical_map_cpu)
    used = candidates[0].shape[2]

    def tables(layout: Layout) -> list[tuple[Tensor, Tensor]]:
        num_slots = layout.num_slots
        made = replica_tables(layout, max_replicas=num_slots)
        slots, experts = torch.from_numpy(made.slots_of_expert), torch.from_numpy(made[0])
        counts = torch.from_numpy(made.replica_count)
        pairs = [
            *((table, slots) for table in candidates),
            (metadata.physical_to_logical_map, experts),
            (metadata.physical_to_logical_map_cpu, experts),
            (metadata.logical_to_all_physical_map_num_valid, counts),
        ]
        if metadata.logical_to_rank_dispatch_physical_map is not None:
            static = _static_table(slots, layout=layout, rank=rank, options=options)
            pairs.append((metadata.logical_to_rank_dispatch_physical_map, static))
        return [(table, values.to(table)) for table, values in pairs]

    places = (*candidates, metadata.physical_to_logical_map, metadata.physical_to_logical_map_cpu)
    indices = {table.device: rows.to(table.device) for table in places}

    def commit(made: list[tuple[Tensor, Tensor]]) -> None:
        nonlocal used
        most = made[0][1].shape[2]
        for table in candidates:
            table[:, :, most:used].index_fill_(0, indices[table.device], -1)
        for table, values in made:
            place = table[:, :, :most] if values.ndim > 2 else table
            place.index_copy_(0, indices[table.device], values)
        used = most

    return tables, commit


def _static_table(slots: Tensor, *, layout: Layout, rank: int, options: Any) -> Tensor:
    """Return a rank's static dispatch table, by SGLang's own function."""
    location = importlib.import_module("sglang.srt.eplb.expert_location")
    make = location.compute_logical_to_rank_dispatch_physical_map
    named: dict[str, Any] = {}
    if "server_args" in inspect.signature(make).parameters:  # Before 0.5.18.
        named["server_args"] = options
    table: Tensor = make(
        logical_to_all_physical_map=slots,
        ep_size=layout.num_ranks,
        num_physical_experts=layout.num_slots,
        ep_rank=rank,
        **named,
    )
    return table
