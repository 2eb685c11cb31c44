"""Every way to serve a text, alone and over ranks, against the logits of transformers."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise_model.config import RopeConfig
from equipoise_model.dispatch import ExpertParallel
from tests.support.rank_processes import run_ranks
from tests.support.serving_paths import GROUP_SIZES, served_logits, texts
from tests.support.small_models import SMALL

PROGRAM = Path(__file__).with_name("serving_rank.py")

DEFAULT_ROPE = dataclasses.replace(SMALL, num_hidden_layers=2, n_group=1, topk_group=1)
YARN = RopeConfig(factor=8.0, original_max_position_embeddings=32, mscale=0.707, mscale_all_dim=1.0)
CONFIGS = {
    "default rope": DEFAULT_ROPE,
    "yarn beyond its original length": dataclasses.replace(DEFAULT_ROPE, rope=YARN),
    "queries in one piece": dataclasses.replace(DEFAULT_ROPE, q_lora_rank=None),
    "several groups": dataclasses.replace(
        DEFAULT_ROPE, n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=3
    ),
    "several shared experts": dataclasses.replace(DEFAULT_ROPE, n_shared_experts=3),
    "weights that do not sum to one": dataclasses.replace(
        DEFAULT_ROPE, norm_topk_prob=False, routed_scaling_factor=1.7, num_experts_per_tok=4
    ),
    "all at once": dataclasses.replace(
        DEFAULT_ROPE,
        rope=YARN,
        q_lora_rank=None,
        v_head_dim=32,
        n_routed_experts=16,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=0,
    ),
}
"""All have router biases of both signs, mostly negative."""


def layout_of(config):
    """Half as many slots again as experts; any expert may have two or more."""
    rng = np.random.default_rng(config.n_routed_experts)
    experts, extra = np.arange(config.n_routed_experts), config.n_routed_experts // 2
    rows = [
        rng.permutation(np.concatenate([experts, rng.permutation(experts)[:extra]]))
        for _ in range(config.num_moe_layers)
    ]
    return np.array(rows)


@pytest.fixture
def cases(random_model, hugging_face):
    """By config: what serves it, texts for four ranks, and what transformers says of them."""
    made = {}
    for name, config in CONFIGS.items():
        model = random_model(config)
        tokens = torch.stack(
            [texts(config.vocab_size, seed=seed) for seed in range(max(GROUP_SIZES))]
        )
        theirs = hugging_face(model)(tokens.flatten(0, 1)).logits.unflatten(0, tokens.shape[:2])
        assert theirs.std() > 0.1
        made[name] = {
            "config": config,
            "state": model.state_dict(),
            "tokens": tokens,
            "layout": layout_of(config),
            "theirs": theirs,
        }
    return made


def logits_of_ranks(models, *, folder):
    """What every rank saw: by its group's size, model and form the logits of its own texts."""
    results = [folder / f"result-{rank}" for rank in range(max(GROUP_SIZES))]
    run_ranks(
        PROGRAM,
        [(str(rank), folder / "rendezvous", models, result) for rank, result in enumerate(results)],
    )
    return [torch.load(result) for result in results]


def test_however_and_wherever_a_text_is_served_its_logits_are_those_of_transformers(
    cases, random_model, tmp_path
):
    for name, case in cases.items():
        for row_block in (None, 16):
            model = random_model(case["config"], row_block=row_block)
            ours = served_logits(model, ExpertParallel.local(case["config"]), case["tokens"][0])
            assert_near(ours, case["theirs"][0], of=f"{name}, one rank, rows by {row_block}")
    models = tmp_path / "models"
    torch.save(cases, models)
    for rank, seen in enumerate(logits_of_ranks(models, folder=tmp_path)):
        assert seen.keys() == {size for size in GROUP_SIZES if rank < size}
        for size, logits in seen.items():
            assert len(logits) == 2 * len(CONFIGS)
            for (name, row_block), ours in logits.items():
                place = f"{name}, rank {rank} of {size}, rows by {row_block}"
                assert_near(ours, cases[name]["theirs"][rank], of=place)


def assert_near(ours, theirs, *, of):
    torch.testing.assert_close(
        ours, theirs, atol=1e-4, rtol=0, check_stride=False, msg=lambda text: f"{of}: {text}"
    )
