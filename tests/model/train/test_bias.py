import torch

from equipoise_model.train.bias import expert_load, update_selection_bias


def test_overloaded_experts_fall_by_gamma_and_underloaded_ones_rise_by_gamma():
    bias_E = torch.tensor([0.5, 0.5, 0.5, 0.5])
    update_selection_bias(bias_E, torch.tensor([9, 1, 5, 5]), gamma=0.125)
    assert bias_E.tolist() == [0.375, 0.625, 0.5, 0.5]


def test_the_size_of_the_error_does_not_matter():
    small, large = torch.zeros(3), torch.zeros(3)
    update_selection_bias(small, torch.tensor([11, 10, 9]), gamma=0.001)
    update_selection_bias(large, torch.tensor([30, 10, -10]), gamma=0.001)
    assert torch.equal(small, large)


def test_gamma_zero_freezes_the_bias():
    bias_E = torch.tensor([0.25, -0.25])
    update_selection_bias(bias_E, torch.tensor([7, 1]), gamma=0.0)
    assert bias_E.tolist() == [0.25, -0.25]


def test_every_choice_is_counted_once_and_unchosen_experts_are_listed():
    load_E = expert_load(torch.tensor([[0, 2], [2, 3], [2, 0]]), num_experts=6)
    assert load_E.tolist() == [2, 0, 3, 1, 0, 0]
    assert load_E.dtype == torch.int64


def test_the_rule_evens_out_a_router_that_prefers_one_expert():
    """Fixed affinities, 0.01 apart: the bias alone brings every expert its share of tokens."""
    generator = torch.Generator().manual_seed(0)
    scores_TE = torch.rand(4096, 8, generator=generator) + torch.linspace(0.0, 0.5, 8)
    bias_E = torch.zeros(8)

    def load():
        return expert_load((scores_TE + bias_E).topk(2, dim=-1).indices, num_experts=8).double()

    before = (load().max() / load().mean()).item()
    for _ in range(500):
        update_selection_bias(bias_E, load(), gamma=2e-3)
    after = (load().max() / load().mean()).item()
    assert before > 2
    assert after < 1.1
