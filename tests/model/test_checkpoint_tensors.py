import dataclasses
import json

import pytest
import torch

from equipoise_model.checkpoint import Checkpoint
from equipoise_model.checkpoint_shard import StoredTensor, header_of
from equipoise_model.checkpoint_tensors import SCALE_SUFFIX, tensor_specs
from equipoise_model.config import Fp8Config
from equipoise_model.plain.transformer import Transformer
from equipoise_model.presets import DEEPSEEK_V3
from equipoise_model.tensor_names import dense_tensors, expert_tensors, mtp_copies


@pytest.fixture(scope="module")
def published():
    return tensor_specs(DEEPSEEK_V3)


def test_the_manifest_of_the_published_model_has_its_tensors_and_bytes(published):
    assert len(published) == 91_991
    assert sum(spec.num_bytes for spec in published.values()) == 688_574_839_360
    main = tensor_specs(DEEPSEEK_V3, mtp=False)
    assert len(main) == 90_427
    assert sum(spec.num_bytes for spec in main.values()) == 673_150_611_808


@pytest.mark.parametrize(
    ("name", "shape", "scales"),
    [
        ("layers.0.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), (5, 56)),
        ("layers.0.self_attn.q_a_proj.weight", (1536, 7168), (12, 56)),
        ("layers.60.self_attn.kv_b_proj.weight", (32768, 512), (256, 4)),
        ("layers.2.mlp.down_proj.weight", (7168, 18432), (56, 144)),
        ("layers.61.mlp.experts.255.up_proj.weight", (2048, 7168), (16, 56)),
        ("layers.3.mlp.shared_experts.down_proj.weight", (7168, 2048), (56, 16)),
    ],
)
def test_linear_maps_of_the_published_model_are_pairs(published, name, shape, scales):
    weight, scale = published[f"model.{name}"], published[f"model.{name}{SCALE_SUFFIX}"]
    assert (weight.dtype, weight.shape) == ("F8_E4M3", shape)
    assert (scale.dtype, scale.shape) == ("F32", scales)


@pytest.mark.parametrize(
    "name", ["lm_head", "model.layers.3.mlp.gate", "model.layers.61.eh_proj", "model.norm"]
)
def test_what_is_sensitive_stays_in_bf16(published, name):
    assert published[f"{name}.weight"].dtype == "BF16"
    assert f"{name}.weight{SCALE_SUFFIX}" not in published


def test_the_published_model_opens_though_it_is_larger_than_memory_and_disk(published, tmp_path):
    places, end = {}, 0
    for name, spec in published.items():
        begin, end = end, end + spec.num_bytes
        places[name] = StoredTensor(dtype=spec.dtype, shape=spec.shape, start=begin, end=end)
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3.to_dict()))
    with (tmp_path / "model.safetensors").open("wb") as stream:
        header = header_of(places)
        stream.write(header)
        last = places["model.layers.60.mlp.experts.255.down_proj.weight" + SCALE_SUFFIX]
        stream.seek(len(header) + last.end - 1)
        stream.write(b"\x7f")
        stream.truncate(len(header) + end)  # all the rest is a hole
    checkpoint = Checkpoint.open(tmp_path, keep_fp8=True)
    assert checkpoint.has_mtp
    assert checkpoint.is_fp8
    payload = checkpoint.read_expert(57, 255)
    assert payload.shape == (44_050_944,)
    assert payload.count_nonzero() == 1
    assert payload[-1] == 0x7F


@pytest.mark.parametrize("mtp", [True, False])
def test_the_manifest_names_the_tensors_of_the_model(config, mtp):
    with torch.device("meta"):
        model = Transformer(config, mtp=mtp)
    tensors = dense_tensors(model) | expert_tensors(model) | mtp_copies(model)
    specs = tensor_specs(config, mtp=mtp)
    assert {name: spec.shape for name, spec in specs.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert {name for name, spec in specs.items() if spec.optional} == set(mtp_copies(model))


def test_quantization_adds_scales_and_nothing_else(config):
    plain = tensor_specs(config)
    quantized = tensor_specs(dataclasses.replace(config, quantization_config=Fp8Config()))
    assert plain.keys() == {name for name in quantized if not name.endswith(SCALE_SUFFIX)}
    pairs = [name for name, spec in quantized.items() if spec.dtype == "F8_E4M3"]
    assert len(quantized) == len(plain) + len(pairs)
    assert all(plain[name].shape == quantized[name].shape for name in plain)
