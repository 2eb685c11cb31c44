import pytest
import torch

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import QuantizedRows, ScaleFormat, ScaleLayout, empty_rows
from equipoise_kernels.fp8.quant.rms_norm_quant import (
    rms_norm_quant,
    rms_norm_quant_reference,
    rms_norm_quant_triton,
)
from equipoise_kernels.fp8.quant.silu_mul_quant import (
    SiluMulQuantConfig,
    silu_mul_quant,
    silu_mul_quant_reference,
    silu_mul_quant_triton,
)
from equipoise_kernels.fp8.testing.cases import spread_normal
from tests.support.guarded_tensors import guarded

SILU_CONFIG = SiluMulQuantConfig(rows=4, groups=2, num_warps=4)


def assert_close(seen, wanted):
    """Equal but for a last-bit difference before the codes, which may move a few by one step."""
    torch.testing.assert_close(seen.scales, wanted.scales, rtol=1e-2, atol=0)
    values, expected = seen.dequantized(), wanted.dequantized()
    apart = (values - expected).abs() > 1e-6 * expected.abs()
    assert apart.float().mean() < 0.01
    step = expected.abs() / 8 + wanted.scales.repeat_interleave(128, dim=-1) / 512
    assert ((values - expected).abs() <= step * 1.01).all()


def half_step(out):
    return (
        out.dequantized().double().abs() / 16
        + out.scales.double().repeat_interleave(128, dim=-1) / 1024
    )


def norm_inputs(generator, num_rows=5, dim=640, dtype=torch.bfloat16):
    x = torch.randn(num_rows, dim, generator=generator).to(dtype)
    residual = (3 * torch.randn(num_rows, dim, generator=generator)).to(dtype)
    weight = (1 + torch.rand(dim, generator=generator)).to(dtype)
    return x, weight, residual


def test_the_norms_reference_is_float64s_norm_within_half_a_code(generator):
    x, weight, residual = norm_inputs(generator, dtype=torch.float32)
    out, total = empty_rows(x.shape, device="cpu"), residual.clone()
    rms_norm_quant_reference(
        x, weight, eps=1e-6, residual_MD=total, scale_format=ScaleFormat.FP32, out=out
    )
    h = x.double() + residual.double()
    exact = h / ((h * h).mean(dim=1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert torch.equal(total, x + residual)
    assert ((out.dequantized() - exact).abs() <= half_step(out) * 1.1).all()


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norms_kernel_agrees_with_the_reference(with_residual, dtype, generator, interpreted):
    x, weight, residual = norm_inputs(generator, dtype=dtype)
    outs, residuals = [], []
    for run in (rms_norm_quant_reference, rms_norm_quant_triton):
        out = empty_rows(x.shape, device="cpu", layout=ScaleLayout.MN_ALIGNED)
        total = residual.clone() if with_residual else None
        run(x, weight, eps=1e-6, residual_MD=total, scale_format=ScaleFormat.UE8M0, out=out)
        outs.append(out)
        residuals.append(total)
    assert_close(outs[1], outs[0])
    assert not with_residual or torch.equal(*residuals)


def test_the_norms_kernel_writes_only_its_rows(generator, interpreted):
    x, weight, _ = norm_inputs(generator, num_rows=3)
    residual, codes = guarded((3, 640), torch.bfloat16), guarded((3, 640), torch.float8_e4m3fn)
    scales = guarded((3, 5), torch.float32)
    residual.view.copy_(x)
    rms_norm_quant_triton(
        x,
        weight,
        eps=1e-6,
        residual_MD=residual.view,
        scale_format=ScaleFormat.FP32,
        out=QuantizedRows(codes=codes.view, scales=scales.view),
    )
    assert all(tensor.guard_is_intact() for tensor in (residual, codes, scales))
    assert torch.equal(residual.view, x + x)


@pytest.mark.parametrize(
    ("x", "weight", "residual", "named"),
    [
        (torch.zeros(2, 256).half(), torch.zeros(256).half(), None, "x must be"),
        (torch.zeros(2, 256), torch.zeros(128), None, "weight must be"),
        (torch.zeros(2, 256), torch.zeros(256).bfloat16(), None, "weight must be float32"),
        (torch.zeros(2, 256), torch.zeros(256), torch.zeros(3, 256), "residual must be"),
    ],
)
def test_a_norm_of_other_things_is_rejected_by_name(x, weight, residual, named):
    with pytest.raises(KernelInputError, match=named):
        rms_norm_quant(x, weight, eps=1e-6, residual_MD=residual)


def test_the_activations_reference_is_float64s_within_half_a_code(generator):
    x = spread_normal((6, 512), generator, dtype=torch.float32).clamp(-50, 50)
    out = empty_rows((6, 256), device="cpu")
    silu_mul_quant_reference(x, rows_per_group=None, scale_format=ScaleFormat.FP32, out=out)
    gate, up = x.double().chunk(2, dim=1)
    exact = gate / (1 + torch.exp(-gate)) * up
    assert ((out.dequantized() - exact).abs() <= half_step(out) * 1.1 + 1e-9).all()


@pytest.mark.parametrize("layout", ScaleLayout)
def test_the_activations_kernel_agrees_with_the_reference(layout, generator, interpreted):
    x = torch.randn(9, 2 * 384, generator=generator).bfloat16()
    outs = []
    for run, options in (
        (silu_mul_quant_reference, {}),
        (silu_mul_quant_triton, {"config": SILU_CONFIG}),
        (silu_mul_quant_triton, {}),
    ):
        out = empty_rows((9, 384), device="cpu", layout=layout)
        run(x, rows_per_group=None, scale_format=ScaleFormat.FP32, out=out, **options)
        outs.append(out)
    assert_close(outs[1], outs[0])
    assert_close(outs[2], outs[0])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_a_gate_far_below_zero_closes_and_one_far_above_is_itself(interpreted):
    x = torch.cat([torch.tensor([[-1000.0], [1000.0]]).expand(2, 128), torch.ones(2, 128)], dim=1)
    out = empty_rows((2, 128), device="cpu")
    silu_mul_quant_triton(x, rows_per_group=None, scale_format=ScaleFormat.FP32, out=out)
    assert torch.equal(out.dequantized(), torch.tensor([[0.0], [1000.0]]).expand(2, 128))


@pytest.mark.parametrize("counts", [[0, 0, 0], [7, 0, 3], [4, 99, -5]])
@pytest.mark.parametrize("run", [silu_mul_quant_reference, silu_mul_quant_triton])
def test_the_masked_activation_writes_only_real_rows(run, counts, generator, interpreted):
    num_groups, max_rows = 3, 7
    x = torch.randn(num_groups, max_rows, 512, generator=generator).bfloat16()
    codes = guarded((num_groups, max_rows, 256), torch.float8_e4m3fn)
    scales = guarded((num_groups, max_rows, 2), torch.float32)
    options = {} if run is silu_mul_quant_reference else {"config": SILU_CONFIG}
    run(
        x,
        rows_per_group=torch.tensor(counts, dtype=torch.int32),
        scale_format=ScaleFormat.FP32,
        out=QuantizedRows(codes=codes.view, scales=scales.view),
        **options,
    )
    assert codes.guard_is_intact()
    assert scales.guard_is_intact()
    for group, count in enumerate(min(max(count, 0), max_rows) for count in counts):
        assert codes.unwritten()[group, count:].all()
        assert scales.unwritten()[group, count:].all()
        wanted = empty_rows((count, 256), device="cpu")
        silu_mul_quant_reference(
            x[group, :count], rows_per_group=None, scale_format=ScaleFormat.FP32, out=wanted
        )
        seen = QuantizedRows(codes=codes.view[group, :count], scales=scales.view[group, :count])
        if count:
            assert_close(seen, wanted)


@pytest.mark.parametrize(
    ("x", "counts", "named"),
    [
        (torch.zeros(2, 256).half(), None, "x must be"),
        (torch.zeros(2, 384), None, "I a multiple of 128"),
        (torch.zeros(2, 3, 256), None, "rows_per_group"),
        (torch.zeros(2, 3, 256), torch.zeros(2), "rows_per_group must be int32"),
        (torch.zeros(2, 3, 256), torch.zeros(3, dtype=torch.int32), r"must be \[2\]"),
        (torch.zeros(2, 3, 256), torch.zeros(4, dtype=torch.int32)[::2], "contiguous"),
    ],
)
def test_an_activation_of_other_things_is_rejected_by_name(x, counts, named):
    with pytest.raises(KernelInputError, match=named):
        silu_mul_quant(x, rows_per_group=counts)
