"""`ModelCore`: the model and its checkpoint, loaded as far as they can be without a rank."""

from dataclasses import dataclass
from typing import Self

import torch

from equipoise.planning.topology import ModelShape
from equipoise.worker.errors import WorkerError
from equipoise.worker.settings import WorkerSettings
from equipoise_kernels.row_invariance import RowVarianceError
from equipoise_model.checkpoint import Checkpoint, CheckpointError
from equipoise_model.config import UnsupportedConfigError
from equipoise_model.experts import ExpertSlots
from equipoise_model.latent_cache import LatentCache
from equipoise_model.row_invariance import verify_rows
from equipoise_model.transformer import Transformer

ROW_BLOCK = 16
"""Rows of every product in batch-invariant mode."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelCore:
    """Everything that is the same on whichever rank this worker becomes."""

    checkpoint: Checkpoint
    model: Transformer
    cache: LatentCache

    @classmethod
    def load(cls, settings: WorkerSettings) -> Self:
        """Open the checkpoint and load all but the routed experts, whose slots wait for a layout.

        Raises:
            WorkerError: the checkpoint is missing, damaged or not made for these settings, or this
                machine cannot compute batch-invariantly.
        """
        try:
            checkpoint = Checkpoint.open(settings.checkpoint)
        except (CheckpointError, UnsupportedConfigError) as error:
            raise WorkerError(f"checkpoint {settings.checkpoint}: {error}") from error
        config = checkpoint.config
        if settings.context_length > config.max_position_embeddings:
            raise WorkerError(
                f"context_length {settings.context_length} is more than the model's "
                f"{config.max_position_embeddings} positions: choose at most that"
            )
        model = Transformer(
            config,
            num_slots=settings.slots_per_rank,
            row_block=ROW_BLOCK if settings.batch_invariant else None,
        )
        checkpoint.load_dense(model)
        cache = LatentCache(config, num_rows=settings.max_requests, max_len=settings.context_length)
        if settings.batch_invariant:
            try:
                verify_rows(model, cache)
            except RowVarianceError as error:
                raise WorkerError(str(error)) from error
        return cls(checkpoint=checkpoint, model=model.eval(), cache=cache)

    @property
    def slots(self) -> list[ExpertSlots]:
        """This rank's physical slots, layer by layer."""
        return [layer.experts for layer in self.model.moe_layers]

    @property
    def shape(self) -> ModelShape:
        """What all workers of a pool must agree on."""
        config = self.checkpoint.config
        return ModelShape(
            num_layers=config.num_moe_layers,
            num_experts=config.n_routed_experts,
            num_groups=config.n_group,
            expert_bytes=config.expert_bytes,
        )


def single_threaded() -> None:
    """Compute on one thread: ranks share few cores, and more threads would wait for each other."""
    torch.set_num_threads(1)
