import pytest
import torch

from equipoise_kernels.replica_choice import SHARE_BITS, choose_replicas

NUM_TOKENS = 100_000


def choices(expert, count, *, tokens, layer=0):
    counts = torch.ones(64, dtype=torch.int64)
    counts[expert] = count
    ids = torch.full((len(tokens), 1), expert)
    return choose_replicas(ids, tokens, counts, layer=layer).flatten()


def choices_by_share(expert, shares, *, tokens, layer=0):
    counts = torch.ones(64, dtype=torch.int64)
    counts[expert] = len(shares)
    ends = torch.full((64, len(shares)), 1 << SHARE_BITS)
    ends[expert] = torch.tensor(shares).cumsum(0)
    ids = torch.full((len(tokens), 1), expert)
    return choose_replicas(ids, tokens, counts, layer=layer, share_ends_ER=ends).flatten()


def shares(chosen, count):
    return torch.bincount(chosen, minlength=count) * (count / len(chosen))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 32])
@pytest.mark.parametrize("stride", [1, 2, 4, 7, 64])
def test_replicas_share_evenly_even_if_only_every_nth_token_chooses_the_expert(count, stride):
    tokens = torch.arange(NUM_TOKENS) * stride
    share = shares(choices(5, count, tokens=tokens, layer=3), count)
    assert share.min() > 0.98
    assert share.max() < 1.02


@pytest.mark.parametrize("count", [2, 3, 8])
def test_replicas_share_evenly_among_tokens_that_come_at_random(count):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.rand(8 * NUM_TOKENS, generator=generator).lt(0.3).nonzero().flatten()
    share = shares(choices(9, count, tokens=tokens), count)
    assert (share - 1).abs().max() < 0.02


def test_a_few_tokens_in_a_row_use_every_replica():
    chosen = choices(2, 4, tokens=torch.arange(1_000, 1_008))
    assert set(chosen.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("wanted", [(30_000, 2_768), (1, 32_767), (20_000, 0, 12_768), (32_768,)])
@pytest.mark.parametrize("stride", [1, 2, 7, 64])
def test_replicas_get_the_requested_shares(wanted, stride):
    tokens = torch.arange(NUM_TOKENS) * stride
    got = torch.bincount(choices_by_share(5, wanted, tokens=tokens), minlength=len(wanted))
    expected = torch.tensor(wanted) * (NUM_TOKENS / (1 << SHARE_BITS))
    # The bound of the sequence: off by a few tokens, not by their root.
    assert (got - expected).abs().max() < 40


def test_even_shares_choose_as_no_shares_do():
    tokens = torch.arange(NUM_TOKENS)
    for count in (1, 2, 4, 8):
        even = (((1 << SHARE_BITS) // count),) * count
        assert choices_by_share(3, even, tokens=tokens).equal(choices(3, count, tokens=tokens))


def test_a_share_decides_by_the_token_alone():
    tokens = torch.arange(50)
    together = choices_by_share(4, (9_000, 20_000, 3_768), tokens=tokens)
    apart = [choices_by_share(4, (9_000, 20_000, 3_768), tokens=token.view(1)) for token in tokens]
    assert together.equal(torch.cat(apart))


def test_two_experts_of_a_token_choose_independently():
    counts = torch.full((64,), 2)
    tokens = torch.arange(NUM_TOKENS)
    both = torch.tensor([[e, e + 1] for e in range(0, 64, 2)])
    agreeing = []
    for first, second in both.tolist():
        ids = torch.tensor([[first, second]]).expand(NUM_TOKENS, 2)
        chosen = choose_replicas(ids, tokens, counts, layer=1)
        agreeing.append(float((chosen[:, 0] == chosen[:, 1]).float().mean()))
    assert 0.4 < sum(agreeing) / len(agreeing) < 0.6


def test_layers_do_not_choose_alike():
    chosen = [
        tuple(choices(7, 2, tokens=torch.arange(16), layer=layer).tolist()) for layer in range(16)
    ]
    assert len(set(chosen)) > 8


def test_the_choice_has_no_memory():
    tokens = torch.arange(50)
    together = choices(4, 3, tokens=tokens)
    one_by_one = [int(choices(4, 3, tokens=token.view(1))) for token in tokens]
    assert together.tolist() == one_by_one


def test_counters_of_a_long_lived_process_still_choose_a_replica():
    chosen = choices(4, 3, tokens=torch.arange(2**50, 2**50 + 999))
    assert set(chosen.tolist()) == {0, 1, 2}


def test_no_tokens_choose_nothing():
    chosen = choose_replicas(
        torch.empty(0, 4, dtype=torch.int64),
        torch.empty(0, dtype=torch.int64),
        torch.ones(8, dtype=torch.int64),
        layer=0,
    )
    assert chosen.shape == (0, 4)
