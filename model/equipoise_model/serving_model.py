"""`ServingModel`: what the models of both data planes have in common."""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from equipoise_model.config import ModelConfig
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.experts import PhysicalSlots
from equipoise_model.latent_cache import LatentCache
from equipoise_model.plain.layers import Linear
from equipoise_model.step import StepBatch, StepOutput


class ServingModel(nn.Module, ABC):
    """A model that serves; `plain.transformer` and `fp8.transformer` implement it."""

    config: ModelConfig
    """Sizes, and how the weights are stored."""
    layers: nn.ModuleList
    """The blocks, each with attention `self_attn` and feed-forward `mlp`."""
    mtp_layers: nn.ModuleList
    """Multi-token-prediction modules, each a block with more around it; may be empty."""
    lm_head: Linear
    """Hidden states to logits, of the model and of its modules."""

    @property
    def num_mtp_layers(self) -> int:
        """Multi-token-prediction modules that this model holds."""
        return len(self.mtp_layers)

    @property
    def moe_layers(self) -> list[Any]:
        """The MoE parts in order, the modules' last; their index is the `layer` of layouts."""
        blocks = [*self.layers, *self.mtp_layers]
        return [block.mlp for block in blocks if hasattr(block.mlp, "experts")]

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
