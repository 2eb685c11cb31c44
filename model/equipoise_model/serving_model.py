"""`ServingModel`: what the models of both data planes have in common."""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from equipoise_model.config import ModelConfig
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.experts import PhysicalSlots
from equipoise_model.latent_cache import LatentCache
from equipoise_model.step import StepBatch, StepOutput


class ServingModel(nn.Module, ABC):
    """A model that serves; `plain.transformer` and `fp8.transformer` implement it."""

    config: ModelConfig
    """Sizes, and how the weights are stored."""
    layers: nn.ModuleList
    """The blocks, each with attention `self_attn` and feed-forward `mlp`."""

    @property
    def num_mtp_layers(self) -> int:
        """Multi-token-prediction modules that this model holds."""
        return 0

    @property
    def moe_layers(self) -> list[Any]:
        """The MoE parts in order; their index is the `layer` of layouts and counters."""
        return [block.mlp for block in self.layers if hasattr(block.mlp, "experts")]

    @property
    def slots(self) -> list[PhysicalSlots]:
        """This rank's physical slots of every MoE layer."""
        return [moe.experts for moe in self.moe_layers]

    @abstractmethod
    def step(self, batch: StepBatch, cache: LatentCache, experts: ExpertParallel) -> StepOutput:
        """Run one serving step: process a batch's tokens and store their latents in the cache.

        All ranks take every step together. A rank without tokens still computes its slots' experts
        for the other ranks.

        Raises:
            ExchangeError: another rank is gone or stuck, or runs another generation.
        """
