"""`Attention`: multi-head latent attention (arXiv 2405.04434, section 2.1).

There are two forms of one function. The expanded form rebuilds every head's keys and values; it
serves training and long chunks of prompts. The absorbed form attends to cached latents directly,
with the two up-projections absorbed into queries and outputs: each pair of query and position costs
more multiplications, but nothing is rebuilt.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise_kernels.plain.rotate import rotate
from equipoise_model.config import ModelConfig
from equipoise_model.latent_cache import CacheStep, stretch_length
from equipoise_model.plain.layers import Linear, RMSNorm


class Attention(nn.Module):
    """One layer's attention; submodules have Hugging Face's names."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        row_block: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.row_block = row_block
        dim, heads = config.hidden_size, config.num_attention_heads
        eps, rank = config.rms_norm_eps, config.kv_lora_rank
        query_dim = heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = Linear(dim, query_dim, row_block=row_block, dtype=dtype)
        else:
            self.q_a_proj = Linear(dim, config.q_lora_rank, row_block=row_block, dtype=dtype)
            self.q_a_layernorm = RMSNorm(
                config.q_lora_rank, eps=eps, row_block=row_block, dtype=dtype
            )
            self.q_b_proj = Linear(config.q_lora_rank, query_dim, row_block=row_block, dtype=dtype)
        self.kv_a_proj_with_mqa = Linear(dim, config.latent_dim, row_block=row_block, dtype=dtype)
        self.kv_a_layernorm = RMSNorm(rank, eps=eps, row_block=row_block, dtype=dtype)
        kv_dim = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = Linear(rank, kv_dim, row_block=row_block, dtype=dtype)
        self.o_proj = Linear(heads * config.v_head_dim, dim, row_block=row_block, dtype=dtype)

    def forward_expanded(self, x_BTD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
        """Causal attention over whole sequences, [B, T, D] to [B, T, D], differentiable."""
        batch, length, _ = x_BTD.shape
        x_ND = x_BTD.flatten(0, 1)
        cos_NF, sin_NF = cos_TF.repeat(batch, 1), sin_TF.repeat(batch, 1)
        query_NHq = self._queries(x_ND, cos_NF, sin_NF)
        latent_NC = self._latents(x_ND, cos_NF, sin_NF)
        key_NHq, value_NHv = self._expand(latent_NC)
        query_BHTq, key_BHTq, value_BHTv = (
            tensor.unflatten(0, (batch, length)).transpose(1, 2)
            for tensor in (query_NHq, key_NHq, value_NHv)
        )
        mixed_BHTv = functional.scaled_dot_product_attention(
            query_BHTq,
            key_BHTq,
            value_BHTv,
            is_causal=True,
            scale=self.config.softmax_scale,
        )
        y_ND: Tensor = self.o_proj(mixed_BHTv.transpose(1, 2).flatten(2).flatten(0, 1))
        return y_ND.view_as(x_BTD)

    def forward_cached(
        self, x_TD: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, layer: int, step: CacheStep
    ) -> Tensor:
        """Attend from a step's tokens [T, D] to their sequences so far; T may be 0.

        `layer` is this layer's index in the cache. Latents of all tokens are written before any
        query reads, so a chunk of a prompt is causal within itself. Long chunks are expanded,
        except in row blocks: a token's bits must not depend on how its prompt was split.
        """
        query_THq = self.project(x_TD, cos_TF, sin_TF, layer=layer, step=step)
        return self.attend(query_THq, layer=layer, step=step)

    def project(
        self, x_TD: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, layer: int, step: CacheStep
    ) -> Tensor:
        """Write the latents of `forward_cached`'s tokens; return their queries [T, H, q]."""
        step.write(layer, self._latents(x_TD, cos_TF, sin_TF))
        return self._queries(x_TD, cos_TF, sin_TF)

    def attend(self, query_THq: Tensor, *, layer: int, step: CacheStep) -> Tensor:
        """Return what `forward_cached` does, [T, D], once latents are written."""
        mixed_THv = query_THq.new_empty(*query_THq.shape[:2], self.config.v_head_dim)
        for group in step.groups:
            num_queries = group.unseen_BQL.shape[1]
            expands = self.row_block is None and num_queries >= fewest_to_expand(self.config)
            attend = self._attend_expanded if expands else self._attend
            mixed_THv[group.places_N] = attend(
                query_THq[group.places_N], step.read(layer, group), unseen_BQL=group.unseen_BQL
            )
        y_TD: Tensor = self.o_proj(mixed_THv.flatten(1))
        return y_TD

    def _attend(self, query_NHq: Tensor, latents_BLC: Tensor, *, unseen_BQL: Tensor) -> Tensor:
        """Return heads' outputs [N, H, v] of N / B queries for each of B stretches of cache."""
        config = self.config
        up_HuR = self.kv_b_proj.weight.unflatten(0, (config.num_attention_heads, -1))
        up_key_HnR, up_value_HvR = up_HuR.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        plain, rotary = query_NHq.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        absorbed_NHR = torch.bmm(plain.transpose(0, 1), up_key_HnR).transpose(0, 1)
        query_NHC = torch.cat([absorbed_NHR, rotary], dim=-1)

        query_BMC = query_NHC.reshape(len(latents_BLC), -1, config.latent_dim)
        scores_BML = (
            torch.bmm(query_BMC, latents_BLC.transpose(1, 2)).float() * config.softmax_scale
        )
        scores_BQHL = scores_BML.unflatten(1, (-1, config.num_attention_heads))
        scores_BQHL.masked_fill_(unseen_BQL.unsqueeze(2), float("-inf"))
        weights_BML = scores_BML.softmax(-1)
        compressed_BLR = latents_BLC[..., : config.kv_lora_rank]
        mixed_BMR = torch.bmm(weights_BML.to(latents_BLC.dtype), compressed_BLR)
        mixed_NHR = mixed_BMR.reshape(-1, config.num_attention_heads, config.kv_lora_rank)
        mixed_HNv = torch.bmm(mixed_NHR.transpose(0, 1), up_value_HvR.transpose(1, 2))
        return mixed_HNv.transpose(0, 1)

    def _attend_expanded(
        self, query_NHq: Tensor, latents_BLC: Tensor, *, unseen_BQL: Tensor
    ) -> Tensor:
        """Compute what `_attend` does for one stretch of cache, from its keys and values."""
        (latent_LC,) = latents_BLC
        key_LHq, value_LHv = self._expand(latent_LC)
        mixed_HNv = functional.scaled_dot_product_attention(
            query_NHq.transpose(0, 1),
            key_LHq.transpose(0, 1),
            value_LHv.transpose(0, 1),
            attn_mask=~unseen_BQL[0],
            scale=self.config.softmax_scale,
        )
        return mixed_HNv.transpose(0, 1)

    def _queries(self, x_TD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
        """Return queries [T, H, nope + rope], the last part rotated."""
        if self.config.q_lora_rank is None:
            flat: Tensor = self.q_proj(x_TD)
        else:
            flat = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))
        query_THq = flat.unflatten(1, (self.config.num_attention_heads, -1))
        plain, rotary = query_THq.split(
            [self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1
        )
        rotated = rotate(rotary, cos_TF.unsqueeze(1), sin_TF.unsqueeze(1))
        return torch.cat([plain, rotated], dim=-1)

    def _latents(self, x_TD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
        """Return what is cached per token: normed compressed key-value and rotated key, [T, C]."""
        flat: Tensor = self.kv_a_proj_with_mqa(x_TD)
        compressed, rotary = flat.split(
            [self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1
        )
        # Contiguous, because strided rows may be normed by other code.
        normed: Tensor = self.kv_a_layernorm(compressed.contiguous())
        return torch.cat([normed, rotate(rotary, cos_TF, sin_TF)], dim=-1)

    def _expand(self, latent_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [N, H, nope + rope] and values [N, H, v] of latents."""
        config = self.config
        compressed, rotary = latent_NC.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        flat: Tensor = self.kv_b_proj(compressed.contiguous())
        plain, value_NHv = flat.unflatten(1, (config.num_attention_heads, -1)).split(
            [config.qk_nope_head_dim, config.v_head_dim], dim=-1
        )
        shared = rotary.unsqueeze(1).expand(-1, config.num_attention_heads, -1)
        return torch.cat([plain, shared], dim=-1), value_NHv


def fewest_to_expand(config: ModelConfig) -> int:
    """Return the number of queries from which rebuilding keys and values saves multiplications.

    Per head and position, rebuilding costs R (n + v), and saves each query C + R - q - v.
    """
    absorbed = config.latent_dim + config.kv_lora_rank
    expanded = config.qk_head_dim + config.v_head_dim
    rebuilt = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    return rebuilt // max(1, absorbed - expanded) + 1


def attention_bytes(
    config: ModelConfig,
    *,
    num_rows: int,
    num_sequences: int,
    num_positions: int,
    row_block: int | None,
    itemsize: int,
) -> int:
    """Return the most memory of a step's attention, with the step's masks.

    Args:
        config: sizes.
        num_rows: rows of the step.
        num_sequences: most sequences that they belong to.
        num_positions: most positions of a sequence.
        row_block: as of `Attention`.
        itemsize: bytes of the compute dtype.
    """
    heads, query_dim = config.num_attention_heads, config.qk_head_dim
    widths = 2 * (query_dim + config.kv_lora_rank + config.v_head_dim) + config.latent_dim
    # Groups of queries attend one after the other; the masks of all exist as long as the step.
    if row_block is None:
        length, masks = num_positions, num_rows * num_positions
        group = max(
            _absorbed_bytes(config, itemsize, num_queries=queries, num_tables=tables, length=length)
            for queries, tables in (
                (min(num_rows, num_sequences),) * 2,
                (min(num_rows, fewest_to_expand(config) - 1), 1),
            )
        )
        if num_rows >= fewest_to_expand(config):
            group = max(group, _expanded_bytes(config, itemsize, num_rows, length=length))
    else:
        length = stretch_length(num_positions)
        # Each stretch may have a block that is not full; all shorter ones are as long as this one.
        num_rows = row_block * -(-num_rows // row_block)
        masks = (num_rows + row_block) * length
        group = _absorbed_bytes(
            config, itemsize, num_queries=row_block, num_tables=row_block, length=length
        )
    return num_rows * heads * widths * itemsize + group + masks


def _absorbed_bytes(
    config: ModelConfig, itemsize: int, *, num_queries: int, num_tables: int, length: int
) -> int:
    """Latents, and scores and weights in float32, then weights in the compute dtype."""
    of_pair = config.num_attention_heads * (8 + (itemsize if itemsize < 4 else 0))
    return length * (num_queries * of_pair + num_tables * config.latent_dim * itemsize)


def _expanded_bytes(config: ModelConfig, itemsize: int, num_queries: int, *, length: int) -> int:
    """Latents, keys and values, in float32 too, scores and weights in float32, and masks.

    torch scales float32 keys before it computes scores, and those are gone when there are weights.
    """
    heads, width = config.num_attention_heads, config.qk_head_dim + config.v_head_dim
    rebuilt = heads * (config.qk_nope_head_dim + width) * itemsize
    rebuilt += heads * width * (4 if itemsize < 4 else 0)
    scores = heads * 8 * max(num_queries, config.qk_head_dim)
    masks = num_queries * (1 + itemsize)
    return length * (config.latent_dim * itemsize + rebuilt + scores + masks)
