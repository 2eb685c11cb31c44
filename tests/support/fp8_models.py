"""The smallest models that FP8 supports: groups of 128 everywhere."""

from dataclasses import replace

from equipoise_model.config import ModelConfig

NARROW = ModelConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=128,
    moe_intermediate_size=128,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_attention_heads=2,
    q_lora_rank=128,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=64,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=2,
    max_position_embeddings=64,
)

WIDE = replace(NARROW, kv_lora_rank=128)
"""Its latents can be kept in FP8 too."""
