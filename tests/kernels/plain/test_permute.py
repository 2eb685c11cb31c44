import pytest
import torch

from equipoise_kernels.plain.permute import permute_rows, slot_order, unpermute_rows


@pytest.mark.parametrize(("num_rows", "top_k"), [(0, 4), (1, 1), (7, 3), (40, 4)])
def test_rows_come_in_slot_order_and_go_back(num_rows, top_k):
    slots = torch.randint(0, 5, (num_rows, top_k)).flatten()
    x = torch.randn(num_rows, 8)
    order = slot_order(slots)
    permuted = permute_rows(x, order, top_k=top_k)
    naive = [
        x[pair // top_k]
        for slot in range(5)
        for pair in range(num_rows * top_k)
        if slots[pair] == slot
    ]
    assert permuted.shape == (num_rows * top_k, 8)
    assert all(torch.equal(row, wanted) for row, wanted in zip(permuted, naive, strict=True))
    assert torch.equal(unpermute_rows(permuted, order), x.repeat_interleave(top_k, dim=0))


def test_a_row_gathers_the_gradients_of_all_its_choices():
    x = torch.randn(6, 4, requires_grad=True)
    order = slot_order(torch.randint(0, 3, (12,)))
    back = unpermute_rows(permute_rows(x, order, top_k=2), order)
    seed = torch.randn(12, 4)
    (grad,) = torch.autograd.grad((back * seed).sum(), x)
    torch.testing.assert_close(grad, seed.view(6, 2, 4).sum(1))
