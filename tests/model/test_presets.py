import pytest
import torch

from equipoise_model.config import ModelConfig, UnsupportedConfigError
from equipoise_model.plain.transformer import Transformer
from equipoise_model.presets import DEEPSEEK_V2_LITE_SIZED, DEEPSEEK_V3, PRESETS, TINY, preset


def on_meta(config):
    """The model without memory for its weights."""
    with torch.device("meta"):
        return Transformer(config)


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_largest_preset_has_the_published_number_of_parameters():
    model = on_meta(DEEPSEEK_V3)
    assert num_parameters(model) == 671_026_404_352
    biases = [layer.gate.e_score_correction_bias.numel() for layer in model.moe_layers]
    assert (len(biases), sum(biases)) == (58, 58 * 256)


def test_the_largest_preset_caches_as_much_as_its_report_claims():
    assert DEEPSEEK_V3.latent_dim * DEEPSEEK_V3.num_hidden_layers * 2 == 70_272


def test_the_middle_preset_is_of_the_published_size():
    # DeepSeek-V2-Lite: "15.7B" in its report.
    assert num_parameters(on_meta(DEEPSEEK_V2_LITE_SIZED)) == pytest.approx(15.7e9, rel=0.002)


def test_the_shipped_preset_is_small_and_fits_matrix_tiles():
    model = Transformer(TINY, mtp=True)
    assert num_parameters(model) < 4_100_000
    odd = [name for name, p in model.named_parameters() if any(size % 16 for size in p.shape)]
    assert not odd


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_its_json(name):
    assert ModelConfig.from_dict(preset(name).to_dict()) == preset(name)


def test_the_published_config_is_the_largest_preset():
    published = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    assert ModelConfig.from_dict(published) == DEEPSEEK_V3


def test_transformers_understands_the_largest_preset():
    from transformers import DeepseekV3Config

    theirs = DeepseekV3Config(**DEEPSEEK_V3.to_dict())
    assert theirs.rope_parameters["factor"] == 40.0
    assert theirs.quantization_config["weight_block_size"] == [128, 128]


def test_an_unknown_preset_is_rejected_with_the_known_ones():
    with pytest.raises(UnsupportedConfigError, match=r"'huge'.*deepseek-v3"):
        preset("huge")
