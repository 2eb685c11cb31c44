"""`Router`: a token's affinities to the logical experts, and the experts it is routed to.

Knows nothing of replicas, slots or ranks; see `placement` and `dispatch`.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from equipoise_kernels.plain.linear import by_row_blocks, linear
from equipoise_kernels.plain.route import route
from equipoise_model.config import ModelConfig


class Routing(NamedTuple):
    """Where T rows go: `expert_ids_TK` int64 (logical), `weights_TK` and `scores_TE` float32.

    Scores are the sigmoids before the bias, for training's balance loss.
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor

    def with_shared(self, expert: int) -> "Routing":
        """Return the same with the shared expert as every row's last choice, with weight 1."""
        column = self.expert_ids_TK[:, :1]
        return self._replace(
            expert_ids_TK=torch.cat([self.expert_ids_TK, torch.full_like(column, expert)], dim=1),
            weights_TK=torch.cat([self.weights_TK, self.weights_TK.new_ones(column.shape)], dim=1),
        )


class Router(nn.Module):
    """Float32 sigmoid gate with a correction bias for the choice; Hugging Face calls it `gate`.

    `weight` is [E, D]. `e_score_correction_bias` is a buffer [E], because training moves it by a
    sign rule and not by gradients.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig, *, row_block: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.row_block = row_block
        self.weight = nn.Parameter(
            torch.empty(config.n_routed_experts, config.hidden_size, dtype=torch.float32)
        )
        self.register_buffer(
            "e_score_correction_bias", torch.zeros(config.n_routed_experts, dtype=torch.float32)
        )

    def forward(self, x_TD: Tensor) -> Routing:
        """Route rows [T, D]; T may be 0."""
        logits_TE = linear(x_TD.float(), self.weight.float(), row_block=self.row_block)
        scores_TE = by_row_blocks(torch.sigmoid, logits_TE, row_block=self.row_block)
        ids_TK, weights_TK = route(
            scores_TE,
            self.e_score_correction_bias.float(),
            num_groups=self.config.n_group,
            top_groups=self.config.topk_group,
            top_k=self.config.num_experts_per_tok,
            normalize=self.config.norm_topk_prob,
            scale=self.config.routed_scaling_factor,
        )
        return Routing(expert_ids_TK=ids_TK, weights_TK=weights_TK, scores_TE=scores_TE)
