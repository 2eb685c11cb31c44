import pytest
import torch

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import (
    QuantizedWeight,
    ScaleFormat,
    weight_scale_shape,
)
from equipoise_kernels.fp8.quant.weight_quant import (
    dequantize_weight,
    dequantize_weight_triton,
    quantize_weight,
    quantize_weight_reference,
    quantize_weight_triton,
)

# DeepSeek-V3's 576 rows, one block, blocks cut in both dimensions, and a slab of slots.
SHAPES = [(576, 256), (128, 128), (130, 200), (1, 1), (3, 160, 256)]


def quantized_by(run, weight, scale_format):
    out = QuantizedWeight(
        codes=torch.empty(weight.shape, dtype=torch.float8_e4m3fn),
        scales=torch.empty(weight_scale_shape(weight.shape)),
    )
    run(weight, scale_format=scale_format, out=out)
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_scales_each_block_by_its_largest_value(shape, generator):
    weight = torch.randn(shape, generator=generator)
    out = quantized_by(quantize_weight_reference, weight, ScaleFormat.FP32)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in out.scales.shape)):
        *outer, tall, wide = place.tolist()
        index = (*outer, slice(128 * tall, 128 * tall + 128), slice(128 * wide, 128 * wide + 128))
        block, scale = weight[index].double(), out.scales[tuple(place)].double()
        torch.testing.assert_close(scale, block.abs().max() / 448, rtol=1e-6, atol=0)
        error = (out.codes[index].double() * scale - block).abs()
        assert (error <= torch.maximum(block.abs() / 16, scale / 1024) * 1.0001).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale_format", ScaleFormat)
def test_the_kernels_give_the_bits_of_the_references(shape, scale_format, generator, interpreted):
    weight = torch.randn(shape, generator=generator).bfloat16()
    wanted = quantized_by(quantize_weight_reference, weight, scale_format)
    seen = quantized_by(quantize_weight_triton, weight, scale_format)
    assert torch.equal(seen.scales, wanted.scales)
    assert torch.equal(seen.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
    back = torch.full(shape, float("nan"), dtype=torch.bfloat16)
    dequantize_weight_triton(wanted, out=back)
    assert torch.equal(back, wanted.dequantized().bfloat16())


def test_there_and_back_is_exact_for_values_that_codes_hold():
    # Multiples of 32 up to 448 are codes, and each block has 448, so that its scale is 1.
    weight = torch.randint(-14, 15, (192, 130)).float() * 32
    weight[::64, ::64] = 448.0
    assert torch.equal(dequantize_weight(quantize_weight(weight), dtype=torch.float32), weight)


@pytest.mark.parametrize(
    ("weight", "named"),
    [
        (torch.zeros(4, 4, dtype=torch.int8), "weight must be"),
        (torch.zeros(4), r"\[N, K\]"),
        (torch.zeros(0, 4), r"\[N, K\]"),
    ],
)
def test_weights_that_break_the_contract_are_rejected_by_name(weight, named):
    with pytest.raises(KernelInputError, match=named):
        quantize_weight(weight)


def test_dequantisation_to_an_integer_is_rejected():
    with pytest.raises(KernelInputError, match="int32"):
        dequantize_weight(quantize_weight(torch.ones(4, 4)), dtype=torch.int32)
