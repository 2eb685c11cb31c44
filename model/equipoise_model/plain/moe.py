"""`MoE`: one layer's gate, routed experts and shared experts."""

import torch
from torch import Tensor, nn

from equipoise_model.config import ModelConfig
from equipoise_model.expert_step import ExpertStep
from equipoise_model.overlap import Stage, Stages, finish
from equipoise_model.plain.experts import ExpertSlots
from equipoise_model.plain.layers import SwiGLU
from equipoise_model.plain.router import Router, Routing


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
        self._num_routed = config.n_routed_experts
        dim, hidden_dim = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config, row_block=row_block)
        self.experts = ExpertSlots(
            dim, hidden_dim, num_slots=num_slots, row_block=row_block, dtype=dtype
        )
        self.shared_experts = (
            None
            if config.shared_as_routed
            else SwiGLU(dim, hidden_dim * config.n_shared_experts, row_block=row_block, dtype=dtype)
        )

    def forward(self, x_TD: Tensor, step: ExpertStep) -> Tensor:
        """Return the output for rows [T, D], without the residual; T may be 0."""
        return finish(self.stages(x_TD, step))

    def stages(self, x_TD: Tensor, step: ExpertStep) -> Stages[Tensor]:
        """Compute what `forward` does, from `ROUTED` on."""
        routing: Routing = self.gate(x_TD)
        yield Stage.ROUTED
        if self.shared_experts is None:
            routing = routing.with_shared(self._num_routed)
            y_TD = yield from step.stages(x_TD, routing, self.experts)
            return y_TD.to(x_TD.dtype)
        routed = step.stages(x_TD, routing, self.experts)
        yield next(routed)
        # Computed while the rows travel.
        shared_TD: Tensor = self.shared_experts(x_TD)
        y_TD = yield from routed
        # Summed in float32 and in the same order as the weighted sum with the shared expert.
        return (y_TD + shared_TD).to(x_TD.dtype)
