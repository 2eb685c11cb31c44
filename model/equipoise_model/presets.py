"""Presets: configurations with names.

The repository trains and ships `tiny`; the others have the sizes of published models.
"""

from equipoise_model.config import Fp8Config, ModelConfig, RopeConfig, UnsupportedConfigError


def preset(name: str) -> ModelConfig:
    """Return the configuration with a name.

    Raises:
        UnsupportedConfigError: there is no such preset.
    """
    if name not in PRESETS:
        raise UnsupportedConfigError(f"there is no preset {name!r}: choose from {sorted(PRESETS)}")
    return PRESETS[name]


# arXiv 2412.19437, section 4.2, and the published config.json.
DEEPSEEK_V3 = ModelConfig(
    vocab_size=129_280,
    hidden_size=7168,
    intermediate_size=18_432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    first_k_dense_replace=3,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    num_nextn_predict_layers=1,
    max_position_embeddings=163_840,
    rope=RopeConfig(
        factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
    ),
    quantization_config=Fp8Config(),
)

# The sizes of DeepSeek-V2-Lite (arXiv 2405.04434, appendix B) with the router of DeepSeek-V3:
# uncompressed queries, one group, two shared experts.
DEEPSEEK_V2_LITE_SIZED = ModelConfig(
    vocab_size=102_400,
    hidden_size=2048,
    intermediate_size=10_944,
    moe_intermediate_size=1408,
    num_hidden_layers=27,
    first_k_dense_replace=1,
    num_attention_heads=16,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.0,
    norm_topk_prob=False,
    max_position_embeddings=163_840,
    bos_token_id=100_000,
    eos_token_id=100_001,
    rope=RopeConfig(
        factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707
    ),
)

# 3.7 M parameters, every dimension of a matrix product a multiple of 16. Tokens are bytes; 256
# starts a text, 257 ends it, and the rest of the vocabulary is unused.
TINY = ModelConfig(
    vocab_size=272,
    hidden_size=128,
    intermediate_size=384,
    moe_intermediate_size=48,
    num_hidden_layers=5,
    first_k_dense_replace=1,
    num_attention_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    n_routed_experts=32,
    n_shared_experts=1,
    num_experts_per_tok=4,
    n_group=8,
    topk_group=4,
    num_nextn_predict_layers=1,
    max_position_embeddings=1024,
    bos_token_id=256,
    eos_token_id=257,
)

PRESETS = {
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v2-lite-sized": DEEPSEEK_V2_LITE_SIZED,
    "tiny": TINY,
}
