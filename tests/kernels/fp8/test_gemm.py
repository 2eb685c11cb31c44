import pytest
import torch

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import QuantizedRows, QuantizedWeight, ScaleFormat, ScaleLayout
from equipoise_kernels.fp8.gemm import tile
from equipoise_kernels.fp8.gemm.dense import GemmConfig, gemm, gemm_reference, gemm_triton
from equipoise_kernels.fp8.testing.cases import spread_rows, spread_weight
from equipoise_kernels.numerics import difference
from tests.support.guarded_tensors import guarded


def config(*, block_m=16, block_n=64, swap_ab=True, split_k=1, group_m=2):
    return GemmConfig(
        block_m=block_m,
        block_n=block_n,
        swap_ab=swap_ab,
        split_k=split_k,
        group_m=group_m,
        num_warps=4,
        num_stages=3,
        ctas_per_sm=1,
    )


def exact(a, weight):
    """The product of the dequantised operands in float64."""
    return a.dequantized().double() @ weight.dequantized().double().T


def assert_equals_reference(out, a, weight):
    wanted = torch.empty(out.shape)
    gemm_reference(a, weight, out=wanted)
    # Sums of 128 products differ in their order only; what a row may lose goes by its size.
    size = wanted.abs().amax(dim=1, keepdim=True)
    assert ((out - wanted).abs() <= 2e-6 * size).all()


@pytest.mark.parametrize("num_columns", [576, 128, 1])
def test_the_reference_is_the_float64_product_of_the_dequantised_operands(num_columns, generator):
    a, weight = spread_rows((7, 512), generator), spread_weight((num_columns, 512), generator)
    out = torch.empty(7, num_columns)
    gemm_reference(a, weight, out=out)
    wanted = exact(a, weight)
    assert difference(out, wanted) < 1e-12
    assert ((out - wanted).abs() <= 1e-5 * wanted.abs().amax(dim=1, keepdim=True)).all()


@pytest.mark.parametrize("swap_ab", [True, False])
@pytest.mark.parametrize("split_k", [1, 2, 4])
@pytest.mark.parametrize("num_rows", [1, 17])
def test_the_kernel_agrees_with_the_reference(swap_ab, split_k, num_rows, generator, interpreted):
    # 3 blocks of K in 4 parts: one part is empty. 200 columns: the last tile is cut.
    a, weight = spread_rows((num_rows, 384), generator), spread_weight((200, 384), generator)
    out = torch.full((num_rows, 200), float("nan"))
    gemm_triton(a, weight, out=out, config=config(swap_ab=swap_ab, split_k=split_k))
    assert_equals_reference(out, a, weight)


@pytest.mark.parametrize("layout", ScaleLayout)
@pytest.mark.parametrize("scale_format", ScaleFormat)
def test_the_kernel_takes_scales_of_every_layout_and_format(
    layout, scale_format, generator, interpreted
):
    a = spread_rows((18, 256), generator, layout=layout, scale_format=scale_format)
    weight = spread_weight((130, 256), generator)
    out = torch.full((18, 130), float("nan"))
    gemm_triton(a, weight, out=out, config=config(block_n=128))
    assert_equals_reference(out, a, weight)


def test_tiles_cover_the_output_whatever_the_order_they_go_in(generator, interpreted):
    a, weight = spread_rows((70, 128), generator), spread_weight((320, 128), generator)
    for group_m in (1, 3, 8):
        out = torch.full((70, 320), float("nan"))
        gemm_triton(a, weight, out=out, config=config(group_m=group_m))
        assert_equals_reference(out, a, weight)


@pytest.mark.parametrize("num_rows", [3, 24, 60, 100])
def test_the_committed_configurations_agree_with_the_reference(num_rows, generator, interpreted):
    a, weight = spread_rows((num_rows, 256), generator), spread_weight((160, 256), generator)
    out = torch.full((num_rows, 160), float("nan"), dtype=torch.bfloat16)
    gemm_triton(a, weight, out=out)
    wanted = torch.empty_like(out)
    gemm_reference(a, weight, out=wanted)
    assert difference(out, wanted) < 1e-5


@pytest.mark.parametrize("split_k", [1, 2])
def test_nothing_is_written_outside_the_output(split_k, generator, interpreted):
    a, weight = spread_rows((5, 256), generator), spread_weight((72, 256), generator)
    out = guarded((5, 72), torch.float32, column_guard=24)
    gemm_triton(a, weight, out=out.view, config=config(split_k=split_k))
    assert out.guard_is_intact()
    assert_equals_reference(out.view, a, weight)


def test_a_weights_descriptor_is_made_once(generator, interpreted, monkeypatch):
    made = []

    def remember(*arguments):
        made.append(arguments)
        return descriptor(*arguments)

    descriptor = tile.TensorDescriptor
    monkeypatch.setattr(tile, "TensorDescriptor", remember)
    a, weight = spread_rows((2, 128), generator), spread_weight((64, 128), generator)
    for _ in range(3):
        gemm_triton(a, weight, out=torch.empty(2, 64), config=config())
    assert len(made) == 1


def test_no_rows_give_no_rows(generator, interpreted):
    a, weight = spread_rows((0, 256), generator), spread_weight((64, 256), generator)
    gemm_triton(a, weight, out=torch.empty(0, 64))
    assert gemm(a, weight).shape == (0, 64)


def test_the_public_function_makes_an_output_of_the_wanted_dtype(generator):
    a, weight = spread_rows((3, 256), generator), spread_weight((64, 256), generator)
    assert gemm(a, weight).dtype == torch.bfloat16
    out = torch.empty(3, 64)
    assert gemm(a, weight, out=out) is out
    assert torch.equal(gemm(a, weight, dtype=torch.float32), out)


def misaligned(weight):
    codes = torch.empty(weight.codes.numel() + 1, dtype=weight.codes.dtype)[1:]
    codes = codes.view(weight.codes.shape).copy_(weight.codes)
    return QuantizedWeight(codes=codes, scales=weight.scales)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (
            lambda a, w: gemm(a, QuantizedWeight(codes=w.codes[:, :128], scales=w.scales[:, :1])),
            "they must agree",
        ),
        (lambda a, w: gemm(a, misaligned(w)), "16 bytes"),
        (
            lambda a, w: gemm(QuantizedRows(codes=a.codes[None], scales=a.scales[None]), w),
            "see grouped_gemm",
        ),
        (lambda a, w: gemm(a, w, dtype=torch.float16), "out must be"),
        (lambda a, w: gemm(a, w, out=torch.empty(3, 65)), r"out must be \[3, 64\]"),
        (lambda a, w: gemm(a, w, out=torch.empty(64, 3).t()), "neighbouring columns"),
        (lambda a, w: gemm(a, w, out=torch.empty(3, 64, device="meta")), "meta"),
        (
            lambda a, w: gemm(
                a, QuantizedWeight(codes=w.codes, scales=w.scales.t().contiguous().t())
            ),
            "contiguous",
        ),
    ],
)
def test_operands_that_break_the_contract_are_rejected_by_name(fault, named, generator):
    a, weight = spread_rows((3, 256), generator), spread_weight((64, 256), generator)
    if named == "contiguous":
        weight = spread_weight((256, 256), generator)
    with pytest.raises(KernelInputError, match=named):
        fault(a, weight)
