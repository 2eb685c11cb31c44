"""The committed checkpoint: it opens, its record is true, its router behaves as tests assume."""

import itertools
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

import equipoise_model
from equipoise.planning.balance import balancedness, rank_loads
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology
from equipoise_model.checkpoint import Checkpoint
from equipoise_model.plain.transformer import Transformer
from equipoise_model.presets import TINY
from equipoise_model.train import __main__ as command
from equipoise_model.train.data import DOMAINS
from equipoise_model.train.loads import LoadTrace, measure
from equipoise_model.train.loop import TrainSettings

FOLDER = Path(equipoise_model.__file__).parent / "checkpoints" / "tiny"
SHIFTS = [("code", "arithmetic", 1.45), ("arithmetic", "english", 1.4)]
POOL = Topology(node_of_rank=("a", "a", "b", "b"), slots_per_rank=10)


@pytest.fixture(scope="module")
def trace():
    return LoadTrace.read(FOLDER / "loads.json")


@pytest.fixture(scope="module")
def record():
    return json.loads((FOLDER / "training.json").read_text())


def _planned(load_LE):
    shape = ModelShape(
        num_layers=TINY.num_moe_layers,
        num_experts=TINY.n_routed_experts,
        num_groups=TINY.n_group,
        expert_bytes=TINY.expert_bytes,
    )
    return plan(
        load_LE.astype(np.float64),
        model=shape,
        topology=POOL,
        current=None,
        algorithm=Algorithm.AUTO,
    ).expert_of_slot


def _max_over_mean(expert_of_slot, load_LE):
    loads = rank_loads(expert_of_slot, load=load_LE.astype(np.float64), num_ranks=POOL.num_ranks)
    return 1 / balancedness(loads)


def test_the_checkpoint_is_small_and_of_the_tiny_preset():
    assert (FOLDER / "model.safetensors").stat().st_size <= 8 * 10**6
    checkpoint = Checkpoint.open(FOLDER)
    assert checkpoint.config == TINY
    assert checkpoint.has_mtp


def test_the_router_is_specialised_and_even_over_the_mix(trace):
    assert trace.max_over_mean().max() <= 1.6
    for domain in DOMAINS:
        assert trace.max_over_mean(domain).mean() >= 2


@pytest.mark.parametrize(("before", "after", "least"), SHIFTS)
def test_a_shift_of_traffic_puts_a_fitting_layout_out_of_balance(trace, before, after, least):
    layouts = [_planned(window) for window in trace.assignments_of[before]]
    load = trace.assignments_of[after].sum(axis=0)
    assert np.mean([_max_over_mean(layout, load) for layout in layouts]) >= least


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_layout_for_one_window_fits_the_next_of_the_same_domain(trace, domain):
    windows = trace.assignments_of[domain]
    for seen, unseen in itertools.pairwise(windows):
        assert _max_over_mean(_planned(seen), unseen) <= 1.15


def test_the_record_names_its_settings_command_and_figures(record, trace):
    settings = TrainSettings(**record["settings"])
    parsed = vars(command._parser().parse_args(shlex.split(record["command"])[3:]))
    assert {name: parsed[name] for name in record["settings"]} == record["settings"]
    assert record["curve"][-1]["step"] == settings.steps - 1
    for domain in DOMAINS:
        expected = trace.max_over_mean(domain).tolist()
        assert record["experts"][domain]["layers"] == pytest.approx(expected, abs=1e-4)


def test_the_shipped_weights_reproduce_the_recorded_losses_here(record, trace):
    """Loosely, because another Python has other text."""
    checkpoint = Checkpoint.open(FOLDER)
    model = Transformer(TINY)
    checkpoint.load_dense(model)
    checkpoint.load_slots(model, torch.arange(32).expand(TINY.num_moe_layers, -1).numpy())
    heldout = measure(model, seed=5, num_windows=1, window_sequences=4)
    for domain in DOMAINS:
        assert heldout.loss_of[domain] == pytest.approx(record["heldout_loss"][domain], abs=0.4)
        own, recorded = heldout.trace.load(domain), trace.load(domain)
        norms = np.linalg.norm(own, axis=1) * np.linalg.norm(recorded, axis=1)
        assert ((own * recorded).sum(axis=1) / norms).min() > 0.9


def test_without_the_specialization_loss_domains_share_more_experts(trace):
    without = LoadTrace.read(FOLDER / "loads-without-specialization.json")
    for one, other in itertools.combinations(DOMAINS, 2):
        assert without.cosine(one, other).mean() > trace.cosine(one, other).mean() + 0.1
