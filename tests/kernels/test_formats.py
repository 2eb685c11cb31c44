import pytest
import torch

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import (
    QuantizedRows,
    QuantizedWeight,
    ScaleFormat,
    ScaleLayout,
    empty_rows,
    empty_scales,
    next_power_of_two,
    scales_of,
)


@pytest.mark.parametrize("exponent", [-126, -22, -1, 0, 1, 5, 127])
def test_a_power_of_two_is_its_own_scale_and_its_neighbours_go_up(exponent):
    exact = torch.tensor([2.0**exponent])
    assert next_power_of_two(exact) == exact
    if exponent > -126:
        assert next_power_of_two(exact.nextafter(torch.tensor([0.0]))) == exact
    above = next_power_of_two(exact.nextafter(torch.tensor([float("inf")])))
    assert above == (2 * exact if exponent < 127 else float("inf"))


def test_scales_make_the_largest_value_the_largest_code_and_never_fall_below_the_floor():
    amax = torch.tensor([448.0, 1.0, 1e-4, 1e-9, 0.0])
    assert torch.equal(
        scales_of(amax, ScaleFormat.FP32), torch.tensor([448, 1, 1e-4, 1e-4, 1e-4]) / 448
    )
    powers = scales_of(amax, ScaleFormat.UE8M0)
    assert powers[0] == 1.0
    assert (powers >= scales_of(amax, ScaleFormat.FP32)).all()
    assert (powers < 2 * scales_of(amax, ScaleFormat.FP32)).all()


@pytest.mark.parametrize("num_rows", [1, 4, 5, 127])
def test_aligned_scales_start_each_column_at_a_multiple_of_16_bytes(num_rows):
    scales = empty_scales((num_rows, 3), device="cpu", layout=ScaleLayout.MN_ALIGNED)
    assert scales.shape == (num_rows, 3)
    assert scales.stride(0) == 1
    assert scales.stride(1) % 4 == 0
    assert num_rows <= scales.stride(1) < num_rows + 4


def test_values_are_codes_times_the_scale_of_their_group_or_block():
    rows = empty_rows((2, 256), device="cpu")
    rows.codes.copy_(torch.full((2, 256), 3.0))
    rows.scales.copy_(torch.tensor([[1.0, 2.0], [4.0, 8.0]]))
    assert torch.equal(rows.dequantized()[:, ::128], torch.tensor([[3.0, 6.0], [12.0, 24.0]]))
    weight = QuantizedWeight(
        codes=torch.full((130, 130), 2.0).to(torch.float8_e4m3fn),
        scales=torch.tensor([[1.0, 2.0], [4.0, 8.0]]),
    )
    values = weight.dequantized()
    assert values[127, 127] == 2
    assert values[127, 128] == 4
    assert values[128, 127] == 8
    assert values[129, 129] == 16


@pytest.mark.parametrize(
    ("codes", "scales", "named"),
    [
        (torch.zeros(2, 256), torch.zeros(2, 2), "codes must be float8_e4m3fn"),
        (torch.zeros(2, 256).to(torch.float8_e4m3fn), torch.zeros(2, 2).half(), "scales must be"),
        (torch.zeros(2, 200).to(torch.float8_e4m3fn), torch.zeros(2, 2), "multiple of 128"),
        (torch.zeros(2, 256).to(torch.float8_e4m3fn), torch.zeros(2, 3), r"\[2, 2\]"),
    ],
)
def test_codes_and_scales_that_do_not_belong_together_are_rejected(codes, scales, named):
    with pytest.raises(KernelInputError, match=named):
        QuantizedRows(codes=codes, scales=scales)


def test_weights_with_scales_of_another_shape_are_rejected():
    with pytest.raises(KernelInputError, match=r"\[5, 2\]"):
        QuantizedWeight(
            codes=torch.zeros(576, 256).to(torch.float8_e4m3fn), scales=torch.zeros(4, 2)
        )
