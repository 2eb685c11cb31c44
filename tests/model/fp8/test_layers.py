"""Linear maps in FP8: what they multiply, and that tuning knows their sizes."""

from dataclasses import replace

import torch

from equipoise_kernels.formats import ScaleFormat
from equipoise_kernels.fp8.quant.group_quant import group_quant
from equipoise_kernels.fp8.quant.weight_quant import quantize_weight
from equipoise_kernels.fp8.tune_plans import DENSE
from equipoise_model.config import Fp8Config
from equipoise_model.fp8 import layers
from equipoise_model.fp8.attention import Fp8Attention
from equipoise_model.fp8.layers import Fp8SwiGLU
from equipoise_model.fp8.transformer import Fp8Transformer
from equipoise_model.presets import PRESETS
from tests.support.fp8_models import NARROW
from tests.support.kernel_backends import use_backends


def products(monkeypatch):
    seen, right = [], layers.gemm

    def gemm(rows, weight, **options):
        seen.append(tuple(weight.codes.shape))
        return right(rows, weight, **options)

    monkeypatch.setattr(layers, "gemm", gemm)
    return seen


def test_gate_and_up_are_one_product_and_keep_the_checkpoints_names(monkeypatch):
    use_backends(monkeypatch, "reference")
    torch.manual_seed(1)
    layer = Fp8SwiGLU(replace(NARROW, quantization_config=Fp8Config()), 256)
    weights = {}
    for name, linear in layer.named_children():
        weights[name] = torch.randn(linear.weight.shape) / 8
        quantized = quantize_weight(weights[name], scale_format=ScaleFormat.FP32)
        linear.weight.data.copy_(quantized.codes)
        linear.weight_scale_inv.data.copy_(quantized.scales)
    seen = products(monkeypatch)
    x = torch.randn(3, 128).bfloat16()
    y = layer(group_quant(x))
    assert seen == [(512, 128), (128, 256)]
    gate, up = (x.float() @ weights[name].T for name in ("gate_proj", "up_proj"))
    expected = (torch.nn.functional.silu(gate) * up) @ weights["down_proj"].T
    assert (y - expected).norm() < 0.1 * expected.norm()


def test_every_dense_product_of_deepseek_v3_is_tuned(monkeypatch):
    config = replace(PRESETS["deepseek-v3"], num_hidden_layers=4, quantization_config=Fp8Config())
    with torch.device("meta"):
        model = Fp8Transformer(config, num_slots=1, num_spare=0)
    shapes = set()
    for module in model.modules():
        if isinstance(module, Fp8SwiGLU):
            shapes |= {tuple(module._gate_up.codes.shape), tuple(module.down_proj.weight.shape)}
        elif isinstance(module, Fp8Attention):
            linear = (module.q_a_proj, module.q_b_proj, module.kv_a_proj_with_mqa, module.o_proj)
            shapes |= {tuple(one.weight.shape) for one in linear}
    assert shapes <= set(DENSE)
