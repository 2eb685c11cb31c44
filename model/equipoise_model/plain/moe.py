"""`MoE`: one layer's gate, routed experts and shared experts."""

import torch
from torch import Tensor, nn

from equipoise_model.config import ModelConfig
from equipoise_model.dispatch import ExpertStep
from equipoise_model.plain.experts import ExpertSlots
from equipoise_model.plain.layers import SwiGLU
from equipoise_model.plain.router import Router


class MoE(nn.Module):
    """DeepSeekMoE (arXiv 2412.19437, section 2.1.2) over this rank's `num_slots` physical slots.

    Submodules have Hugging Face's names.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        row_block: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dim, hidden_dim = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config, row_block=row_block)
        self.experts = ExpertSlots(
            dim, hidden_dim, num_slots=num_slots, row_block=row_block, dtype=dtype
        )
        self.shared_experts = SwiGLU(
            dim, hidden_dim * config.n_shared_experts, row_block=row_block, dtype=dtype
        )

    def forward(self, x_TD: Tensor, step: ExpertStep) -> Tensor:
        """Return the output for rows [T, D], without the residual; T may be 0."""
        routed_TD = step.run(x_TD, self.gate(x_TD), self.experts)
        shared_TD: Tensor = self.shared_experts(x_TD)
        return routed_TD + shared_TD
