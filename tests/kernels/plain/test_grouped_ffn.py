import pytest
import torch
from torch.nn import functional

from equipoise_kernels.plain.grouped_ffn import grouped_ffn
from equipoise_kernels.plain.linear import by_row_blocks, linear

DIM, HIDDEN, NUM_SLOTS = 32, 48, 5


def weights():
    return torch.randn(NUM_SLOTS, 2 * HIDDEN, DIM) / 6, torch.randn(NUM_SLOTS, DIM, HIDDEN) / 7


def naive_ffn(row, slot, gate_up, down):
    gate, up = gate_up[slot][:HIDDEN] @ row, gate_up[slot][HIDDEN:] @ row
    return down[slot] @ (gate / (1 + torch.exp(-gate)) * up)


@pytest.mark.parametrize("row_block", [None, 16])
@pytest.mark.parametrize(
    "rows_per_slot", [[0, 0, 0, 0, 0], [1, 0, 16, 17, 0], [0, 0, 40, 0, 0], [3, 5, 2, 1, 9]]
)
def test_grouped_networks_equal_a_loop_over_rows(rows_per_slot, row_block):
    gate_up, down = weights()
    x = torch.randn(sum(rows_per_slot), DIM)
    y = grouped_ffn(x, gate_up, down, rows_per_slot, row_block=row_block)
    slots = [slot for slot, rows in enumerate(rows_per_slot) for _ in range(rows)]
    assert y.shape == x.shape
    for row, slot in enumerate(slots):
        torch.testing.assert_close(
            y[row], naive_ffn(x[row], slot, gate_up, down), atol=1e-5, rtol=1e-4
        )


def test_a_row_in_blocks_has_the_same_bits_in_every_slot_and_company():
    gate_up, down = weights()
    gate_up[:], down[:] = gate_up[2].clone(), down[2].clone()
    x = torch.randn(70, DIM)
    expected = grouped_ffn(x, gate_up, down, [0, 70, 0, 0, 0], row_block=16)
    assert torch.equal(grouped_ffn(x, gate_up, down, [1, 20, 0, 33, 16], row_block=16), expected)
    for row in range(70):
        alone = grouped_ffn(x[row : row + 1], gate_up, down, [0, 0, 0, 0, 1], row_block=16)
        assert torch.equal(alone[0], expected[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slot_has_the_bits_of_a_dense_network_in_blocks(dtype):
    gate_up, down = (weight.to(dtype) for weight in weights())
    x = torch.randn(37, DIM).to(dtype)
    gate, up = (linear(x, part, row_block=16) for part in gate_up[3].chunk(2))
    dense = linear(by_row_blocks(functional.silu, gate, row_block=16) * up, down[3], row_block=16)
    assert torch.equal(grouped_ffn(x, gate_up, down, [0, 0, 0, 37, 0], row_block=16), dense)


@pytest.mark.parametrize("row_block", [None, 16])
def test_gradients_equal_those_of_separate_networks(row_block):
    gate_up, down = (w.requires_grad_() for w in weights())
    x, seed = torch.randn(25, DIM, requires_grad=True), torch.randn(25, DIM)
    rows_per_slot = [4, 0, 19, 1, 1]
    y = grouped_ffn(x, gate_up, down, rows_per_slot, row_block=row_block)
    grads = torch.autograd.grad((y * seed).sum(), (x, gate_up, down))
    parts = []
    for slot, rows in enumerate(x.split(rows_per_slot)):
        gate, up = functional.linear(rows, gate_up[slot]).chunk(2, dim=-1)
        parts.append(functional.linear(functional.silu(gate) * up, down[slot]))
    naive = torch.autograd.grad((torch.cat(parts) * seed).sum(), (x, gate_up, down))
    for grad, wanted in zip(grads, naive, strict=True):
        torch.testing.assert_close(grad, wanted, atol=1e-5, rtol=1e-4)


def test_counts_that_do_not_sum_to_the_rows_are_a_programmers_fault():
    with pytest.raises(AssertionError):
        grouped_ffn(torch.randn(3, DIM), *weights(), [1, 0, 0, 0, 0], row_block=None)
