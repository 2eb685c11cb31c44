import itertools
import math

import numpy as np
import pytest
import torch

from equipoise_model.plain.router import Routing
from equipoise_model.train.losses import (
    mtp_loss,
    next_token_loss,
    sequence_balance_loss,
    specialization_loss,
)


def _routing(ids_TK, scores_TE):
    weights_TK = scores_TE.gather(1, ids_TK)
    return Routing(expert_ids_TK=ids_TK, weights_TK=weights_TK, scores_TE=scores_TE)


def _even_ids(num_tokens, num_experts, top_k):
    return (torch.arange(num_tokens * top_k) % num_experts).view(num_tokens, top_k)


def test_even_routing_costs_one():
    scores_TE = torch.rand(1, 32, dtype=torch.float64).expand(32, 32)
    loss = sequence_balance_loss(_routing(_even_ids(32, 32, 4), scores_TE), num_sequences=1)
    assert loss.item() == pytest.approx(1.0, rel=1e-7)


def test_all_tokens_on_one_set_of_experts_cost_experts_over_top_k():
    scores_TE = torch.zeros(24, 32, dtype=torch.float64)
    scores_TE[:, :4] = 0.7
    ids_TK = torch.arange(4).expand(24, 4)
    loss = sequence_balance_loss(_routing(ids_TK, scores_TE), num_sequences=3)
    assert loss.item() == pytest.approx(32 / 4, rel=1e-7)


def test_the_balance_loss_equals_its_equations_summed_by_hand():
    rng = np.random.default_rng(0)
    num_sequences, length, num_experts, top_k = 3, 5, 8, 2
    scores = rng.uniform(0.05, 0.95, size=(num_sequences, length, num_experts))
    ids = np.argsort(-scores, axis=-1)[..., :top_k]
    expected = 0.0
    for s in range(num_sequences):
        for i in range(num_experts):
            chosen = sum(i in ids[s, t] for t in range(length))
            f = num_experts / (top_k * length) * chosen
            p = sum(scores[s, t, i] / scores[s, t].sum() for t in range(length)) / length
            expected += f * p / num_sequences
    routing = _routing(
        torch.from_numpy(ids.reshape(-1, top_k)), torch.from_numpy(scores.reshape(-1, num_experts))
    )
    loss = sequence_balance_loss(routing, num_sequences=num_sequences)
    assert loss.item() == pytest.approx(expected, rel=1e-7)


def test_sequences_are_balanced_one_by_one_and_not_together():
    """Two sequences on disjoint halves are even together, and still cost as two uneven ones."""
    scores_TE = torch.zeros(16, 8, dtype=torch.float64)
    scores_TE[:8, :4], scores_TE[8:, 4:] = 0.5, 0.5
    ids_TK = torch.cat([_even_ids(8, 4, 2), _even_ids(8, 4, 2) + 4])
    routing = _routing(ids_TK, scores_TE)
    assert sequence_balance_loss(routing, num_sequences=2).item() == pytest.approx(2.0)
    assert sequence_balance_loss(routing, num_sequences=1).item() == pytest.approx(1.0)


def test_the_gradient_of_the_balance_loss_is_that_of_its_value():
    ids_TK = torch.randint(0, 6, (8, 2), generator=torch.Generator().manual_seed(0))
    scores_TE = torch.rand(8, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda scores: sequence_balance_loss(_routing(ids_TK, scores), num_sequences=2), scores_TE
    )


@pytest.mark.parametrize(
    ("loss", "offset"),
    [(next_token_loss, 1), (mtp_loss, 2), (lambda x, y: mtp_loss(x, y, depth=2), 3)],
)
def test_cross_entropies_equal_a_sum_over_shifted_targets(loss, offset):
    generator = torch.Generator().manual_seed(offset)
    logits = torch.randn(2, 7, 11, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 11, (2, 7), generator=generator)
    terms = [
        math.log(sum(math.exp(v) for v in logits[b, t].tolist())) - logits[b, t, target].item()
        for b in range(2)
        for t in range(7 - offset)
        for target in [int(tokens[b, t + offset])]
    ]
    assert loss(logits, tokens).item() == pytest.approx(sum(terms) / len(terms), rel=1e-9)


def test_mtp_logits_without_positions_that_have_no_target_cost_the_same():
    logits, tokens = torch.randn(2, 7, 11), torch.randint(0, 11, (2, 7))
    torch.testing.assert_close(mtp_loss(logits[:, :6], tokens), mtp_loss(logits, tokens))


def test_even_logits_cost_the_logarithm_of_the_vocabulary():
    tokens = torch.randint(0, 256, (2, 9))
    assert next_token_loss(torch.zeros(2, 9, 256), tokens).item() == pytest.approx(math.log(256))


def _exclusive(num_experts_each, *, num_experts):
    """Affinities of six sequences of three domains, each with experts of its own."""
    scores_TE = torch.zeros(24, num_experts, dtype=torch.float64)
    for row in range(6):
        first = num_experts_each * (row % 3)
        scores_TE[4 * row : 4 * row + 4, first : first + num_experts_each] = 0.3
    return _routing(_even_ids(24, num_experts, 2), scores_TE)


def test_experts_that_serve_all_domains_evenly_lack_the_whole_target():
    routing = _routing(_even_ids(24, 8, 2), torch.full((24, 8), 0.3, dtype=torch.float64))
    loss = specialization_loss(routing, num_sequences=6, num_domains=3, target=0.5)
    assert loss.item() == pytest.approx(0.5, rel=1e-7)


def test_even_shares_of_exclusive_experts_lack_nothing():
    routing = _exclusive(2, num_experts=6)
    loss = specialization_loss(routing, num_sequences=6, num_domains=3, target=math.log(2))
    assert loss.item() == pytest.approx(0.0, abs=1e-9)


def test_experts_that_no_domain_uses_count_as_unevenness():
    routing = _exclusive(1, num_experts=6)
    loss = specialization_loss(routing, num_sequences=6, num_domains=3, target=0.5)
    assert loss.item() == pytest.approx(math.log(2), rel=1e-7)


def test_the_specialization_loss_equals_its_parts_summed_by_hand():
    rng = np.random.default_rng(1)
    num_sequences, num_domains, length, num_experts = 6, 3, 2, 5
    scores = rng.uniform(0.05, 0.95, size=(num_sequences, length, num_experts))
    p_DE = np.zeros((num_domains, num_experts))
    for s in range(num_sequences):
        for t in range(length):
            p_DE[s % num_domains] += scores[s, t] / scores[s, t].sum() / length / 2

    def entropy(p_E):
        return -sum(p * math.log(p) for p in p_E)

    lacking = sum(
        max(0.0, 0.04 - entropy((a + b) / 2) + (entropy(a) + entropy(b)) / 2)
        for a, b in itertools.combinations(p_DE, 2)
    )
    unevenness = math.log(num_experts) - entropy(p_DE.mean(axis=0))
    routing = _routing(_even_ids(12, 5, 2), torch.from_numpy(scores.reshape(-1, num_experts)))
    loss = specialization_loss(
        routing, num_sequences=num_sequences, num_domains=num_domains, target=0.04
    )
    assert loss.item() == pytest.approx(lacking / 3 + unevenness, rel=1e-7)


def test_the_gradient_of_the_specialization_loss_is_that_of_its_value():
    scores_TE = torch.rand(8, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda scores: specialization_loss(
            _routing(_even_ids(8, 6, 2), scores), num_sequences=4, num_domains=2, target=0.5
        ),
        scores_TE,
    )
