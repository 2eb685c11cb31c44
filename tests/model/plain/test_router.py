import pytest
import torch

from equipoise_kernels.plain.route import route
from equipoise_model.plain.router import Router
from equipoise_model.presets import TINY


def naive_route(scores, bias, *, num_groups, top_groups, top_k, normalize, scale):
    """The rule, one token and one comparison at a time, in Python's floats."""
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(choice) // num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    if top_groups < num_groups:
        groups.sort(key=lambda g: -sum(sorted((choice[e] for e in g), reverse=True)[:2]))
    allowed = [expert for group in groups[:top_groups] for expert in group]
    ids = sorted(allowed, key=lambda e: -choice[e])[:top_k]
    total = sum(scores[e] for e in ids) + 1e-20 if normalize else 1.0
    return ids, [scores[e] / total * scale for e in ids]


@pytest.mark.parametrize("bias_mean", [-2.0, 0.0, 2.0])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "num_groups", "top_groups", "top_k"),
    [(32, 8, 4, 4), (16, 4, 1, 4), (8, 1, 1, 8), (12, 3, 2, 1), (256, 8, 4, 8)],
)
def test_choices_and_weights_follow_the_rule(
    num_experts, num_groups, top_groups, top_k, normalize, bias_mean
):
    generator = torch.Generator().manual_seed(num_experts + top_k)
    scores = torch.rand(40, num_experts, generator=generator)
    bias = bias_mean + torch.randn(num_experts, generator=generator)
    rule = {
        "num_groups": num_groups,
        "top_groups": top_groups,
        "top_k": top_k,
        "normalize": normalize,
        "scale": 2.5,
    }
    ids, weights = route(scores, bias, **rule)
    for row in range(40):
        naive_ids, naive_weights = naive_route(scores[row].tolist(), bias.tolist(), **rule)
        assert ids[row].tolist() == naive_ids
        assert weights[row].tolist() == pytest.approx(naive_weights, rel=1e-5)


def test_negative_biased_scores_never_let_an_outside_group_win():
    scores = torch.full((1, 4), 0.5)
    ids, _ = route(
        scores,
        torch.tensor([-5.0, -6.0, -9.0, -9.0]),
        num_groups=2,
        top_groups=1,
        top_k=2,
        normalize=True,
        scale=1.0,
    )
    assert ids.tolist() == [[0, 1]]


def router(row_block=None):
    gate = Router(TINY, row_block=row_block)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        gate.weight.normal_(std=0.2, generator=generator)
        gate.e_score_correction_bias.normal_(mean=-1, generator=generator)
    return gate


def rows(num_rows):
    return torch.randn(num_rows, TINY.hidden_size, generator=torch.Generator().manual_seed(1))


def test_the_bias_chooses_and_does_not_weigh():
    routing = router()(rows(50))
    chosen = routing.scores_TE.gather(1, routing.expert_ids_TK)
    expected = chosen / chosen.sum(dim=1, keepdim=True) * TINY.routed_scaling_factor
    torch.testing.assert_close(routing.weights_TK, expected)
    unbiased = router()
    unbiased.e_score_correction_bias.zero_()
    assert (unbiased(rows(50)).expert_ids_TK != routing.expert_ids_TK).any()


def test_gradients_reach_the_gate_through_weights_and_scores():
    gate = router()
    gate(rows(20)).weights_TK[:, 0].sum().backward()
    through_weights = gate.weight.grad.clone()
    gate(rows(20)).scores_TE.sum().backward()
    assert through_weights.any()
    assert not torch.equal(gate.weight.grad, through_weights)


def test_the_gate_computes_in_float32_whatever_the_model_does():
    gate = router().to(torch.bfloat16)
    routing = gate(rows(3).to(torch.bfloat16))
    assert routing.weights_TK.dtype == routing.scores_TE.dtype == torch.float32
    assert routing.expert_ids_TK.dtype == torch.int64


def test_no_rows_route_to_nothing():
    for row_block in (None, 16):
        routing = router(row_block)(rows(0))
        assert routing.expert_ids_TK.shape == routing.weights_TK.shape == (0, 4)


def test_a_row_routes_the_same_bits_in_any_company():
    gate = router(row_block=16)
    with torch.no_grad():
        together = gate(rows(37))
        for first in (0, 5, 16, 30):
            alone = gate(rows(37)[first : first + 3])
            for part, whole in zip(alone, together, strict=True):
                assert torch.equal(part, whole[first : first + 3])
