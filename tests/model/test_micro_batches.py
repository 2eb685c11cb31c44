"""Steps that ranks in processes cut into two micro-batches, against the same steps uncut."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise_model.plain.transformer import Transformer
from tests.model.micro_batch_rank import TIMEOUT_S, TOKENS
from tests.support.rank_processes import run_ranks
from tests.support.small_models import SMALL as CONFIG

PROGRAM = Path(__file__).with_name("micro_batch_rank.py")

GROUP_SIZES = (2, 3)
"""A row has two choices: two ranks send all rows to each other, three exchange counts."""

NUM_SLOTS = 12


def layout_of(seed):
    rng = np.random.default_rng(seed)
    experts = np.r_[np.arange(8), rng.integers(0, 8, NUM_SLOTS - 8)]
    return np.array([rng.permutation(experts) for _ in range(CONFIG.num_moe_layers)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What every rank of each group saw: by group size, a list by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    model = Transformer(CONFIG, row_block=16)
    cases = {
        size: {"config": CONFIG, "layout": layout_of(size), "state": model.state_dict()}
        for size in GROUP_SIZES
    }
    torch.save(cases, folder / "models")
    run_ranks(
        PROGRAM,
        [
            (rank, size, folder / f"meet-{size}", folder / "models", folder / f"{size}-{rank}")
            for size in GROUP_SIZES
            for rank in range(size)
        ],
        timeout_s=250,
    )
    return {
        size: [torch.load(folder / f"{size}-{rank}", weights_only=False) for rank in range(size)]
        for size in GROUP_SIZES
    }


@pytest.mark.parametrize("hops", [(), ("two hops",)])
@pytest.mark.parametrize("order", ["PREFILL", "DECODE"])
@pytest.mark.parametrize("size", GROUP_SIZES)
def test_no_cut_changes_a_bit_of_logits_loads_or_latents(runs, size, order, hops):
    cuts = list(product(*(range(1 + tokens) for tokens in TOKENS[:size])))
    assert len(cuts) == 14
    for rank, cut in product(range(size), cuts):
        logits, loads, latents = runs[size][rank][order, *hops, cut]
        expected_logits, expected_loads, expected_latents = runs[size][rank]["uncut"]
        assert logits.shape == (TOKENS[rank], CONFIG.vocab_size)
        assert torch.equal(logits, expected_logits), (rank, cut)
        assert np.array_equal(loads, expected_loads), (rank, cut)
        assert latents == expected_latents, (rank, cut)


@pytest.mark.parametrize("is_two_hop", [False, True])
@pytest.mark.parametrize("order", ["PREFILL", "DECODE"])
@pytest.mark.parametrize("size", GROUP_SIZES)
def test_replicas_balanced_in_each_micro_batch_change_no_bit(runs, size, order, is_two_hop):
    for rank in runs[size]:
        logits, loads, latents = rank[order, is_two_hop, "balanced"]
        expected_logits, expected_loads, expected_latents = rank["uncut"]
        assert torch.equal(logits, expected_logits)
        assert latents == expected_latents
        assert loads.shape == expected_loads.shape
    total = sum(rank[order, is_two_hop, "balanced"][1].sum() for rank in runs[size])
    assert total == sum(rank["uncut"][1].sum() for rank in runs[size])


@pytest.mark.parametrize("size", GROUP_SIZES)
def test_the_loads_are_those_of_all_rows(runs, size):
    total = sum(rank["uncut"][1].sum() for rank in runs[size])
    num_rows = 3 + sum(TOKENS[:size])
    assert total == num_rows * CONFIG.num_moe_layers * CONFIG.num_experts_per_tok


@pytest.mark.parametrize("size", GROUP_SIZES)
def test_a_rank_that_dies_between_dispatch_and_combine_is_named(runs, size):
    for rank in runs[size][:-1]:
        words, took_s = rank["last words"]
        assert "could not exchange rows" in words
        assert f"the connection to rank {size - 1} is broken" in words
        assert took_s < TIMEOUT_S
