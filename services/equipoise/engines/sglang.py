"""The plugin for SGLang: hooks `EPLBManager.on_forward_pass_end`, called after each pass.

Entry point `sglang.srt.plugins`. While the seat is taken, SGLang's own planner is not called; its
options (`SILENT_PLANNER`) make the recorder count every pass.
"""

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.engines.errors import UnsupportedEngineError
from equipoise.engines.link import EngineLink
from equipoise.engines.lockstep import Lockstep
from equipoise.engines.model import EngineModel
from equipoise.engines.seat import EngineSeat
from equipoise.engines.settings import EngineSettings, settings_from
from equipoise.engines.slots import EngineSlots
from equipoise.engines.tables import replica_tables
from equipoise.planning.layout import Layout
from equipoise.planning.topology import ModelShape
from equipoise.trust.errors import TrustError

SILENT_PLANNER = (
    "--enable-eplb --ep-num-redundant-experts R --ep-dispatch-algorithm dynamic "
    "--expert-distribution-recorder-mode stat --expert-distribution-recorder-buffer-size 1 "
    "--eplb-rebalance-num-iterations 1000000000"
)
"""SGLang's options with which only Equipoise plans."""

MIN_VERSION = (0, 5, 16)
"""Oldest release with plugins and this form of its manager."""

_MANAGER = "sglang.srt.eplb.eplb_manager.EPLBManager"
_ACCUMULATOR = "sglang.srt.eplb.expert_distribution._StatAccumulator"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
_UPDATES = tuple(
    f"{_UPDATER}.SchedulerWeightUpdaterManager.{name}"
    for name in (
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        "end_weight_update",
    )
)
"""What writes weights in place, where a release has it."""
_SILENT_ITERATIONS = 10**8
_GROUP_TIMEOUT = timedelta(seconds=60)

_log = logging.getLogger(__name__)


def register() -> None:
    """Register the hooks, if the environment names a balancer; else change nothing."""
    try:
        settings = settings_from()
        if settings is not None:
            check_seam()
            Hooks(settings).register()
    except UnsupportedEngineError as error:
        _log.error("Equipoise leaves this engine alone: %s", error)


def check_seam() -> None:
    """Check that everything the plugin touches is there.

    Raises:
        UnsupportedEngineError: this release of SGLang differs from those that are supported.
    """
    try:
        release = version("sglang")
        numbers = tuple(int("".join(filter(str.isdigit, part))) for part in release.split(".")[:3])
    except (ImportError, ValueError) as error:
        raise UnsupportedEngineError(f"the version of SGLang is unknown: {error}") from error
    if numbers < MIN_VERSION:
        raise UnsupportedEngineError(
            f"SGLang {release} is too old: install {'.'.join(map(str, MIN_VERSION))} or later"
        )


class Hooks:
    """What SGLang calls in one process; for its engine's thread."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._seat: EngineSeat | None = None
        self._is_decided = False
        self._layers: Sequence[int] = ()
        self._load_LP: Tensor | None = None

    @property
    def seat(self) -> EngineSeat | None:
        """The seat of this process; None before its first pass, or if it cannot be balanced."""
        return self._seat

    def register(self) -> None:
        """Register both hooks; SGLang applies them before it starts."""
        registry = importlib.import_module("sglang.srt.plugins.hook_registry")
        around, after = registry.HookType.AROUND, registry.HookType.AFTER
        registry.HookRegistry.register(f"{_MANAGER}.on_forward_pass_end", self.end_pass, around)
        registry.HookRegistry.register(f"{_ACCUMULATOR}.append", self.take_counts, after)
        if _exists(_UPDATER):
            for update in _UPDATES:
                registry.HookRegistry.register(update, self.note_update, around)

    def take_counts(self, _result: None, _accumulator: Any, *args: Any, **named: Any) -> None:
        """Keep what the recorder counted in this pass, by physical expert."""
        data = named["single_pass_data"] if "single_pass_data" in named else args[2]
        self._load_LP = data["global_physical_count"].to(torch.int64)

    def note_update(self, original: Callable[..., object], *args: Any, **named: Any) -> object:
        """Notice an update of the weights; those by other ways are found by hashing."""
        try:
            return original(*args, **named)
        finally:  # A failed update may have written some weights.
            if self._seat is not None:
                self._seat.note_update()

    def end_pass(self, original: Callable[[Any], None], manager: Any) -> None:
        """Take part after a pass, in place of SGLang's planner."""
        load_LP, self._load_LP = self._load_LP, None
        if not self._is_decided:
            self._is_decided = True
            self._seat = self._seat_or_none(manager)
        if self._seat is None:
            original(manager)
            return
        self._seat.on_step(None if load_LP is None else load_LP[list(self._layers)])

    def _seat_or_none(self, manager: Any) -> EngineSeat | None:
        """Return the seat of this process, or None if its SGLang cannot be balanced."""
        try:
            return self._take_seat(manager)
        except (UnsupportedEngineError, TrustError, ValueError) as error:
            _log.error("Equipoise leaves this engine alone: %s", error)
        except Exception:  # noqa: BLE001 - the engine must serve
            _log.exception(
                "Equipoise leaves this engine alone: the plugin does not fit this release"
            )
        return None

    def _take_seat(self, manager: Any) -> EngineSeat:
        """Return the seat of an `EPLBManager`; all ranks have the same configuration.

        Raises:
            UnsupportedEngineError: its configuration is not supported; names the option.
            TrustError: a certificate or key is unusable.
        """
        location = importlib.import_module("sglang.srt.eplb.expert_location")
        context = importlib.import_module("sglang.srt.runtime_context")
        metadata = location.get_global_expert_location_metadata()
        _check(_options(context, manager), int(metadata.ep_size))
        link = EngineLink(self._settings)
        weights = manager._get_model().routed_experts_weights_of_layer  # noqa: SLF001
        self._layers = sorted(weights)
        slots = [EngineSlots(list(weights[layer])) for layer in self._layers]
        table = metadata.physical_to_logical_map_cpu[list(self._layers)]
        ranks, rank = int(metadata.ep_size), int(context.get_parallel().moe_ep_rank)
        group = dist.new_group(list(range(ranks)), backend="gloo", timeout=_GROUP_TIMEOUT)
        tables, commit = _tables_of(metadata, self._layers, rank=rank)
        return EngineSeat(
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
                tables=tables,
                commit=commit,
                max_replicas=int(metadata.physical_to_logical_map.shape[1]),
            ),
            Lockstep(group, rank=rank, num_ranks=ranks),
            worker=self._settings.worker_of(rank),
            on_ready=link.start,
        )


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _options(context: Any, manager: Any) -> Any:
    """Return SGLang's options for experts, which a manager of an older release has itself.

    Raises:
        UnsupportedEngineError: this release has them elsewhere.
    """
    options = getattr(manager, "_server_args", None)
    if hasattr(context, "get_exec"):
        options = context.get_exec().moe
    if options is None or not hasattr(manager, "_get_model"):
        raise UnsupportedEngineError("its EPLBManager is unknown: install 0.5.16 or later")
    return options


def _check(moe: Any, ranks: int) -> None:
    size = dist.get_world_size()
    problems = (
        (
            moe.eplb_rebalance_num_iterations < _SILENT_ITERATIONS
            or moe.expert_distribution_recorder_buffer_size != 1,
            f"SGLang's own planner is active: start it with {SILENT_PLANNER}",
        ),
        (
            moe.ep_dispatch_algorithm == "lp",
            "--ep-dispatch-algorithm lp chooses replicas by a plan of its own: use dynamic",
        ),
        (
            ranks != size,
            f"only {ranks} of {size} ranks share experts: set --ep-size {size}",
        ),
    )
    for is_wrong, remedy in problems:
        if is_wrong:
            raise UnsupportedEngineError(remedy)


def _tables_of(
    metadata: Any, layers: Sequence[int], *, rank: int
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
            static = _static_table(slots, ranks=layout.num_ranks, num_slots=num_slots, rank=rank)
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


def _static_table(slots: Tensor, *, ranks: int, num_slots: int, rank: int) -> Tensor:
    """Return a rank's static dispatch table, by SGLang's own function."""
    location = importlib.import_module("sglang.srt.eplb.expert_location")
    make = location.compute_logical_to_rank_dispatch_physical_map
    named: dict[str, Any] = {}
    if "server_args" in inspect.signature(make).parameters:  # In older releases.
        context = importlib.import_module("sglang.srt.runtime_context")
        named["server_args"] = context.get_server_args()
    table: Tensor = make(
        logical_to_all_physical_map=slots,
        ep_size=ranks,
        num_physical_experts=num_slots,
        ep_rank=rank,
        **named,
    )
    return table
