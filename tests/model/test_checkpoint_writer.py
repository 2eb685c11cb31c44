import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from equipoise_model.checkpoint import Checkpoint, CheckpointError, save
from equipoise_model.checkpoint_manifest import MANIFEST
from equipoise_model.checkpoint_tensors import SCALE_SUFFIX, tensor_specs
from equipoise_model.config import Fp8Config

INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(config, random_model):
    return random_model(config, mtp=True)


def files(path):
    return sorted(file.name for file in path.iterdir())


def test_tensors_are_distributed_over_shards_of_a_size(model, tmp_path):
    save(model, tmp_path, max_shard_bytes=60_000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    count = len(shards)
    assert count > 3
    assert [f.name for f in shards] == [
        f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)
    ]
    for file in shards:
        held = load_file(file)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 60_000


def test_the_index_lists_the_file_of_every_tensor(model, tmp_path):
    save(model, tmp_path, max_shard_bytes=60_000)
    index = json.loads((tmp_path / INDEX).read_text())
    assert set(index["weight_map"]) == set(tensor_specs(model.config))
    held = {file: set(load_file(tmp_path / file)) for file in set(index["weight_map"].values())}
    assert all(name in held[file] for name, file in index["weight_map"].items())
    specs = tensor_specs(model.config).values()
    assert index["metadata"]["total_size"] == sum(spec.num_bytes for spec in specs)


def test_shards_and_one_file_hold_the_same(model, tmp_path):
    save(model, tmp_path / "one")
    save(model, tmp_path / "many", max_shard_bytes=60_000)
    one, many = (Checkpoint.open(tmp_path / n).load_model(mtp=True) for n in ("one", "many"))
    for name, tensor in one.state_dict().items():
        assert torch.equal(many.state_dict()[name], tensor), name


def test_scales_lie_beside_their_codes(model, tmp_path):
    save(model, tmp_path, fp8=Fp8Config(), max_shard_bytes=20_000)
    file_of = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    pairs = [name for name in file_of if name + SCALE_SUFFIX in file_of]
    assert len(pairs) > 10
    assert all(file_of[name] == file_of[name + SCALE_SUFFIX] for name in pairs)


def test_files_are_as_the_library_writes_them(model, tmp_path):
    save(model, tmp_path, fp8=Fp8Config())
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        names = set(file.keys())
    assert names == set(tensor_specs(Checkpoint.open(tmp_path, keep_fp8=True).config))


def test_one_kind_of_checkpoint_replaces_the_other(model, tmp_path):
    for shards in (None, 60_000, 200_000, None):
        save(model, tmp_path, max_shard_bytes=shards)
        Checkpoint.open(tmp_path)
        left = files(tmp_path)
        assert (INDEX in left) == (shards is not None)
        assert ("model.safetensors" in left) == (shards is None)
        assert not [name for name in left if name.endswith(".new")]
    assert left == ["config.json", MANIFEST, "model.safetensors"]


def test_a_save_that_fails_leaves_the_old_checkpoint(model, tmp_path, monkeypatch):
    save(model, tmp_path)
    before = Checkpoint.open(tmp_path).fingerprint

    def fail(done, total):
        if done > total / 2:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        save(model, tmp_path, max_shard_bytes=60_000, progress=fail)
    assert Checkpoint.open(tmp_path).fingerprint == before
    save(model, tmp_path)
    assert files(tmp_path) == ["config.json", MANIFEST, "model.safetensors"]


def test_progress_reaches_the_whole(model, tmp_path):
    calls_of = {"save": [], "dense": [], "slots": []}

    def note(kind):
        return lambda done, total: calls_of[kind].append((done, total))

    save(model, tmp_path, progress=note("save"))
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.load_dense(model, progress=note("dense"))
    experts = [range(model.config.n_routed_experts)] * model.config.num_expert_layers
    checkpoint.load_slots(model, experts, progress=note("slots"))
    for calls in calls_of.values():
        assert calls[-1][0] == calls[-1][1]
        assert [done for done, _ in calls] == sorted({done for done, _ in calls})
        assert len({total for _, total in calls}) == 1
    assert calls_of["save"][-1][1] == sum(
        spec.num_bytes for spec in tensor_specs(model.config).values()
    )


def test_a_shard_that_lost_a_tensor_of_the_index_is_named(model, tmp_path):
    save(model, tmp_path, max_shard_bytes=60_000)
    index = json.loads((tmp_path / INDEX).read_text())
    wrong = index["weight_map"]["lm_head.weight"]
    index["weight_map"]["model.embed_tokens.weight"] = wrong
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{wrong}: model\.embed_tokens\.weight is missing"):
        Checkpoint.open(tmp_path)


def test_a_truncated_shard_is_named_with_its_tensor(model, tmp_path):
    save(model, tmp_path, max_shard_bytes=60_000)
    file = sorted(tmp_path.glob("*.safetensors"))[2]
    last = max(load_file(file))
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(CheckpointError, match=rf"{file.name} is damaged.*: {last} ends at byte"):
        Checkpoint.open(tmp_path)
