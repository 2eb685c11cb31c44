import math

import pytest
import torch

from equipoise_kernels.plain.rotate import rotate
from equipoise_model.config import RopeConfig
from equipoise_model.rope import Rope, frequencies


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(),
        RopeConfig(rope_theta=500.0),
        RopeConfig(factor=40.0, original_max_position_embeddings=4096),
        RopeConfig(
            factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
        ),
        RopeConfig(factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.2),
        RopeConfig(factor=4.0, original_max_position_embeddings=8, beta_fast=1.0, beta_slow=1.0),
    ],
)
def test_frequencies_are_those_of_transformers(rope):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    from equipoise_model.config_parts import rope_to_dict

    theirs = DeepseekV3RotaryEmbedding(
        DeepseekV3Config(qk_rope_head_dim=64, rope_parameters=rope_to_dict(rope))
    )
    inv_freq, factor = frequencies(rope, dim=64)
    torch.testing.assert_close(torch.tensor(inv_freq), theirs.inv_freq, rtol=1e-5, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_a_pair_turns_like_a_complex_number(config):
    dim = config.qk_rope_head_dim
    positions = torch.tensor([0, 1, 17, 255])
    x = torch.randn(4, dim, generator=torch.Generator().manual_seed(0))
    inv_freq, factor = frequencies(config.rope, dim=dim)
    angles = positions[:, None].double() * torch.tensor(inv_freq).double()
    turned = torch.view_as_complex(x.double().unflatten(1, (-1, 2))) * torch.polar(
        torch.full_like(angles, float(factor)), angles
    )
    rotated = rotate(x, *Rope(config).at(positions))
    expected = torch.cat([turned.real, turned.imag], dim=1).float()
    torch.testing.assert_close(rotated, expected, atol=1e-4, rtol=0)


def test_scores_depend_on_the_distance_only(config):
    query, key = torch.randn(2, config.qk_rope_head_dim, generator=torch.Generator().manual_seed(1))
    rope = Rope(config)

    def score(query_position, key_position):
        at = torch.tensor([query_position, key_position])
        turned_query, turned_key = rotate(torch.stack([query, key]), *rope.at(at))
        return float(turned_query @ turned_key)

    assert score(30, 23) == pytest.approx(score(207, 200), abs=1e-3)
    assert not math.isclose(score(30, 23), score(30, 24), abs_tol=1e-3)


def test_the_result_keeps_the_type_of_its_input(config):
    cos, sin = Rope(config).at(torch.tensor([3]))
    assert cos.dtype == torch.float32
    x = torch.ones(1, config.qk_rope_head_dim, dtype=torch.bfloat16)
    assert rotate(x, cos, sin).dtype == torch.bfloat16
