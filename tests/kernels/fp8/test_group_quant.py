import ml_dtypes
import numpy as np
import pytest
import torch

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import QuantizedRows, ScaleFormat, ScaleLayout, empty_rows
from equipoise_kernels.fp8.quant.group_quant import (
    GroupQuantConfig,
    group_quant,
    group_quant_reference,
    group_quant_triton,
)
from equipoise_kernels.fp8.testing.cases import spread_normal
from tests.support.guarded_tensors import guarded

CONFIG = GroupQuantConfig(rows=4, groups=2, num_warps=4)


def reference(x, scale_format=ScaleFormat.FP32, layout=ScaleLayout.ROW_MAJOR):
    out = empty_rows(x.shape, device="cpu", layout=layout)
    group_quant_reference(x, scale_format=scale_format, out=out)
    return out


def same(seen, wanted):
    assert torch.equal(seen.scales, wanted.scales)
    assert torch.equal(seen.codes.view(torch.uint8), wanted.codes.view(torch.uint8))


@pytest.mark.parametrize("scale_format", ScaleFormat)
def test_the_reference_rounds_each_group_like_float64(scale_format, generator):
    x = spread_normal((7, 384), generator)
    x[3, 128:256] = 0
    out = reference(x, scale_format)
    exact = x.double().numpy().reshape(7, 3, 128)
    amax = np.maximum(np.abs(exact).max(axis=2), 1e-4)
    scales = out.scales.double().numpy()
    if scale_format is ScaleFormat.FP32:
        np.testing.assert_allclose(scales, amax / 448, rtol=1e-7)
    else:
        np.testing.assert_array_equal(scales, 2.0 ** np.ceil(np.log2(amax / 448)))
    codes = (exact / scales[:, :, None]).astype(ml_dtypes.float8_e4m3fn).reshape(7, 384)
    seen = out.codes.float().numpy()
    # A tie may fall either way after float32's division; nothing else may differ.
    apart = seen != codes.astype(np.float32)
    assert apart.mean() < 1e-3
    error = np.abs(out.dequantized().double().numpy() - x.double().numpy()).reshape(7, 3, 128)
    assert (error <= np.maximum(np.abs(exact) / 16, scales[:, :, None] / 1024) * 1.0001).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale_format", ScaleFormat)
@pytest.mark.parametrize("layout", ScaleLayout)
def test_the_kernel_matches_the_reference_bit_by_bit(
    dtype, scale_format, layout, generator, interpreted
):
    x = spread_normal((9, 384), generator, dtype=dtype)
    out = empty_rows(x.shape, device="cpu", layout=layout)
    group_quant_triton(x, scale_format=scale_format, out=out, config=CONFIG)
    same(out, reference(x, scale_format))


@pytest.mark.parametrize("num_rows", [1, 4, 5])
def test_the_committed_configuration_matches_too(num_rows, generator, interpreted):
    x = spread_normal((num_rows, 640), generator)
    out = empty_rows(x.shape, device="cpu")
    group_quant_triton(x, scale_format=ScaleFormat.FP32, out=out)
    same(out, reference(x))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # infinity times 0
def test_a_nan_spoils_itself_and_an_infinity_its_group(interpreted):
    x = torch.ones(2, 256)
    x[0, 5], x[1, 130] = float("nan"), float("inf")
    kernel = empty_rows(x.shape, device="cpu")
    group_quant_triton(x, scale_format=ScaleFormat.FP32, out=kernel, config=CONFIG)
    for out in (reference(x), kernel):
        values = out.dequantized()
        assert values[0, 5].isnan()
        assert values[0].isnan().sum() == 1
        assert values[1, 128:].isnan().all()
        assert not values[1, :128].isnan().any()


def test_nothing_is_written_outside_rows_codes_and_scales(generator, interpreted):
    num_rows = 5
    x = spread_normal((num_rows, 256), generator)
    codes = guarded((num_rows, 256), torch.float8_e4m3fn)
    # Columns of 8 scales, of which 5 are the rows': the gap is part of the guard.
    columns = guarded((2, num_rows), torch.float32, column_guard=3)
    out = QuantizedRows(codes=codes.view, scales=columns.view.t())
    group_quant_triton(x, scale_format=ScaleFormat.FP32, out=out, config=CONFIG)
    assert codes.guard_is_intact()
    assert columns.guard_is_intact()
    same(out, reference(x))


def test_rows_may_lie_apart_and_be_none(generator, interpreted):
    wide = spread_normal((6, 512), generator)
    x = wide[::2, :256]
    out = empty_rows(x.shape, device="cpu")
    group_quant_triton(x, scale_format=ScaleFormat.FP32, out=out, config=CONFIG)
    same(out, reference(x.contiguous()))
    nothing = empty_rows((0, 256), device="cpu")
    group_quant_triton(wide[:0, :256], scale_format=ScaleFormat.FP32, out=nothing)


@pytest.mark.parametrize(
    ("x", "named"),
    [
        (torch.zeros(2, 256, dtype=torch.int32), "x must be bfloat16 or float16 or float32"),
        (torch.zeros(2, 200), "multiple of 128"),
        (torch.zeros(256), "multiple of 128"),
        (torch.zeros(2, 2, 256), r"must be \[2, 256\]"),
        (torch.zeros(256, 128).t()[:, :128], "neighbouring columns"),
        (torch.zeros(1, 256).expand(3, 256), "overlap"),
    ],
)
def test_rows_that_break_the_contract_are_rejected_by_name(x, named):
    with pytest.raises(KernelInputError, match=named):
        group_quant(x)


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        (torch.zeros(2), "rows_per_group must be int32"),
        (torch.zeros(3, dtype=torch.int32), r"must be \[2\]"),
        (torch.zeros(4, dtype=torch.int32)[::2], "contiguous"),
    ],
)
def test_counts_that_break_the_contract_are_rejected_by_name(counts, named):
    with pytest.raises(KernelInputError, match=named):
        group_quant(torch.zeros(2, 3, 256), rows_per_group=counts)


@pytest.mark.parametrize("counts", [[0, 0, 0], [7, 0, 3], [4, 99, -5]])
@pytest.mark.parametrize("run", [group_quant_reference, group_quant_triton])
def test_the_masked_form_reads_and_writes_only_real_rows(run, counts, generator, interpreted):
    x = torch.randn(3, 7, 256, generator=generator).bfloat16()
    codes, scales = guarded((3, 7, 256), torch.float8_e4m3fn), guarded((3, 7, 2), torch.float32)
    run(
        x,
        rows_per_group=torch.tensor(counts, dtype=torch.int32),
        scale_format=ScaleFormat.FP32,
        out=QuantizedRows(codes=codes.view, scales=scales.view),
    )
    assert codes.guard_is_intact()
    assert scales.guard_is_intact()
    for group, count in enumerate(min(max(count, 0), 7) for count in counts):
        assert codes.unwritten()[group, count:].all()
        assert scales.unwritten()[group, count:].all()
        wanted = empty_rows((count, 256), device="cpu")
        group_quant_reference(x[group, :count], scale_format=ScaleFormat.FP32, out=wanted)
        assert torch.equal(codes.view[group, :count].float(), wanted.codes.float())
        assert torch.equal(scales.view[group, :count], wanted.scales)


def test_an_output_of_another_shape_is_rejected():
    with pytest.raises(KernelInputError, match="out must be"):
        group_quant(torch.zeros(3, 256), out=empty_rows((2, 256), device="cpu"))
