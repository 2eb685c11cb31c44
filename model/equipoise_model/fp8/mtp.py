"""`Fp8MultiTokenPrediction`: the FP8 counterpart of `plain.mtp`, for drafting."""

import torch
from torch import Tensor

from equipoise_kernels.fp8.attention.latents import Latents
from equipoise_model.config import ModelConfig
from equipoise_model.expert_step import ExpertStep
from equipoise_model.fp8.block import Fp8Block
from equipoise_model.fp8.rows import StepRows
from equipoise_model.overlap import finish
from equipoise_model.plain.layers import Linear, RMSNorm
from equipoise_model.plain.mtp import SharedHead


class Fp8MultiTokenPrediction(Fp8Block):
    """Depth k of the chain: from hidden states and the next token's embedding to hidden states.

    The projection of the two is in bfloat16, as in checkpoints.
    """

    def __init__(self, config: ModelConfig, *, num_slots: int, num_spare: int) -> None:
        super().__init__(config, sparse=True, num_slots=num_slots, num_spare=num_spare)
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(dim, eps=eps, dtype=torch.bfloat16)
        self.hnorm = RMSNorm(dim, eps=eps, dtype=torch.bfloat16)
        self.eh_proj = Linear(2 * dim, dim, dtype=torch.bfloat16)
        self.shared_head = SharedHead(config, dtype=torch.bfloat16)

    def forward_draft(
        self,
        hidden_TD: Tensor,
        *,
        next_embedding_TD: Tensor,
        rows: StepRows,
        rotary: tuple[Tensor, Tensor],
        latents: Latents,
        experts: ExpertStep,
    ) -> Tensor:
        """Run a serving step's rows [T, D] and store their latents in `latents`; T may be 0.

        `rotary` holds cosines and sines of the rows' own positions.
        """
        joined = torch.cat([self.enorm(next_embedding_TD), self.hnorm(hidden_TD)], dim=-1)
        x_TD: Tensor = self.eh_proj(joined)
        delta_TD = finish(
            self.stages(
                x_TD,
                torch.zeros_like(x_TD),
                rows,
                rotary=rotary,
                latents=latents,
                experts=experts,
                num_valid=None,
            )
        )
        normed_TD: Tensor = self.shared_head.norm(x_TD + delta_TD)
        return normed_TD
