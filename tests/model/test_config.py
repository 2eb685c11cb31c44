import dataclasses
import json

import pytest

from equipoise_model.config import (
    Fp8Config,
    ModelConfig,
    RopeConfig,
    UnsupportedConfigError,
    yarn_mscale,
)
from equipoise_model.presets import DEEPSEEK_V3, TINY

YARN_FIELDS = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


def test_a_config_survives_its_json(config, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    assert ModelConfig.from_json(file) == config


def test_transformers_reads_and_writes_the_same_config(config, tmp_path):
    from transformers import DeepseekV3Config

    theirs = DeepseekV3Config(**config.to_dict())
    theirs.save_pretrained(tmp_path)
    assert ModelConfig.from_json(tmp_path / "config.json") == config
    assert theirs.rope_parameters["rope_theta"] == config.rope.rope_theta


def test_both_forms_of_rope_fields_mean_the_same():
    base = {k: v for k, v in TINY.to_dict().items() if k != "rope_parameters"}
    old = base | {"rope_theta": 5000, "rope_scaling": {"type": "yarn", **YARN_FIELDS}}
    new = base | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5000, **YARN_FIELDS}}
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(new)
    assert ModelConfig.from_dict(old).rope == RopeConfig(rope_theta=5000, **YARN_FIELDS)


def test_the_place_of_the_shared_expert_is_no_part_of_a_config_on_disk():
    routed = dataclasses.replace(TINY, shared_as_routed=True)
    assert routed.to_dict() == TINY.to_dict()
    assert (routed.num_placed_experts, TINY.num_placed_experts) == (33, 32)
    assert routed.slots_per_token == TINY.slots_per_token + 1
    with pytest.raises(UnsupportedConfigError, match="unknown field 'shared_as_routed'"):
        ModelConfig.from_dict(TINY.to_dict() | {"shared_as_routed": True})


def test_several_shared_experts_do_not_fit_a_slot():
    two = dataclasses.replace(TINY, n_shared_experts=2)
    with pytest.raises(UnsupportedConfigError, match=r"n_shared_experts = 2 .* --shared-as-routed"):
        dataclasses.replace(two, shared_as_routed=True)


def test_attention_costs_as_much_as_the_rest_at_the_published_context():
    """37 G active parameters, less the output head's; 61 x 128 x (192 + 128) products a pair."""
    expected = (37e9 - 129_280 * 7168) / (61 * 128 * (192 + 128))
    assert DEEPSEEK_V3.attention_parity_tokens == pytest.approx(expected, rel=0.02)


def test_a_config_without_rope_fields_rotates_plainly():
    values = {k: v for k, v in TINY.to_dict().items() if k != "rope_parameters"}
    assert ModelConfig.from_dict(values | {"rope_scaling": None}).rope == RopeConfig()


FP8_FIELDS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


@pytest.mark.parametrize(
    ("extra", "scale_fmt"),
    [
        ({}, None),
        ({"scale_fmt": "float", "modules_to_not_convert": None}, None),
        ({"scale_fmt": "ue8m0"}, "ue8m0"),
    ],
)
def test_published_quantization_is_understood_and_written_again(extra, scale_fmt):
    config = ModelConfig.from_dict(TINY.to_dict() | {"quantization_config": FP8_FIELDS | extra})
    assert config == dataclasses.replace(TINY, quantization_config=Fp8Config(scale_fmt=scale_fmt))
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quant_method": "awq"}, "quant_method"),
        ({"weight_block_size": [64, 64]}, "weight_block_size"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"activation_scheme": "static"}, "activation_scheme"),
        ({"fmt": "e5m2"}, "fmt"),
        ({"scale_fmt": "bf16"}, "scale_fmt"),
        ({"scale_fmt": []}, "scale_fmt"),
        ({"modules_to_not_convert": ["model.layers.0.mlp"]}, "modules_to_not_convert"),
        ({"expert_dtype": "fp4"}, "expert_dtype"),
        ({"bits": 4}, "bits"),
    ],
)
def test_other_quantization_is_rejected_by_name(change, named):
    with pytest.raises(UnsupportedConfigError, match=f"quantization_config.*{named}"):
        ModelConfig.from_dict(TINY.to_dict() | {"quantization_config": FP8_FIELDS | change})


@pytest.mark.parametrize("name", ["quant_method", "weight_block_size"])
def test_incomplete_quantization_settings_are_rejected(name):
    fields = {k: v for k, v in FP8_FIELDS.items() if k != name}
    with pytest.raises(UnsupportedConfigError, match=f"quantization_config {name} is missing"):
        ModelConfig.from_dict(TINY.to_dict() | {"quantization_config": fields})


def test_a_quantized_expert_is_a_byte_a_weight_and_its_scales():
    published = dataclasses.replace(
        TINY, hidden_size=7168, moe_intermediate_size=2048, quantization_config=Fp8Config()
    )
    assert published.expert_bytes == 3 * (2048 * 7168 + 16 * 56 * 4)
    ragged = dataclasses.replace(TINY, quantization_config=Fp8Config())
    assert ragged.expert_bytes == 3 * (128 * 48 + 4)


def test_yarn_sharpens_the_scores_of_the_published_model():
    published = dataclasses.replace(
        TINY, qk_nope_head_dim=128, qk_rope_head_dim=64, rope=RopeConfig(**YARN_FIELDS)
    )
    assert published.softmax_scale == pytest.approx(0.13523378, abs=1e-8)
    assert yarn_mscale(1.0, 1.0) == 1.0


def test_an_expert_is_three_matrices_of_two_bytes_a_weight():
    assert TINY.expert_bytes == 3 * 128 * 48 * 2
    assert TINY.num_moe_layers == 4
    assert TINY.latent_dim == 80


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("quantization_config", {"quant_method": "fp8"}),
        ("model_type", "deepseek_v2"),
        ("num_key_value_heads", 1),
        ("num_key_value_heads", []),
        ("hidden_size", 0),
        ("hidden_size", "128"),
        ("hidden_size", 128.5),
        ("hidden_size", True),
        ("norm_topk_prob", 1),
        ("rms_norm_eps", float("nan")),
        ("q_lora_rank", 0),
        ("qk_rope_head_dim", 7),
        ("first_k_dense_replace", 5),
        ("num_nextn_predict_layers", -1),
        ("n_group", 3),
        ("n_group", 32),
        ("topk_group", 9),
        ("num_experts_per_tok", 17),
        ("sliding_window", 4096),
        ("rope", {"rope_theta": 10000.0}),
    ],
)
def test_a_value_that_the_model_does_not_compute_is_rejected_by_name(name, value):
    with pytest.raises(UnsupportedConfigError, match=name):
        ModelConfig.from_dict(TINY.to_dict() | {name: value})


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "linear", "factor": 2.0}, "linear"),
        ({"rope_type": ["yarn"]}, "rope type"),
        ({"rope_type": "default", "type": "yarn", "factor": 2.0}, "rope type"),
        ({"rope_type": "yarn"}, "factor"),
        ({"rope_type": "yarn", "factor": 0.5}, "factor"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.5}, "beta_fast"),
        ({"rope_type": "yarn", "factor": "2"}, "factor"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}, "attention_factor"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ("yarn", "rope_parameters"),
    ],
)
def test_rope_fields_that_are_not_understood_are_rejected_by_name(rope, named):
    with pytest.raises(UnsupportedConfigError, match=named):
        ModelConfig.from_dict(TINY.to_dict() | {"rope_parameters": rope})


@pytest.mark.parametrize("name", ["vocab_size", "q_lora_rank", "topk_group"])
def test_a_missing_field_is_named(name):
    values = {k: v for k, v in TINY.to_dict().items() if k != name}
    with pytest.raises(UnsupportedConfigError, match=f"{name} is missing"):
        ModelConfig.from_dict(values)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_file_that_is_not_a_json_object_is_rejected_by_name(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedConfigError, match=r"config\.json"):
        ModelConfig.from_json(tmp_path / "config.json")


def test_several_end_tokens_are_read_and_written_again():
    config = ModelConfig.from_dict(TINY.to_dict() | {"eos_token_id": [1, 2]})
    assert config.eos_token_id == (1, 2)
    assert ModelConfig.from_dict(config.to_dict()) == config
    with pytest.raises(UnsupportedConfigError, match="eos_token_id"):
        ModelConfig.from_dict(TINY.to_dict() | {"eos_token_id": [1, "2"]})
