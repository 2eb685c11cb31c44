import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels need the extra `kernels`")

from equipoise_kernels.fp8.jit import jit, tl
from equipoise_kernels.fp8.testing.interpreter import corrected_casts

# Carries out of the mantissa, ties, subnormals, numbers beyond the largest, and the special ones.
HARD = [1.99, -1.99, 1.0625, 1.1875, 0.0, -0.0, 2**-9, 2**-10, 1.5 * 2**-10, 447.9, 464.0, 1e6]


@jit
def cast_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out_ptr + places, tl.load(x_ptr + places).to(out_ptr.dtype.element_ty))


def cast(values, dtype):
    block = 1 << (len(values) - 1).bit_length()
    x = torch.zeros(block, dtype=values.dtype)
    x[: len(values)] = values
    out = torch.empty(block, dtype=dtype)
    cast_kernel[(1,)](x, out, BLOCK=block)
    return out[: len(values)]


def all_finite_e4m3():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return codes[codes.isfinite()]


def samples():
    halfway = (all_finite_e4m3() + all_finite_e4m3().nextafter(torch.tensor(1e9))) / 2
    random = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * 20
    return torch.cat([torch.tensor(HARD), all_finite_e4m3(), halfway, random])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_corrected_casts_match_torch_bit_by_bit(dtype):
    values = samples()
    with corrected_casts():
        seen = cast(values, dtype)
    # The GPU saturates, torch gives NaN: they agree once values are in range.
    limit = 448.0 if dtype is torch.float8_e4m3fn else float("inf")
    wanted = values.clamp(-limit, limit).to(dtype)
    assert torch.equal(seen.view(torch.uint8), wanted.view(torch.uint8))


def test_corrected_casts_widen_every_code_exactly():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with corrected_casts():
        seen = cast(codes, torch.float32)
    np.testing.assert_array_equal(seen.numpy(), codes.float().numpy())


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
def test_corrected_casts_keep_what_bfloat16_calls_special(special):
    with corrected_casts():
        seen = cast(torch.tensor([special, 1.0]), torch.bfloat16)
    assert torch.equal(seen, torch.tensor([special, 1.0]).bfloat16()) or seen[0].isnan()


def test_canary_tritons_own_casts_are_still_wrong():
    # When this fails, Triton's interpreter casts rightly: delete testing/interpreter.py.
    values = samples().clamp(-448, 448)
    wrong_fp8 = cast(values, torch.float8_e4m3fn).float() != values.to(torch.float8_e4m3fn).float()
    wrong_bf16 = cast(values, torch.bfloat16) != values.bfloat16()
    assert wrong_fp8.any()
    assert wrong_bf16.any()


def test_casts_are_tritons_own_again_after_the_with():
    from triton.runtime import interpreter

    before = interpreter._convert_float
    with corrected_casts():
        assert interpreter._convert_float is not before
    assert interpreter._convert_float is before


@jit
def dot_kernel(a_ptr, b_ptr, out_ptr):
    places = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + places, tl.dot(tl.load(a_ptr + places), tl.load(b_ptr + places)))


def dot(a, b):
    out = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, out)
    return out


def test_products_of_bfloat16_are_of_numbers_and_not_of_their_bits():
    a, b = (torch.randn(16, 16).bfloat16() for _ in range(2))
    with corrected_casts():
        torch.testing.assert_close(dot(a, b), a.float() @ b.float(), rtol=1e-5, atol=1e-5)
    # When this fails, Triton's interpreter has learnt it, and `corrected_casts` can do less.
    assert not torch.allclose(dot(a, b), a.float() @ b.float(), rtol=0.1)


@jit
def count_kernel(counts_ptr, num_valid, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    is_valid = tl.program_id(0) < num_valid
    tl.atomic_add(counts_ptr + places, tl.full([BLOCK], 1, tl.int64), mask=(places < 3) & is_valid)


def test_a_comparison_of_scalars_is_a_mask_for_every_place():
    counts = torch.zeros(4, dtype=torch.int64)
    with corrected_casts():
        count_kernel[(5,)](counts, 2, BLOCK=4)
    assert counts.tolist() == [2, 2, 2, 0]
