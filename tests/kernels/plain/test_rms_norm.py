import math

import pytest
import torch

from equipoise_kernels.plain.rms_norm import rms_norm


@pytest.mark.parametrize("row_block", [None, 16])
@pytest.mark.parametrize("num_rows", [0, 1, 16, 21])
def test_a_norm_equals_a_loop_over_rows(num_rows, row_block):
    x, weight = torch.randn(num_rows, 32), torch.randn(32)
    y = rms_norm(x, weight, 1e-6, row_block=row_block)
    assert y.shape == x.shape
    for row in range(num_rows):
        root = math.sqrt(sum(v * v for v in x[row].tolist()) / 32 + 1e-6)
        torch.testing.assert_close(y[row], weight * x[row] / root)


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_a_normed_row_has_the_same_bits_whatever_it_is_batched_with(dim):
    x, weight = torch.randn(50, dim), torch.randn(dim)
    whole = rms_norm(x, weight, 1e-6, row_block=16)
    for row in range(50):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-6, row_block=16)[0], whole[row])


def test_the_mean_is_taken_in_float32():
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    y = rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 0.0, row_block=None)
    assert y.dtype == torch.bfloat16
    assert y.eq(1).all()
