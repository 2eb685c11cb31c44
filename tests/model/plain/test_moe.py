import dataclasses

import pytest
import torch
from torch.nn import functional

from equipoise_model.dispatch import ExpertParallel
from equipoise_model.plain.moe import MoE
from equipoise_model.presets import TINY


def make_moe(*, row_block=None, config=TINY):
    moe = MoE(config, num_slots=config.n_routed_experts, row_block=row_block)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.1, generator=generator)
    return moe


def forward(moe, x):
    return moe(x, ExpertParallel.local(moe.gate.config).begin_step(num_tokens=len(x)))


@pytest.mark.parametrize("row_block", [None, 16])
@pytest.mark.parametrize("num_shared", [1, 2])
def test_an_moe_layer_is_its_shared_experts_and_the_weighted_sum_of_the_chosen(
    num_shared, row_block
):
    moe = make_moe(
        row_block=row_block, config=dataclasses.replace(TINY, n_shared_experts=num_shared)
    )
    x = torch.randn(10, TINY.hidden_size)
    y = forward(moe, x)
    routing = moe.gate(x)
    for row in range(10):
        naive = moe.shared_experts(x[row : row + 1])[0]
        for expert, weight in zip(routing.expert_ids_TK[row], routing.weights_TK[row], strict=True):
            gate, up = (moe.experts.gate_up[expert] @ x[row]).chunk(2)
            naive = naive + weight * (moe.experts.down[expert] @ (functional.silu(gate) * up))
        torch.testing.assert_close(y[row], naive, atol=1e-5, rtol=1e-4)


def test_no_rows_give_no_rows():
    assert forward(make_moe(), torch.empty(0, TINY.hidden_size)).shape == (0, TINY.hidden_size)


def test_a_row_has_the_same_bits_alone_and_in_any_batch_in_row_blocks():
    moe = make_moe(row_block=16)
    x = torch.randn(37, TINY.hidden_size)
    whole = forward(moe, x)
    for size in (1, 3, 16):
        for first in range(0, 37 - size, size):
            assert torch.equal(forward(moe, x[first : first + size]), whole[first : first + size])


def test_every_parameter_that_was_used_gets_a_gradient():
    moe = make_moe()
    forward(moe, torch.randn(200, TINY.hidden_size)).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in moe.parameters())
