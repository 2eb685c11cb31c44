"""`ServingModel`: what the models of both data planes have in common."""

from abc import ABC, abstractmethod

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

    @property
    def num_mtp_layers(self) -> int:
        """Multi-token-prediction modules that this model holds."""
        return 0

    @property
    @abstractmethod
    def slots(self) -> list[PhysicalSlots]:
        """This rank's physical slots of every MoE layer."""

    @abstractmethod
    def step(self, batch: StepBatch, cache: LatentCache, experts: ExpertParallel) -> StepOutput:
        """Run one serving step: process a batch's tokens and store their latents in the cache.

        All ranks take every step together. A rank without tokens still computes its slots' experts
        for the other ranks.

        Raises:
            ExchangeError: another rank is gone or stuck, or runs another generation.
        """
