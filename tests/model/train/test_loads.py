import json

import numpy as np
import pytest

from equipoise_model.train import loads
from equipoise_model.train.data import DOMAINS
from equipoise_model.train.loads import LoadTrace, measure
from equipoise_model.train.loop import new_model


def _trace(code, english, arithmetic):
    tokens = {"code": code, "english": english, "arithmetic": arithmetic}
    return LoadTrace(
        window_tokens=8,
        top_k=1,
        assignments_of={name: np.array(value, dtype=np.int64) for name, value in tokens.items()},
    )


@pytest.fixture
def trace():
    """Two windows, one layer, four experts; english has the same mix as code, arithmetic not."""
    return _trace(
        code=[[[6, 2, 0, 0]], [[6, 2, 0, 0]]],
        english=[[[8, 0, 0, 0]], [[4, 4, 0, 0]]],
        arithmetic=[[[0, 0, 2, 6]], [[0, 0, 6, 2]]],
    )


def test_a_domain_s_figure_is_its_most_loaded_expert_against_the_mean(trace):
    assert trace.max_over_mean("code").tolist() == [3.0]
    assert trace.max_over_mean("arithmetic").tolist() == [2.0]


def test_the_mixed_figure_weighs_domains_evenly(trace):
    assert trace.max_over_mean().tolist() == pytest.approx([4 * (0.75 + 0.75) / 3])


def test_the_cosine_is_one_for_the_same_mix_and_zero_for_disjoint_experts(trace):
    assert trace.cosine("code", "english").tolist() == pytest.approx([1.0])
    assert trace.cosine("code", "arithmetic").tolist() == [0.0]


def test_a_trace_reads_back_as_it_was_written(trace, tmp_path):
    trace.write(tmp_path / "loads.json")
    again = LoadTrace.read(tmp_path / "loads.json")
    assert (again.window_tokens, again.top_k) == (8, 1)
    assert {name: tokens.tolist() for name, tokens in again.assignments_of.items()} == {
        name: tokens.tolist() for name, tokens in trace.assignments_of.items()
    }
    assert set(json.loads((tmp_path / "loads.json").read_text())) == {
        "window_tokens",
        "top_k",
        "domains",
    }


def test_heldout_text_is_cut_into_sequences_that_do_not_overlap(monkeypatch):
    source = np.arange(200, dtype=np.uint8)
    monkeypatch.setattr(loads, "text", lambda domain, split: source)
    sequences = loads._disjoint_sequences("code", num=20, num_tokens=10, seed=3)
    assert sorted(sequences.flatten().tolist()) == list(range(200))
    assert sequences.tolist() != sorted(sequences.tolist())


def test_every_token_of_every_window_chooses_top_k_experts(monkeypatch, small_config):
    source = np.random.default_rng(0).integers(97, 123, size=4096, dtype=np.uint8)
    monkeypatch.setattr(loads, "text", lambda domain, split: source)
    model = new_model(small_config, seed=0)
    heldout = measure(model, seed=0, num_windows=2, window_sequences=3, sequence_tokens=16)
    assert heldout.trace.window_tokens == 48
    for domain in DOMAINS:
        tokens_WLE = heldout.trace.assignments_of[domain]
        assert tokens_WLE.shape == (2, small_config.num_moe_layers, small_config.n_routed_experts)
        assert (tokens_WLE.sum(axis=2) == 48 * small_config.num_experts_per_tok).all()
        assert heldout.loss_of[domain] == pytest.approx(np.log(256), rel=0.05)
    again = measure(model, seed=0, num_windows=2, window_sequences=3, sequence_tokens=16)
    assert again.loss_of == heldout.loss_of
