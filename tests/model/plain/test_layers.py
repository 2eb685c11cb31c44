import pytest
import torch
from torch.nn import functional

from equipoise_model.plain.layers import Embedding, SwiGLU


def random_network(*, row_block=None):
    network = SwiGLU(48, 80, row_block=row_block).requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.normal_(std=0.2, generator=generator)
    return network


def rows(num_rows):
    return torch.randn(num_rows, 48, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("row_block", [None, 16])
def test_a_swiglu_network_follows_its_formula(row_block):
    network, x = random_network(row_block=row_block), rows(21)
    gate = x @ network.gate_proj.weight.T
    hidden = gate / (1 + (-gate).exp()) * (x @ network.up_proj.weight.T)
    torch.testing.assert_close(network(x), hidden @ network.down_proj.weight.T)


def test_a_row_has_the_same_bits_in_any_company():
    network, x = random_network(row_block=16), rows(60)
    together = network(x)
    for num_rows in (1, 3, 16, 17, 31):
        assert torch.equal(network(x[60 - num_rows :]), together[60 - num_rows :])


def test_an_embedding_looks_tokens_up():
    embedding = Embedding(10, 4)
    with torch.no_grad():
        embedding.weight.copy_(torch.arange(40).view(10, 4))
    tokens = torch.tensor([[3, 0], [9, 3]])
    assert torch.equal(embedding(tokens), functional.embedding(tokens, embedding.weight))
    assert embedding(tokens)[1, 0].tolist() == [36, 37, 38, 39]
