import pytest
import torch

from equipoise_model.config import ModelConfig, UnsupportedConfigError
from equipoise_model.presets import DEEPSEEK_V2_LITE_SIZED, DEEPSEEK_V3, PRESETS, TINY, preset
from equipoise_model.transformer import Transformer


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


def test_the_largest_preset_caches_what_its_report_says():
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


def test_transformers_understands_the_largest_preset():
    from transformers import DeepseekV3Config

    theirs = DeepseekV3Config(**DEEPSEEK_V3.to_dict())
    assert theirs.rope_parameters["factor"] == 40.0
    assert theirs.quantization_config["weight_block_size"] == [128, 128]


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedConfigError, match=r"'huge'.*deepseek-v3"):
        preset("huge")
