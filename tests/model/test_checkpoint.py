import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from equipoise_model.checkpoint import Checkpoint, CheckpointError, save
from equipoise_model.checkpoint_digests import verified
from equipoise_model.checkpoint_manifest import MANIFEST
from equipoise_model.config import UnsupportedConfigError
from equipoise_model.generate import greedy
from equipoise_model.plain.transformer import Transformer
from equipoise_model.presets import TINY

TOKENS = torch.arange(30).view(2, 15)
SMALL = dataclasses.replace(TINY, num_hidden_layers=3, n_routed_experts=16)


def rounded(model):
    """The model as BF16 keeps it, router biases aside."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    return model


@pytest.fixture
def saved(random_model, tmp_path):
    """A random model with MTP, already rounded, and the folder of its checkpoint."""
    model = rounded(random_model(SMALL, mtp=True))
    save(model, tmp_path / "checkpoint")
    return model, tmp_path / "checkpoint"


def rewrite(path, change):
    """Save the weights again after `change` has worked on them, on purpose: without a manifest."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    (path / MANIFEST).unlink(missing_ok=True)


def test_a_saved_model_comes_back_exactly(config, random_model, tmp_path):
    model = rounded(random_model(config, mtp=True))
    save(model, tmp_path)
    again = Checkpoint.open(tmp_path).load_model(mtp=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_transformers_loads_what_we_save(config, random_model, tmp_path):
    from transformers import DeepseekV3ForCausalLM

    model = rounded(random_model(config, mtp=True))
    save(model, tmp_path)
    theirs = DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(
        theirs(TOKENS).logits, model.forward_train(TOKENS).logits_BTV, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("max_shard_size", ["1GB", "50KB"])
def test_we_load_what_transformers_saves(
    config, random_model, hugging_face, tmp_path, max_shard_size
):
    model = rounded(random_model(config))
    hugging_face(model).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "50KB")
    assert not Checkpoint.open(tmp_path).has_mtp
    loaded = Checkpoint.open(tmp_path).load_model().state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor.bfloat16()), name


def test_a_loaded_model_computes_in_the_requested_form(saved):
    model, path = saved
    loaded = Checkpoint.open(path).load_model(row_block=16)
    assert loaded.row_block == 16
    assert not loaded.training
    assert greedy(loaded, [[1, 2, 3]], max_tokens=5) == greedy(model, [[1, 2, 3]], max_tokens=5)


def test_an_experts_payload_is_its_bytes_in_the_file(saved):
    _, path = saved
    checkpoint = Checkpoint.open(path)
    payload = checkpoint.read_expert(1, 3)
    assert payload.dtype == torch.uint8
    assert payload.shape == (checkpoint.config.expert_bytes,)
    with safe_open(path / "model.safetensors", framework="pt") as file:
        parts = [
            file.get_tensor(f"model.layers.2.mlp.experts.3.{name}_proj.weight").flatten()
            for name in ("gate", "up", "down")
        ]
    assert torch.equal(payload.view(torch.bfloat16), torch.cat(parts))


def test_slots_hold_the_experts_that_the_table_names(saved):
    model, path = saved
    checkpoint = Checkpoint.open(path)
    rank = Transformer(checkpoint.config, num_slots=3)
    checkpoint.load_slots(rank, [[7, 0, 7], [2, 1, 0]])
    for layer, experts in enumerate([[7, 0, 7], [2, 1, 0]]):
        for slot, expert in enumerate(experts):
            ours = rank.moe_layers[layer].experts.read(slot)
            assert torch.equal(ours, model.moe_layers[layer].experts.read(expert))


def test_a_model_with_mtp_needs_a_checkpoint_with_it(config, random_model, tmp_path):
    save(random_model(config), tmp_path)
    with pytest.raises(CheckpointError, match="multi-token-prediction"):
        Checkpoint.open(tmp_path).load_dense(Transformer(config, mtp=True))


def test_readers_of_the_config_also_read_the_weights(saved):
    _, path = saved
    modes = [(path / name).stat().st_mode for name in ("config.json", "model.safetensors")]
    assert modes[0] == modes[1]


def test_saving_again_replaces_the_checkpoint(random_model, tmp_path):
    save(random_model(TINY, seed=0), tmp_path)
    before = Checkpoint.open(tmp_path).fingerprint
    save(random_model(TINY, seed=1), tmp_path)
    assert Checkpoint.open(tmp_path).fingerprint != before
    left = sorted(file.name for file in tmp_path.iterdir())
    assert left == ["config.json", MANIFEST, "model.safetensors"]


def test_the_fingerprint_is_the_same_wherever_the_same_checkpoint_is(saved, tmp_path):
    model, path = saved
    save(model, tmp_path / "copy")
    config = tmp_path / "copy" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"transformers_version": "9"}))
    first, second = (
        Checkpoint.open(path).fingerprint,
        Checkpoint.open(tmp_path / "copy").fingerprint,
    )
    assert first == second
    assert len(bytes.fromhex(first)) == 16


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.experts.0.up_proj.weight"])
def test_the_fingerprint_sees_other_weights(saved, name):
    _, path = saved
    before = Checkpoint.open(path).fingerprint
    rewrite(path, lambda tensors: tensors[name].neg_())
    assert verified(Checkpoint.open(path)).fingerprint != before


def test_the_fingerprint_sees_another_config(saved):
    _, path = saved
    before = Checkpoint.open(path).fingerprint
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"routed_scaling_factor": 1.5}))
    assert Checkpoint.open(path).fingerprint != before


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(saved, file):
    _, path = saved
    (path / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        Checkpoint.open(path)


def test_a_config_that_is_not_supported_is_rejected(saved):
    _, path = saved
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_act": "gelu"}))
    with pytest.raises(UnsupportedConfigError, match="hidden_act"):
        Checkpoint.open(path)


EXPERT = "model.layers.1.mlp.experts.0.up_proj.weight"
MTP_NORM = "model.layers.3.enorm.weight"
COPY = "model.layers.3.embed_tokens.weight"


@pytest.mark.parametrize("name", [EXPERT, MTP_NORM, "model.norm.weight"])
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensors, name: tensors.pop(name), "is missing"),
        (lambda tensors, name: tensors.update({name: tensors[name][:-1].clone()}), "implies"),
        (lambda tensors, name: tensors.update({name: tensors[name].half()}), "F16"),
        (lambda tensors, name: tensors.update({f"{name}_scale_inv": torch.ones(1)}), "not part"),
    ],
    ids=["gone", "cut", "of another type", "quantised"],
)
def test_a_tensor_that_does_not_fit_is_named(saved, name, change, complaint):
    _, path = saved
    rewrite(path, lambda tensors: change(tensors, name))
    with pytest.raises(CheckpointError, match=complaint) as caught:
        Checkpoint.open(path)
    assert name in str(caught.value)


def test_copies_of_the_embedding_may_be_left_out_but_not_be_wrong(saved):
    _, path = saved
    rewrite(path, lambda tensors: tensors.pop(COPY))
    assert Checkpoint.open(path).has_mtp
    rewrite(path, lambda tensors: tensors.update({COPY: torch.ones(2, 2)}))
    with pytest.raises(CheckpointError, match=COPY):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ("{", "not an index"),
        ("[]", "not an index"),
        ('{"weight_map": {"a": 1}}', "not an index"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "a is listed in"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "a is listed in '/etc/passwd'"),
        ('{"weight_map": {"a": ".."}}', "a is listed in"),
        ('{"weight_map": {"a": ""}}', "a is listed in"),
        ('{"weight_map": {"a": "config.json"}}', "a is listed in"),
        ('{"weight_map": {"a": "model.safetensors"}}', "a is missing"),
        ('{"weight_map": {"a": "other.safetensors"}}', r"other\.safetensors is missing"),
    ],
)
def test_an_index_that_leads_nowhere_is_rejected(saved, index, complaint):
    _, path = saved
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=complaint):
        Checkpoint.open(path)
