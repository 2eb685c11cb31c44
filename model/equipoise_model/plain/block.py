"""`Block`: one layer, attention then feed-forward, each with a norm and a residual."""

import torch
from torch import Tensor, nn

from equipoise_model.config import ModelConfig
from equipoise_model.expert_step import ExpertStep
from equipoise_model.latent_cache import CacheStep
from equipoise_model.overlap import Stage, Stages, finish
from equipoise_model.plain.attention import Attention
from equipoise_model.plain.layers import RMSNorm, SwiGLU
from equipoise_model.plain.moe import MoE
from equipoise_model.ranges import named


class Block(nn.Module):
    """A dense layer, or a sparse one with `num_slots` physical slots on this rank."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        sparse: bool,
        num_slots: int | None = None,
        row_block: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(dim, eps=eps, row_block=row_block, dtype=dtype)
        self.self_attn = Attention(config, row_block=row_block, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(dim, eps=eps, row_block=row_block, dtype=dtype)
        self.mlp: MoE | SwiGLU = (
            MoE(
                config,
                num_slots=config.num_placed_experts if num_slots is None else num_slots,
                row_block=row_block,
                dtype=dtype,
            )
            if sparse
            else SwiGLU(dim, config.intermediate_size, row_block=row_block, dtype=dtype)
        )

    def forward_expanded(
        self, x_BTD: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, step: ExpertStep
    ) -> Tensor:
        """Run whole sequences, differentiable."""
        x_ND = x_BTD.flatten(0, 1)
        normed: Tensor = self.input_layernorm(x_ND)
        attended_BTD = self.self_attn.forward_expanded(normed.view_as(x_BTD), cos_TF, sin_TF)
        x_ND = x_ND + attended_BTD.flatten(0, 1)
        x_ND = x_ND + finish(self._feed_forward(x_ND, step=step))
        return x_ND.view_as(x_BTD)

    def stages(
        self,
        x_TD: Tensor,
        cos_TF: Tensor,
        sin_TF: Tensor,
        *,
        layer: int,
        cache_step: CacheStep,
        expert_step: ExpertStep,
    ) -> Stages[Tensor]:
        """Run a step's tokens [T, D] of any sequences; `layer` is the index in the cache.

        A dense layer has no stages.
        """
        with named("attention"):
            normed: Tensor = self.input_layernorm(x_TD)
            query_THq = self.self_attn.project(normed, cos_TF, sin_TF, layer=layer, step=cache_step)
        if isinstance(self.mlp, MoE):
            yield Stage.PROJECTED
        with named("attention"):
            x_TD = x_TD + self.self_attn.attend(query_THq, layer=layer, step=cache_step)
        y_TD = yield from self._feed_forward(x_TD, step=expert_step)
        return x_TD + y_TD

    def _feed_forward(self, x_TD: Tensor, *, step: ExpertStep) -> Stages[Tensor]:
        """The second half without its residual, on rows [T, D]."""
        normed_TD: Tensor = self.post_attention_layernorm(x_TD)
        if isinstance(self.mlp, MoE):
            return (yield from self.mlp.stages(normed_TD, step))
        y_TD: Tensor = self.mlp(normed_TD)
        return y_TD
