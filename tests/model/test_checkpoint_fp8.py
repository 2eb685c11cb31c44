import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from equipoise_model.checkpoint import Checkpoint, CheckpointError, save
from equipoise_model.checkpoint_convert import convert
from equipoise_model.checkpoint_digests import verified
from equipoise_model.checkpoint_manifest import MANIFEST
from equipoise_model.checkpoint_tensors import SCALE_SUFFIX
from equipoise_model.config import Fp8Config
from equipoise_model.generate import greedy
from equipoise_model.presets import TINY

TOKENS = torch.arange(30).view(2, 15)
# Sizes beyond a block, of which transformers guesses the blocks rightly: whole blocks, or one.
# `kv_a_proj_with_mqa` has 96 rows, a ragged block.
WIDE = dataclasses.replace(
    TINY,
    hidden_size=256,
    num_hidden_layers=3,
    n_routed_experts=8,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    qk_rope_head_dim=32,
)
# Blocks that are cut in both directions, as the published 576 rows are.
RAGGED = dataclasses.replace(
    WIDE, hidden_size=208, kv_lora_rank=144, moe_intermediate_size=136, q_lora_rank=None
)


@pytest.fixture(params=[Fp8Config(), Fp8Config(scale_fmt="ue8m0")], ids=["float", "ue8m0"])
def fp8(request):
    return request.param


@pytest.fixture(params=[WIDE, RAGGED], ids=["wide", "ragged"])
def saved(request, random_model, fp8, tmp_path):
    """A random model with MTP, and the folder of its FP8 checkpoint."""
    model = random_model(request.param, mtp=True)
    save(model, tmp_path / "fp8", fp8=fp8)
    return model, tmp_path / "fp8"


def test_fp8_weights_come_back_within_a_sixteenth(saved):
    model, path = saved
    checkpoint = Checkpoint.open(path)
    assert checkpoint.is_fp8
    assert checkpoint.config == model.config
    loaded = checkpoint.load_model(mtp=True).state_dict()
    for name, tensor in model.state_dict().items():
        # E4M3 has 3 bits behind the point, BF16 has 7; the smallest codes are 2^-9 apart.
        atol = 2**-9 / 448 * 2 * tensor.abs().max().item()
        torch.testing.assert_close(loaded[name], tensor, rtol=2**-4 + 2**-7, atol=atol, msg=name)


def test_stored_scales_multiply_stored_codes(saved):
    _, path = saved
    tensors = load_file(path / "model.safetensors")
    checkpoint = Checkpoint.open(path)
    pairs = [name for name in tensors if name + SCALE_SUFFIX in tensors]
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in pairs
    for name in pairs:
        codes, scales = tensors[name], tensors[name + SCALE_SUFFIX]
        rows, columns = codes.shape
        tall = scales.repeat_interleave(128, dim=0)[:rows]
        expected = codes.float() * tall.repeat_interleave(128, dim=1)[:, :columns]
        assert torch.equal(checkpoint.read(name), expected.bfloat16()), name


def test_scales_may_be_powers_of_two(saved, fp8):
    _, path = saved
    tensors = load_file(path / "model.safetensors")
    scales = torch.cat([t.flatten() for name, t in tensors.items() if name.endswith(SCALE_SUFFIX)])
    powers = scales.log2() == scales.log2().round()
    assert bool(powers.all()) == (fp8.scale_fmt == "ue8m0")


def test_a_payload_of_codes_is_the_bytes_of_the_file(saved):
    _, path = saved
    checkpoint = Checkpoint.open(path, keep_fp8=True)
    payload = checkpoint.read_expert(1, 3)
    assert payload.shape == (checkpoint.config.expert_bytes,)
    tensors = load_file(path / "model.safetensors")
    names = [f"model.layers.2.mlp.experts.3.{one}_proj.weight" for one in ("gate", "up", "down")]
    parts = [tensors[name] for name in names] + [tensors[name + SCALE_SUFFIX] for name in names]
    assert torch.equal(payload, torch.cat([part.view(torch.uint8).flatten() for part in parts]))


def test_a_payload_is_that_of_the_checkpoint_converted_to_bf16(saved, tmp_path):
    _, path = saved
    source = Checkpoint.open(path)
    convert(source, tmp_path / "bf16", fp8=None, max_shard_bytes=100_000)
    converted = Checkpoint.open(tmp_path / "bf16")
    assert not converted.is_fp8
    assert converted.config == source.config
    assert converted.has_mtp
    assert len(list((tmp_path / "bf16").glob("*.safetensors"))) > 1
    for layer in range(source.config.num_moe_layers):
        for expert in range(source.config.n_routed_experts):
            payload = source.read_expert(layer, expert)
            assert payload.shape == (source.config.expert_bytes,)
            assert torch.equal(payload, converted.read_expert(layer, expert))
    ours, theirs = source.load_model(mtp=True), converted.load_model(mtp=True)
    assert all(torch.equal(ours.state_dict()[n], t) for n, t in theirs.state_dict().items())
    assert greedy(ours, [[1, 2, 3]], max_tokens=5) == greedy(theirs, [[1, 2, 3]], max_tokens=5)


def test_checkpoints_of_other_payloads_have_other_fingerprints(saved):
    _, path = saved
    kept = verified(Checkpoint.open(path, keep_fp8=True))
    converted = verified(Checkpoint.open(path))
    assert kept.fingerprint != converted.fingerprint


def test_conversion_quantizes_what_saving_quantizes(random_model, fp8, tmp_path):
    model = random_model(RAGGED, mtp=True)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    save(model, tmp_path / "bf16")
    save(model, tmp_path / "fp8", fp8=fp8)
    progress_seen = []
    convert(
        Checkpoint.open(tmp_path / "bf16"),
        tmp_path / "converted",
        fp8=fp8,
        progress=lambda done, total: progress_seen.append((done, total)),
    )
    ours, theirs = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("fp8", "converted")
    )
    assert ours == theirs
    assert progress_seen[-1][0] == progress_seen[-1][1]
    assert sorted(progress_seen) == progress_seen


def test_fp8_is_not_quantized_again(saved, fp8, tmp_path):
    _, path = saved
    with pytest.raises(CheckpointError, match="already"):
        convert(Checkpoint.open(path), tmp_path / "again", fp8=fp8)


def test_a_checkpoint_is_not_converted_in_its_place(saved):
    _, path = saved
    with pytest.raises(CheckpointError, match="another folder"):
        convert(Checkpoint.open(path), path, fp8=None)


def test_copies_that_are_left_out_are_there_after_conversion(random_model, tmp_path):
    save(random_model(WIDE, mtp=True), tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    names = ["model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"]
    copies = [tensors.pop(name) for name in names]
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / MANIFEST).unlink()
    convert(Checkpoint.open(tmp_path / "a"), tmp_path / "b", fp8=None)
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert all(torch.equal(written[name], copy) for name, copy in zip(names, copies, strict=True))


EXPERT = "model.layers.1.mlp.experts.0.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop(EXPERT + SCALE_SUFFIX), f"{EXPERT}{SCALE_SUFFIX} is missing"),
        (lambda t: t.update({EXPERT: t[EXPERT].bfloat16()}), f"{EXPERT} is BF16"),
        (
            lambda t: t.update({EXPERT + SCALE_SUFFIX: torch.ones(9, 9)}),
            rf"{EXPERT}{SCALE_SUFFIX} is \[9, 9\]",
        ),
        (
            lambda t: t.update(
                {EXPERT + SCALE_SUFFIX: t[EXPERT + SCALE_SUFFIX].to(torch.float8_e8m0fnu)}
            ),
            f"{EXPERT}{SCALE_SUFFIX} is F8_E8M0",
        ),
    ],
    ids=["no scales", "no codes", "other blocks", "other scales"],
)
def test_codes_without_their_scales_are_named(saved, change, complaint):
    _, path = saved
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=complaint):
        Checkpoint.open(path)


@pytest.mark.filterwarnings("ignore")  # transformers' and accelerate's own
@pytest.mark.parametrize("shards", [None, 200_000])
def test_transformers_computes_the_same_from_fp8(random_model, fp8, tmp_path, shards):
    pytest.importorskip("accelerate", reason="transformers needs it for FP8")
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, FineGrainedFP8Config

    save(random_model(WIDE, mtp=True), tmp_path, fp8=fp8, max_shard_bytes=shards)
    theirs = DeepseekV3ForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        quantization_config=FineGrainedFP8Config(dequantize=True),
    )
    assert next(theirs.parameters()).dtype == torch.bfloat16
    ours = Checkpoint.open(tmp_path).load_model()
    torch.testing.assert_close(
        theirs.float().eval()(TOKENS).logits,
        ours.forward_train(TOKENS).logits_BTV,
        atol=1e-4,
        rtol=0,
    )
    # A model that transformers dequantised remembers it, and then cannot save itself.
    plain = DeepseekV3ForCausalLM(DeepseekV3Config(**ours.config.to_dict())).bfloat16()
    plain.load_state_dict(theirs.state_dict())
    plain.save_pretrained(tmp_path / "theirs")
    back = Checkpoint.open(tmp_path / "theirs").load_model()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.bfloat16()), name
