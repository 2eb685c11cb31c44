"""`engine_alone`: an engine that is a whole pool by itself, without a balancer.

It runs in the caller's process; every expert has a slot of its own.
"""

from collections.abc import Callable
from dataclasses import replace

from equipoise.planning.layout import contiguous_layout
from equipoise.telemetry.histogram import SHORT_S, Histogram
from equipoise.telemetry.loading import Loading
from equipoise.worker.core import ModelCore
from equipoise.worker.engine import Engine, StepResult
from equipoise.worker.group import RankGroup
from equipoise.worker.placement import HeldSlots, placement_of
from equipoise.worker.settings import WorkerSettings
from equipoise_model.checkpoint import Checkpoint
from equipoise_model.dispatch import ExpertParallel


def engine_alone(
    settings: WorkerSettings,
    *,
    publish: Callable[[StepResult], None],
    loading: Loading | None = None,
) -> Engine:
    """Return an engine that holds all experts of the settings' checkpoint; the caller runs it.

    `loading` reports progress; to the log by default.

    Raises:
        CheckpointError, UnsupportedConfigError: the checkpoint is missing, damaged or unsupported.
        WorkerError: the checkpoint does not fit the settings.
    """
    config = Checkpoint.open(settings.checkpoint, shared_as_routed=settings.shared_as_routed).config
    loading = loading or Loading(log_format=settings.log_format)
    core = ModelCore.load(
        replace(settings, slots_per_rank=config.num_placed_experts, places=0), loading=loading
    )
    layout = contiguous_layout(
        num_layers=core.shape.num_layers,
        num_experts=core.shape.num_experts,
        num_ranks=1,
        slots_per_rank=core.shape.num_experts,
    )
    with loading.of("experts") as report:
        core.checkpoint.load_slots(core.model, layout.expert_of_slot, progress=report)
    return Engine(
        core=core,
        experts=ExpertParallel.local(config, placement_of(layout), device=core.device),
        held=HeldSlots(
            core.slots,
            layout=layout,
            rank=0,
            tables=lambda other: placement_of(other).to(core.device),
        ),
        group=RankGroup.alone(settings.worker),
        scheduler=core.scheduler(settings),
        drafter=core.drafter(settings),
        publish=publish,
        step_s=Histogram(SHORT_S),
    )
