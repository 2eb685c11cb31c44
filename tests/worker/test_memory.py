"""A worker compares its settings with the memory there is, before it loads anything."""

import json

import pytest
import torch

from equipoise.cli.explain import run
from equipoise.formats.packaged import packaged_checkpoint
from equipoise.rank.errors import WorkerError
from equipoise.worker import memory
from equipoise.worker.core import ModelCore
from equipoise.worker.memory import capacity_bytes
from equipoise.worker.settings import WorkerSettings
from equipoise_model.memory import GIB
from equipoise_model.presets import DEEPSEEK_V3
from tests.support.pretended_device import pretended_device


@pytest.fixture
def v3(tmp_path):
    """DeepSeek-V3's config.json; its weights are not needed."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3.to_dict()))

    def settings(**changes):
        chosen = {
            "checkpoint": tmp_path,
            "device": "cuda",
            "device_memory_gib": 139,
            "batch_invariant": False,
            "num_ranks": 8,
            "slots_per_rank": 36,
            "explain": True,
        }
        return WorkerSettings(**chosen | changes)

    return settings


def test_a_worker_that_needs_too_much_memory_does_not_start(settings):
    with pytest.raises(
        WorkerError, match=r"memory: this rank needs .* GiB, .* GiB more than"
    ) as no:
        ModelCore.load(settings(device_memory_gib=0.004, cache_tokens=96 * 1024))
    assert "latents take" in str(no.value)
    assert "lower --cache-tokens" in str(no.value)
    assert ModelCore.load(settings(device_memory_gib=1)).cache.num_blocks


def test_memory_is_what_is_free_or_what_is_given(settings, tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CONTAINER_LIMITS", (limit, tmp_path / "absent"))
    machine = capacity_bytes(settings(), torch.device("cpu"))
    for text, expected in (("max\n", machine), ("4096\n", 4096)):
        limit.write_text(text)
        assert capacity_bytes(settings(), torch.device("cpu")) == expected
    limit.write_text("max\n")
    assert capacity_bytes(settings(device_memory_gib=0.5), torch.device("cpu")) == GIB // 2
    with pretended_device():
        assert capacity_bytes(settings(), torch.device("cuda", 0)) == 2**40
        assert capacity_bytes(settings(device_memory_gib=2), torch.device("cuda", 0)) == 2 * GIB


def test_explain_lists_every_term_and_says_whether_they_fit(v3, capsys):
    assert run(v3()) == 0
    shown = capsys.readouterr().out
    for name in ("dense weights", "experts", "staging slots", "latents", "exchange buffers"):
        assert f"\n  {name} " in shown
    assert "36 slots x 58 MoE layers x 44.05 MB" in shown
    assert "fits: " in shown
    assert run(v3(cache_tokens=2**20)) == 1
    assert "latents take 68.6 GiB: lower --cache-tokens" in capsys.readouterr().out
    assert run(v3(latents="fp8", cache_tokens=400_000)) == 0


@pytest.mark.parametrize(
    ("changes", "positions"),
    [({}, 64), ({"block_tokens": 16}, 16), ({"weights": "bf16", "batch_invariant": True}, 16)],
)
def test_explain_counts_blocks_as_a_worker_would_have_them(v3, changes, positions, capsys):
    # One more, which stays zero.
    run(v3(cache_tokens=65_536, **changes))
    assert f"{65_536 + positions} tokens x" in capsys.readouterr().out


def test_row_blocks_attend_to_whole_stretches_of_the_cache(v3, capsys):
    def activations(**changes):
        run(v3(json=True, weights="bf16", max_requests=8, max_step_tokens=8, **changes))
        terms = json.loads(capsys.readouterr().out)["terms"]
        return next(term["num_bytes"] for term in terms if term["name"] == "activations")

    # Scores of a head, and latents, per query and position.
    pair = 128 * 10 + 576 * 2
    fast, blocks = (activations(batch_invariant=b, context_length=40_000) for b in (False, True))
    assert 8 * 40_000 * pair < fast < 1.5 * 8 * 40_000 * pair
    assert 16 * 65_536 * pair < blocks < 1.5 * 16 * 65_536 * pair


def test_explain_prints_json(v3, capsys):
    assert run(v3(json=True)) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fits"] is True
    assert shown["obstacle"] is None
    assert shown["needed_bytes"] == sum(term["num_bytes"] for term in shown["terms"])
    assert shown["capacity_bytes"] == 139 * GIB
    assert {term["name"] for term in shown["host_terms"]} == {"process", "experts of a new epoch"}
    assert run(v3(json=True, num_ranks=4, slots_per_rank=64)) == 1
    assert "use more ranks" in json.loads(capsys.readouterr().out)["obstacle"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_explain_plans_for_a_device_that_is_not_here(v3, capsys):
    assert run(v3(device_memory_gib=0)) == 0
    assert "give its memory with --device-memory-gib" in capsys.readouterr().out
    with pytest.raises(WorkerError, match="FP8 is not available: batch-invariant mode"):
        run(v3(batch_invariant=True))
    with pytest.raises(WorkerError, match=r"config\.json"):
        run(v3(checkpoint=packaged_checkpoint().parent))
    # The packaged model, on this machine's CPU.
    assert run(WorkerSettings(explain=True)) == 0
