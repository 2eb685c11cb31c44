"""`Fp8Attention`: multi-head latent attention in FP8, over the paged cache.

Computes the function that `plain.attention` explains, in both forms: expanded for long chunks of
prompts, which `prefill` selects, and absorbed for other rows, a query each.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise_kernels.formats import QuantizedRows
from equipoise_kernels.fp8.attention.latent_write import latent_write
from equipoise_kernels.fp8.attention.latents import Latents
from equipoise_kernels.fp8.attention.mla_decode import mla_decode
from equipoise_kernels.fp8.attention.mla_prefill import PrefillInputs, mla_prefill
from equipoise_kernels.fp8.quant.group_quant import group_quant
from equipoise_kernels.fp8.quant.rms_norm_quant import rms_norm_quant
from equipoise_model.config import ModelConfig
from equipoise_model.fp8.layers import Fp8Linear, scale_format
from equipoise_model.fp8.prefill import ExpandedRows
from equipoise_model.fp8.rows import StepRows
from equipoise_model.plain.layers import Linear, RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Queries:
    """Queries of T rows and H heads."""

    plain_THn: Tensor
    """The part without positions."""
    rotated_THP: Tensor
    """The part with positions."""
    query_THC: Tensor | None
    """Room for queries in the space of latents, with the part with positions in place; None if rows
    attend in the expanded form."""


class Fp8Attention(nn.Module):
    """One layer's attention; submodules have Hugging Face's names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.scale_format = scale_format(config)
        dim, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        query_dim, eps = heads * config.qk_head_dim, config.rms_norm_eps
        if config.q_lora_rank is None:
            self.q_proj = Fp8Linear(dim, query_dim)
        else:
            self.q_a_proj = Fp8Linear(dim, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=eps, dtype=torch.bfloat16)
            self.q_b_proj = Fp8Linear(config.q_lora_rank, query_dim)
        self.kv_a_proj_with_mqa = Fp8Linear(dim, config.latent_dim)
        self.kv_a_layernorm = RMSNorm(rank, eps=eps, dtype=torch.bfloat16)
        # Absorbed into queries and outputs head by head; these are not products of quantised rows.
        kv_dim = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = Linear(rank, kv_dim, dtype=torch.bfloat16)
        self.o_proj = Fp8Linear(heads * config.v_head_dim, dim)

    def project(
        self,
        rows: QuantizedRows,
        step: StepRows,
        *,
        rotary: tuple[Tensor, Tensor],
        latents: Latents,
        is_expanded: bool,
    ) -> Queries:
        """Compute the queries of a step's quantised rows [T, D], and write the rows' latents.

        `rotary` holds cosines and sines of the rows' positions, `latents` this layer's cache.
        `is_expanded` says whether any rows will attend in the expanded form.
        """
        config = self.config
        plain_THn, rotary_THP = self._queries(rows).split(
            [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1
        )
        query_THC = None
        if not is_expanded:
            query_THC = plain_THn.new_empty(*plain_THn.shape[:2], config.latent_dim)
        rotated_THP = latent_write(
            self.kv_a_proj_with_mqa(rows),
            rotary_THP,
            latents,
            places_T=step.places_T,
            weight_R=self.kv_a_layernorm.weight,
            eps=config.rms_norm_eps,
            cos_TF=rotary[0],
            sin_TF=rotary[1],
            out_THP=None if query_THC is None else query_THC[..., config.kv_lora_rank :],
        )
        return Queries(plain_THn=plain_THn, rotated_THP=rotated_THP, query_THC=query_THC)

    def attend(
        self,
        queries: Queries,
        step: StepRows,
        *,
        latents: Latents,
        expanded: ExpandedRows | None,
    ) -> Tensor:
        """Attend from a step's rows to their sequences so far: [T, D].

        The latents of all rows are written. Rows that `expanded` does not name are absorbed.
        """
        config, plain_THn, rotated_THP = self.config, queries.plain_THn, queries.rotated_THP
        if queries.query_THC is not None:
            mixed_THv = self._absorbed(plain_THn, queries.query_THC, step, latents=latents)
        else:
            assert expanded is not None
            mixed_THv = self._expanded(plain_THn, rotated_THP, expanded, latents=latents)
            rows_A = expanded.absorbed_A
            if len(rows_A) > 0:
                absorbed_AHR = plain_THn.new_empty(
                    len(rows_A), config.num_attention_heads, config.kv_lora_rank
                )
                query_AHC = torch.cat([absorbed_AHR, rotated_THP[rows_A]], dim=-1)
                mixed_THv[rows_A] = self._absorbed(
                    plain_THn[rows_A], query_AHC, step.at(rows_A), latents=latents
                )
        mixed_TV = mixed_THv.flatten(1)
        y_TD: Tensor = self.o_proj(group_quant(mixed_TV, scale_format=self.scale_format))
        return y_TD

    def _absorbed(
        self, plain_THn: Tensor, query_THC: Tensor, step: StepRows, *, latents: Latents
    ) -> Tensor:
        """Attend to latents: [T, H, v]; fills in the absorbed part of queries."""
        config = self.config
        up_HuR = self.kv_b_proj.weight.unflatten(0, (config.num_attention_heads, -1))
        up_key_HnR, up_value_HvR = up_HuR.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        absorbed_HTR = torch.bmm(plain_THn.transpose(0, 1), up_key_HnR)
        query_THC[..., : config.kv_lora_rank] = absorbed_HTR.transpose(0, 1)
        attended = mla_decode(
            query_THC,
            latents,
            tables_BS=step.tables_TS,
            lengths_B=step.lengths_T,
            scale=config.softmax_scale,
        )
        mixed_HTv = torch.bmm(attended.out_BHR.transpose(0, 1), up_value_HvR.transpose(1, 2))
        return mixed_HTv.transpose(0, 1)

    def _expanded(
        self, plain_THn: Tensor, rotary_THP: Tensor, expanded: ExpandedRows, *, latents: Latents
    ) -> Tensor:
        """Attend to keys and values rebuilt from latents: [T, H, v], other rows uninitialised."""
        config = self.config
        shape = (*plain_THn.shape[:2], config.v_head_dim)
        out_THv = plain_THn.new_empty(shape, dtype=torch.float32)
        lse_TH = plain_THn.new_empty(shape[:2], dtype=torch.float32)
        for stretch in expanded.stretches:
            latent_NC = latents.at(stretch.places_N)
            up_NHw = functional.linear(
                latent_NC[:, : config.kv_lora_rank], self.kv_b_proj.weight
            ).unflatten(1, (config.num_attention_heads, -1))
            inputs = PrefillInputs(
                plain_THn=plain_THn,
                rotary_THP=rotary_THP,
                keys_values_NHw=up_NHw,
                key_rotary_NP=latent_NC[:, config.kv_lora_rank :],
                segments_S6=stretch.segments_S6,
                most_queries=stretch.most_queries,
            )
            mla_prefill(inputs, scale=config.softmax_scale, out_THv=out_THv, lse_TH=lse_TH)
        return out_THv.to(plain_THn.dtype)

    def _queries(self, rows: QuantizedRows) -> Tensor:
        """Return queries [T, H, nope + rope], not rotated."""
        if self.config.q_lora_rank is None:
            flat: Tensor = self.q_proj(rows)
        else:
            norm = self.q_a_layernorm
            normed = rms_norm_quant(
                self.q_a_proj(rows), norm.weight, eps=norm.eps, scale_format=self.scale_format
            )
            flat = self.q_b_proj(normed)
        query_THq: Tensor = flat.unflatten(1, (self.config.num_attention_heads, -1))
        return query_THq
