"""The model's data plane and kernels are selected by name or by benefit, the same on all ranks."""

import dataclasses

import pytest
import torch

from equipoise_kernels.fp8 import selection
from equipoise_model import operations
from equipoise_model.config import Fp8Config
from equipoise_model.fp8.transformer import obstacle
from equipoise_model.operations import Operations, OperationsError
from tests.support.fp8_models import NARROW, WIDE
from tests.support.kernel_backends import use_backends, works

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def twins(monkeypatch):
    """The torch twins, although test processes interpret kernels."""
    use_backends(monkeypatch, "reference")


def test_what_computes_is_chosen_by_name_or_by_what_pays():
    stored = dataclasses.replace(NARROW, quantization_config=Fp8Config(scale_fmt="ue8m0"))

    def choose(wanted, config=stored, *, batch_invariant=False):
        return Operations.choose(wanted, config=config, device=CPU, batch_invariant=batch_invariant)

    assert choose("auto").fp8 is None
    assert choose("bf16").kernels == "torch"
    assert choose("fp8").fp8 == Fp8Config(scale_fmt="ue8m0")
    assert choose("fp8", NARROW).fp8 == Fp8Config()
    assert choose("fp8").kernels == "reference"
    with pytest.raises(OperationsError, match="not one of auto, bf16 and fp8"):
        choose("int4")
    with pytest.raises(OperationsError, match="batch-invariant mode is only available with bf16"):
        choose("fp8", batch_invariant=True)
    narrow = dataclasses.replace(NARROW, moe_intermediate_size=48)
    with pytest.raises(OperationsError, match="moe_intermediate_size is 48, not a multiple of 128"):
        choose("fp8", narrow)
    odd = dataclasses.replace(NARROW, kv_lora_rank=96)
    assert obstacle(odd) == "kv_lora_rank is 96, not a power of two of at least 16"


GPU = torch.device("cuda", 0)
NO_COMPILER = "its self-test failed with RuntimeError: Failed to find C compiler"


@pytest.mark.parametrize("wanted", ["auto", "fp8"])
def test_fp8_on_a_gpu_is_computed_in_fp8_or_not_at_all(wanted, monkeypatch):
    stored = dataclasses.replace(NARROW, quantization_config=Fp8Config())

    def choose(config=stored, *, batch_invariant=False, wanted=wanted):
        return Operations.choose(wanted, config=config, device=GPU, batch_invariant=batch_invariant)

    def use(setting="auto", *, failing=()):
        chosen = selection.resolve(
            setting, lambda _, name: NO_COMPILER if name in failing else None
        )
        use_backends(monkeypatch, chosen)

    use(failing=("flash_mla",))
    assert choose().fp8 == Fp8Config()
    with pytest.raises(OperationsError, match="with bf16: turn it off, or choose bf16"):
        choose(batch_invariant=True)
    narrow = dataclasses.replace(stored, moe_intermediate_size=48)
    with pytest.raises(OperationsError, match="moe_intermediate_size is 48, not a multiple of 128"):
        choose(narrow)
    use(failing=("triton", "flash_mla"))
    with pytest.raises(
        OperationsError, match="not available: grouped_gemm has no kernel"
    ) as missed:
        choose()
    assert "runs on cuda:0, because its self-test failed" in str(missed.value)
    assert "Failed to find C compiler; EQUIPOISE_KERNELS=reference computes" in str(missed.value)
    # Float32, or slow torch, only for those who name it.
    assert choose(wanted="bf16").fp8 is None
    use("reference")
    assert choose().fp8 == Fp8Config()


def test_kernels_are_tested_on_the_device_that_will_run_them(monkeypatch):
    stored = dataclasses.replace(NARROW, quantization_config=Fp8Config())
    done = []

    def start():
        done.append("self-tests")
        use_backends(monkeypatch, selection.resolve("auto", works))

    monkeypatch.setattr(selection, "_process", selection._Process())
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(operations, "start_process", start)
    third = torch.device("cuda", 2)
    Operations.choose("fp8", config=stored, device=third, batch_invariant=False)
    assert done == [third, "self-tests"]


def test_ranks_agree_on_backends_or_report_why_not(monkeypatch):
    def without(*absent):
        absent = ("flash_mla", *absent)
        return selection.resolve("auto", lambda _operation, name: name in absent and "absent")

    in_fp8, by_torch = (Operations(device=CPU, fp8=fp8) for fp8 in (Fp8Config(), None))

    def announced_by(chosen):
        use_backends(monkeypatch, chosen)
        return in_fp8.announcement

    richer = announced_by(without("deep_ep"))
    own = announced_by(without("deep_ep", "deep_gemm"))
    in_fp8.agree([own, own])
    in_fp8.agree([own, ""])
    assert in_fp8.kernels == "triton, gemm_large=scaled_mm"
    announced_by(without("deep_ep"))
    assert in_fp8.kernels == "triton, gemm_large=deep_gemm"
    assert "gemm_large=deep_gemm|scaled_mm|triton|reference" in in_fp8.backends
    in_fp8.agree([own, richer])
    assert in_fp8.kernels == "triton, gemm_large=scaled_mm"
    assert in_fp8.announcement == richer
    in_fp8.agree([richer])
    assert in_fp8.kernels == "triton, gemm_large=deep_gemm"
    assert by_torch.backends == ("model=torch",)
    with pytest.raises(OperationsError, match=r"compute differently \(torch and more\)"):
        in_fp8.agree([own, by_torch.announcement])
    named = announced_by(selection.resolve("gemm=reference", lambda _operation, _name: None))
    with pytest.raises(OperationsError, match="ranks share no backend for gemm"):
        in_fp8.agree([named, announced_by(selection.resolve("gemm=triton", lambda *_: None))])


@pytest.mark.parametrize(
    "word", ["{", "{}", '{"variants": 1}', '{"backends": 1, "possible": [], "obstacles": {}}']
)
def test_an_announcement_of_another_release_is_one_clear_error(word, monkeypatch):
    use_backends(monkeypatch, selection.resolve("auto", lambda *_: None))
    with pytest.raises(OperationsError, match="which no rank of this release does: restart it"):
        Operations(device=CPU, fp8=Fp8Config()).agree([word])


def test_the_format_of_latents_is_chosen_by_name_and_announced(monkeypatch):
    def choose(config=WIDE, *, weights="fp8", latents="fp8", **more):
        return Operations.choose(
            weights, config=config, device=CPU, batch_invariant=False, latents=latents, **more
        )

    monkeypatch.setattr("equipoise_model.operations._always_twins", lambda device: True)
    chosen = choose()
    assert chosen.cache(WIDE, num_blocks=1, max_len=16, mtp=False).bytes_per_token == 328
    assert chosen.kernels == "reference, latents=fp8"
    assert chosen.backends == ("model=reference", "latents=fp8")
    plain = choose(latents="bf16", block_tokens=64)
    assert plain.cache(WIDE, num_blocks=1, max_len=16, mtp=False).block_tokens == 64
    assert plain.backends == ("model=reference",)
    with pytest.raises(OperationsError, match="compute differently"):
        plain.agree([plain.announcement, chosen.announcement])
    with pytest.raises(OperationsError, match="'fp4' is neither bf16 nor fp8"):
        choose(latents="fp4")
    with pytest.raises(OperationsError, match="require weights in FP8: choose weights fp8"):
        choose(weights="bf16")
    with pytest.raises(OperationsError, match="kv_lora_rank is 32, not a multiple of 128"):
        choose(NARROW)
    monkeypatch.setattr("equipoise_model.operations._always_twins", lambda device: False)
    everything = selection.resolve("auto", lambda _operation, _name: None)
    use_backends(monkeypatch, everything)
    plain = dataclasses.replace(chosen, fp8_latents=False)
    assert chosen.backends[-1] == "latents=fp8"
    with pytest.raises(OperationsError, match="some ranks store latents in FP8 and some do not"):
        plain.agree([plain.announcement, chosen.announcement])


def test_ranks_that_sum_on_nodes_form_no_group_with_others(monkeypatch):
    def choose(*, sums_on_nodes, weights):
        return Operations.choose(
            weights,
            config=WIDE,
            device=CPU,
            batch_invariant=False,
            sums_on_nodes=sums_on_nodes,
        )

    summing, plain = (choose(sums_on_nodes=sums, weights="bf16") for sums in (True, False))
    assert summing.backends == ("model=torch", "sums=nodes")
    assert plain.backends == ("model=torch",)
    with pytest.raises(OperationsError, match=r"same weights, device, sums_on_nodes and"):
        plain.agree([plain.announcement, summing.announcement])
    monkeypatch.setattr("equipoise_model.operations._always_twins", lambda device: False)
    use_backends(monkeypatch, selection.resolve("auto", lambda _operation, _name: None))
    summing, plain = (choose(sums_on_nodes=sums, weights="fp8") for sums in (True, False))
    with pytest.raises(OperationsError, match="some ranks sum outputs on nodes and some do not"):
        plain.agree([plain.announcement, summing.announcement])


def test_blocks_are_as_large_as_kernels_read_them_where_they_attend(monkeypatch):
    deepseek = dataclasses.replace(NARROW, kv_lora_rank=512, qk_rope_head_dim=64)
    monkeypatch.setattr("equipoise_model.operations._always_twins", lambda device: False)

    def chosen(setting="auto", config=deepseek, *, missing=(), **more):
        can = selection.resolve(setting, lambda _operation, name: name in missing and "missing")
        use_backends(monkeypatch, can)
        operations = Operations.choose(
            "fp8", config=config, device=CPU, batch_invariant=False, **more
        )
        return operations.block_tokens, selection.current().backends["mla_decode"]

    assert chosen() == (64, "flash_mla")
    assert chosen("auto,mla_decode=flash_mla") == (64, "flash_mla")
    assert chosen(missing=("flash_mla",)) == (64, "triton")
    assert chosen(latents="fp8") == (64, "triton")
    assert "no latents in FP8" in selection.current().obstacles["mla_decode=flash_mla"]
    assert chosen(config=NARROW) == (64, "triton")
    assert chosen(block_tokens=32) == (32, "triton")
    assert chosen("auto,mla_decode=flashinfer") == (64, "flashinfer")
    with pytest.raises(OperationsError, match="it takes blocks of 64 positions, not 16"):
        chosen("auto,mla_decode=flash_mla", block_tokens=16)
