"""`Fp8Block`: one layer, attention then feed-forward; `Fp8MoE`: gate, routed and shared experts."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise_kernels.formats import QuantizedRows
from equipoise_kernels.fp8.attention.latents import Latents
from equipoise_kernels.fp8.moe.replica_balance import balance_to_slots
from equipoise_kernels.fp8.moe.route import route_to_slots
from equipoise_kernels.fp8.moe.routes import Routes, RoutingRule, SlotTables
from equipoise_kernels.fp8.quant.group_quant import group_quant
from equipoise_kernels.fp8.quant.rms_norm_quant import rms_norm_quant
from equipoise_model.config import ModelConfig
from equipoise_model.expert_step import ExpertStep
from equipoise_model.fp8.attention import Fp8Attention
from equipoise_model.fp8.experts import Fp8ExpertSlots
from equipoise_model.fp8.layers import Fp8SwiGLU, scale_format
from equipoise_model.fp8.prefill import ExpandedRows
from equipoise_model.fp8.rows import StepRows
from equipoise_model.overlap import Stage, Stages, finish
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
        """Return what `stages` computes."""
        return finish(self.stages(x_TD, rows, step, num_valid=num_valid))

    def stages(
        self, x_TD: Tensor, rows: QuantizedRows, step: ExpertStep, *, num_valid: Tensor | None
    ) -> Stages[Tensor]:
        """Compute the layer's output for rows [T, D], without the residual, from `ROUTED` on.

        Takes the rows both plain and quantised. `num_valid`, int32 [1] on the device, is the number
        of real rows; all by default.

        Raises:
            ExchangeError: another rank is gone or stuck, or runs another generation.
        """
        layer, exchange = step.enter_layer(), step.exchange
        load_S = step.slot_load_LS[layer]
        slots_ER, count_E, ends_ER = step.placement.of_layer(layer)
        tables = SlotTables(
            slots_of_expert_ER=slots_ER, replica_count_E=count_E, share_ends_ER=ends_ER
        )
        # Routes rows to physical slots, without involving the host. A rank alone counts assignments
        # while routing; several ranks count what they receive.
        routes = route_to_slots(
            functional.linear(x_TD.float(), self.gate.weight),
            self.gate.e_score_correction_bias,
            rule=self._rule,
            tables=tables,
            token_ids_T=step.token_ids_T,
            layer=layer,
            rows_S=load_S if exchange is None else None,
            num_valid=num_valid,
        )
        slots_TK = routes.slots_TK
        if step.balances:
            slots_TK = balance_to_slots(
                routes.expert_ids_TK,
                step.counts_by_rank(routes.expert_ids_TK),
                tables,
                rank=step.ranks.rank,
                slots_per_rank=step.placement.slots_per_rank,
            )
        yield Stage.ROUTED
        if exchange is None:
            assert step.alone
            routed = self._stages_here(rows, routes)
        else:
            routed = exchange.stages(
                x_TD,
                rows,
                slots_TK=slots_TK,
                weights_TK=routes.weights_TK,
                experts=self.experts,
                load_S=load_S,
                step=step.exchanged,
                traffic=step.traffic,
            )
        yield next(routed)
        # Computed while the rows travel.
        shared_TD = None if self.shared_experts is None else self.shared_experts(rows)
        routed_TD = yield from routed
        y_TD: Tensor = routed_TD if shared_TD is None else routed_TD + shared_TD
        yield Stage.COMBINED
        return y_TD

    def _stages_here(self, rows: QuantizedRows, routes: Routes) -> Stages[Tensor]:
        """Run rows on a rank alone."""
        yield Stage.SENT
        with named("experts"):
            routed_TD = self.experts.run(rows, routes.slots_TK, routes.weights_TK)
        yield Stage.COMPUTED
        return routed_TD


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

    def stages(
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
    ) -> Stages[Tensor]:
        """Compute what this layer adds to x + delta; x becomes that sum, in place.

        A dense layer has no stages.
        """
        attention = self.self_attn
        with named("attention"):
            rows = self._normed(self.input_layernorm, delta_TD, residual_TD=x_TD)
            queries = attention.project(
                rows, step, rotary=rotary, latents=latents, is_expanded=expanded is not None
            )
        if isinstance(self.mlp, Fp8MoE):
            yield Stage.PROJECTED
        with named("attention"):
            delta_TD = attention.attend(queries, step, latents=latents, expanded=expanded)
        if isinstance(self.mlp, Fp8MoE):
            # The gate needs rows that are not quantised.
            x_TD += delta_TD
            normed_TD: Tensor = self.post_attention_layernorm(x_TD)
            rows = group_quant(normed_TD, scale_format=self.scale_format)
            return (yield from self.mlp.stages(normed_TD, rows, experts, num_valid=num_valid))
        rows = self._normed(self.post_attention_layernorm, delta_TD, residual_TD=x_TD)
        y_TD: Tensor = self.mlp(rows)
        return y_TD

    def _normed(self, norm: RMSNorm, delta_TD: Tensor, *, residual_TD: Tensor) -> QuantizedRows:
        return rms_norm_quant(
            delta_TD,
            norm.weight,
            eps=norm.eps,
            residual_MD=residual_TD,
            scale_format=self.scale_format,
        )
