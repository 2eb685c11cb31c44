import pytest

from equipoise_model.config import ModelConfig


@pytest.fixture(scope="session")
def small_config():
    """Every part of the architecture, in sizes that train in moments."""
    return ModelConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        num_nextn_predict_layers=1,
        max_position_embeddings=256,
    )
