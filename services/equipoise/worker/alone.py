"""`engine_alone`: an engine that is a whole pool by itself, in whoever's process asks for it.

Owns putting one together without a balancer: every expert lies in a slot of its own, for good.
"""

from collections.abc import Callable
from dataclasses import replace

from equipoise.planning.layout import contiguous_layout
from equipoise.telemetry.loading import Loading
from equipoise.worker.stager import placement_of
from equipoise.worker.core import ModelCore
from equipoise.worker.engine import Engine, StepResult
from equipoise.worker.group import RankGroup
from equipoise.worker.held import HeldExperts
from equipoise.worker.settings import WorkerSettings
from equipoise_model.checkpoint import Checkpoint
from equipoise_model.dispatch import ExpertParallel


def engine_alone(
    settings: WorkerSettings,
    *,
    publish: Callable[[StepResult], None],
    loading: Loading | None = None,
) -> Engine:
    """An engine with all experts of the settings' checkpoint; its `run` is the caller's to call.

    `loading` tells how far it is; the log unless given.

    Raises:
        CheckpointError, UnsupportedConfigError: there is no such checkpoint, or it is of no use.
        WorkerError: it is not made for these settings.
    """
    config = Checkpoint.open(settings.checkpoint).config
    loading = loading or Loading(log_format=settings.log_format)
    core = ModelCore.load(
        replace(settings, slots_per_rank=config.n_routed_experts), loading=loading
    )
    layout = contiguous_layout(
        num_layers=core.shape.num_layers,
        num_experts=core.shape.num_experts,
        num_ranks=1,
        slots_per_rank=core.shape.num_experts,
    )
    with loading.of("experts") as told:
        core.checkpoint.load_slots(core.model, layout.expert_of_slot, progress=told)
    return Engine(
        model=core.model,
        cache=core.cache,
        experts=ExpertParallel.local(config, placement_of(layout), device=core.device),
        held=HeldExperts(core.slots, layout=layout, rank=0),
        group=RankGroup.alone(),
        scheduler=core.scheduler(settings),
        drafter=core.drafter(settings),
        epoch=1,
        names=(settings.worker,),
        publish=publish,
    )
