"""Configurations of models that are small enough to try everything on."""

import dataclasses

from equipoise_model.config import ModelConfig

SMALL = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=2,
    max_position_embeddings=256,
)
"""A dense layer and two MoE layers of eight experts in two groups."""

MOE_LAYERS = dataclasses.replace(
    SMALL,
    vocab_size=32,
    num_hidden_layers=2,
    first_k_dense_replace=0,
    q_lora_rank=None,
    kv_lora_rank=16,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
)
"""Nothing but two MoE layers of sixteen experts in four groups: for tests of dispatch."""
