"""`MultiTokenPrediction`: predicts one token further (arXiv 2412.19437, section 2.2).

The embedding and the output head are the main model's; the module has its own norms, projection and
block. A checkpoint stores it as one more layer after the main model's.
"""

import torch
from torch import Tensor, nn

from equipoise_model.config import ModelConfig
from equipoise_model.expert_step import ExpertStep
from equipoise_model.latent_cache import CacheStep
from equipoise_model.overlap import finish
from equipoise_model.plain.block import Block
from equipoise_model.plain.layers import Linear, RMSNorm


class SharedHead(nn.Module):
    """The norm before the output head, which is shared with the main model."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)


class MultiTokenPrediction(Block):
    """Depth k of the chain: from hidden states and the next token's embedding to hidden states."""

    def __init__(self, config: ModelConfig, *, num_slots: int | None, dtype: torch.dtype) -> None:
        super().__init__(config, sparse=True, num_slots=num_slots, dtype=dtype)
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(dim, eps=eps, dtype=dtype)
        self.hnorm = RMSNorm(dim, eps=eps, dtype=dtype)
        self.eh_proj = Linear(2 * dim, dim, dtype=dtype)
        self.shared_head = SharedHead(config, dtype=dtype)

    def forward_mtp(
        self,
        hidden_BTD: Tensor,
        *,
        next_embedding_BTD: Tensor,
        cos_TF: Tensor,
        sin_TF: Tensor,
        step: ExpertStep,
    ) -> Tensor:
        """Return hidden states [B, T, D], from which the head predicts the token after next.

        `hidden_BTD` comes from the depth before, after its final norm (published weights need it;
        the report leaves it open). Row t of `next_embedding_BTD` embeds token t + 1.
        """
        joined_ND = self._joined(hidden_BTD.flatten(0, 1), next_embedding_BTD.flatten(0, 1))
        y_BTD = self.forward_expanded(joined_ND.view_as(hidden_BTD), cos_TF, sin_TF, step=step)
        normed: Tensor = self.shared_head.norm(y_BTD.flatten(0, 1))
        return normed.view_as(hidden_BTD)

    def forward_draft(
        self,
        hidden_TD: Tensor,
        *,
        next_embedding_TD: Tensor,
        rotary: tuple[Tensor, Tensor],
        layer: int,
        cache_step: CacheStep,
        expert_step: ExpertStep,
    ) -> Tensor:
        """Run a serving step's rows [T, D] and store their latents as cache layer `layer`.

        T may be 0. `rotary` holds cosines and sines of the rows' own positions.
        """
        y_TD = finish(
            self.stages(
                self._joined(hidden_TD, next_embedding_TD),
                *rotary,
                layer=layer,
                cache_step=cache_step,
                expert_step=expert_step,
            )
        )
        normed_TD: Tensor = self.shared_head.norm(y_TD)
        return normed_TD

    def _joined(self, hidden_ND: Tensor, next_embedding_ND: Tensor) -> Tensor:
        # The order of the checkpoint's eh_proj, the reverse of the report's equation 21.
        joined = torch.cat([self.enorm(next_embedding_ND), self.hnorm(hidden_ND)], dim=-1)
        projected_ND: Tensor = self.eh_proj(joined)
        return projected_ND
