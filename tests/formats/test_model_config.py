import json
from pathlib import Path

import pytest

from equipoise.formats.errors import FormatError
from equipoise.formats.model_config import read_model_config

TINY = Path(__file__).parents[2] / "model" / "equipoise_model" / "checkpoints" / "tiny"
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_group": 8,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


@pytest.fixture
def config_of(write):
    return lambda values: read_model_config(write(json.dumps(values), "config.json"))


def test_an_expert_of_deepseek_v3_has_42_mib_of_weights_and_10_5_kib_of_scales(config_of):
    config = config_of(DEEPSEEK_V3)
    assert config.expert_bytes == 42 * 2**20 + 10752
    assert (config.num_experts, config.num_groups, config.first_moe_layer, config.top_k) == (
        256,
        8,
        3,
        8,
    )


def test_the_models_own_config_agrees_with_its_weights():
    config = read_model_config(TINY / "config.json")
    assert config.expert_bytes == 3 * 128 * 48 * 2
    assert (config.num_experts, config.first_moe_layer) == (32, 1)


def test_mixtrals_names_are_known(config_of):
    config = config_of(
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "dtype": "float16",
        }
    )
    assert (config.num_experts, config.num_groups) == (8, 1)
    assert config.expert_bytes == 3 * 4096 * 14336 * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_routed_experts": None}, "it has no n_routed_experts or .* it is not an MoE model"),
        ({"hidden_size": "7k"}, "hidden_size must be a whole number of 1 or more, not '7k'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "other than fp8 .* --expert-bytes"),
        ({"quantization_config": 3}, "other than fp8"),
        ({"quantization_config": None, "torch_dtype": "int3"}, "type 'int3' are not supported"),
    ],
)
def test_a_config_that_does_not_say_is_rejected(config_of, change, words):
    with pytest.raises(FormatError, match=rf"config\.json: .*{words}"):
        config_of({**DEEPSEEK_V3, **change})


@pytest.mark.parametrize("text", ["", "[" * 100_000, "3"])
def test_files_that_are_not_configs_are_rejected(write, text):
    with pytest.raises(FormatError):
        read_model_config(write(text))
