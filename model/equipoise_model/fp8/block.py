"""`Fp8Block`: one layer, attention then feed-forward; `Fp8MoE`: gate, routed and shared experts."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise_kernels.formats import QuantizedRows
from equipoise_kernels.fp8.attention.latents import Latents
from equipoise_kernels.fp8.moe.route import route_to_slots
from equipoise_kernels.fp8.moe.routes import RoutingRule, SlotTables
from equipoise_kernels.fp8.quant.group_quant import group_quant
from equipoise_kernels.fp8.quant.rms_norm_quant import rms_norm_quant
from equipoise_model.config import ModelConfig
from equipoise_model.dispatch import ExpertStep
from equipoise_model.fp8.attention import Fp8Attention
from equipoise_model.fp8.experts import Fp8ExpertSlots
from equipoise_model.fp8.layers import Fp8SwiGLU, scale_format
from equipoise_model.fp8.prefill import ExpandedRows
from equipoise_model.fp8.rows import StepRows
from equipoise_model.plain.layers import RMSNorm
from equipoise_model.plain.router import Router
from equipoise_model.ranges import named


class Fp8MoE(nn.Module):
    """DeepSeekMoE over this rank's `num_slots` physical slots.

    Submodules have Hugging Face's names.
    """

    def __init__(self, config: ModelConfig, *, num_slots: int, num_spare: int) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Fp8ExpertSlots(
            config.hidden_size,
            config.moe_intermediate_size,
            num_slots=num_slots,
            num_spare=num_spare,
            scale_format=scale_format(config),
        )
        shared_dim = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = None if config.shared_as_routed else Fp8SwiGLU(config, shared_dim)
        self._rule = RoutingRule(
            num_experts=config.n_routed_experts,
            num_groups=config.n_group,
            top_groups=config.topk_group,
            top_k=config.num_experts_per_tok,
            normalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            shared=config.shared_as_routed,
        )

    def forward(
        self, x_TD: Tensor, rows: QuantizedRows, step: ExpertStep, *, num_valid: Tensor | None
    ) -> Tensor:
        """Return the layer's output for rows [T, D], without the residual.

        Takes the rows both plain and quantised. `num_valid`, int32 [1] on the device, is the number
        of real rows; all by default.

        Raises:
            ExchangeError: another rank is gone or stuck, or runs another generation.
        """
        layer, placement, exchange = step.enter_layer(), step.placement, step.exchange
        load_S, ends = step.slot_load_LS[layer], placement.share_ends
        # Routes rows to physical slots, without involving the host. A rank alone counts assignments
        # while routing; several ranks count what they receive.
        routes = route_to_slots(
            functional.linear(x_TD.float(), self.gate.weight),
            self.gate.e_score_correction_bias,
            rule=self._rule,
            tables=SlotTables(
                slots_of_expert_ER=placement.slots_of_expert[layer],
                replica_count_E=placement.replica_count[layer],
                share_ends_ER=None if ends is None else ends[layer],
            ),
            token_ids_T=step.token_ids_T,
            layer=layer,
            rows_S=load_S if exchange is None else None,
            num_valid=num_valid,
        )
        if exchange is None:
            assert step.alone
            with named("experts"):
                routed_TD = self.experts.run(rows, routes.slots_TK, routes.weights_TK)
        else:
            routed_TD = exchange.run(
                x_TD,
                rows,
                slots_TK=routes.slots_TK,
                weights_TK=routes.weights_TK,
                experts=self.experts,
                most_tokens=max(step.tokens_by_rank),
                load_S=load_S,
                is_fixed=step.is_captured,
            )
        if self.shared_experts is None:
            return routed_TD
        shared_TD: Tensor = self.shared_experts(rows)
        return routed_TD + shared_TD


class Fp8Block(nn.Module):
    """A dense layer, or a sparse one with `num_slots` physical slots on this rank."""

    def __init__(
        self, config: ModelConfig, *, sparse: bool, num_slots: int, num_spare: int
    ) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.scale_format = scale_format(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=eps, dtype=torch.bfloat16)
        self.self_attn = Fp8Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=eps, dtype=torch.bfloat16)
        self.mlp: Fp8MoE | Fp8SwiGLU = (
            Fp8MoE(config, num_slots=num_slots, num_spare=num_spare)
            if sparse
            else Fp8SwiGLU(config, config.intermediate_size)
        )

    def forward(
        self,
        x_TD: Tensor,
        delta_TD: Tensor,
        step: StepRows,
        *,
        rotary: tuple[Tensor, Tensor],
        latents: Latents,
        experts: ExpertStep,
        num_valid: Tensor | None,
        expanded: ExpandedRows | None = None,
    ) -> Tensor:
        """Return what this layer adds to x + delta; x becomes that sum, in place."""
        with named("attention"):
            rows = self._normed(self.input_layernorm, delta_TD, residual_TD=x_TD)
            delta_TD = self.self_attn(rows, step, rotary=rotary, latents=latents, expanded=expanded)
        if isinstance(self.mlp, Fp8MoE):
            # The gate needs rows that are not quantised.
            x_TD += delta_TD
            normed_TD: Tensor = self.post_attention_layernorm(x_TD)
            rows = group_quant(normed_TD, scale_format=self.scale_format)
            y_TD: Tensor = self.mlp(normed_TD, rows, experts, num_valid=num_valid)
        else:
            rows = self._normed(self.post_attention_layernorm, delta_TD, residual_TD=x_TD)
            y_TD = self.mlp(rows)
        return y_TD

    def _normed(self, norm: RMSNorm, delta_TD: Tensor, *, residual_TD: Tensor) -> QuantizedRows:
        return rms_norm_quant(
            delta_TD,
            norm.weight,
            eps=norm.eps,
            residual_MD=residual_TD,
            scale_format=self.scale_format,
        )
