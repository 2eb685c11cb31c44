import pytest
import torch

from equipoise_kernels.plain.linear import by_row_blocks, linear, pad_rows

ROW_BLOCK = 16


@pytest.mark.parametrize("row_block", [None, ROW_BLOCK])
@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 17, 40])
def test_a_linear_map_equals_a_loop_of_dot_products(num_rows, row_block):
    x, weight = torch.randn(num_rows, 32), torch.randn(48, 32)
    naive = torch.empty(num_rows, 48, dtype=torch.float64)
    for row in range(num_rows):
        for column in range(48):
            naive[row, column] = (x[row].double() * weight[column].double()).sum()
    y = linear(x, weight, row_block=row_block)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), naive, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 2, 16, 33])
def test_a_row_in_blocks_has_the_same_bits_whatever_it_is_batched_with(num_rows):
    x, weight = torch.randn(64, 128), torch.randn(96, 128)
    whole = linear(x, weight, row_block=ROW_BLOCK)
    for first in range(0, 64 - num_rows, 7):
        part = linear(x[first : first + num_rows], weight, row_block=ROW_BLOCK)
        assert torch.equal(part, whole[first : first + num_rows])


def test_gradients_flow_through_blocks_as_through_one_product():
    x, weight = torch.randn(21, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    seed = torch.randn(21, 16)
    grads = [
        torch.autograd.grad((linear(x, weight, row_block=block) * seed).sum(), (x, weight))
        for block in (None, ROW_BLOCK)
    ]
    torch.testing.assert_close(grads[0], grads[1])


def test_blocks_all_have_one_shape_and_lose_no_row():
    shapes = []

    def double(block):
        shapes.append(tuple(block.shape))
        return 2 * block

    for num_rows, num_blocks in ((37, 3), (16, 1), (5, 1)):
        x, shapes[:] = torch.randn(num_rows, 48), ()
        assert torch.equal(by_row_blocks(double, x, row_block=ROW_BLOCK), 2 * x)
        assert shapes == [(ROW_BLOCK, 48)] * num_blocks
    assert by_row_blocks(double, torch.randn(0, 48), row_block=ROW_BLOCK).shape == (0, 48)


def test_padding_adds_zero_rows_up_to_a_full_block_only():
    padded = pad_rows(torch.ones(17, 4), row_block=16)
    assert padded.shape == (32, 4)
    assert padded[:17].eq(1).all()
    assert padded[17:].eq(0).all()
    full = torch.ones(16, 4)
    assert pad_rows(full, row_block=16) is full
