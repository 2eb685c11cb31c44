"""FlashMLA and FlashInfer through stand-ins that follow their documented interfaces and, as they
do, trust tables and lengths."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from equipoise_kernels.errors import KernelInputError, KernelsUnavailableError
from equipoise_kernels.formats import CODE
from equipoise_kernels.fp8 import selection, self_test
from equipoise_kernels.fp8.attention import libraries
from equipoise_kernels.fp8.attention.latents import PlainLatents, QuantizedLatents
from equipoise_kernels.fp8.attention.libraries import LatentShape, misfit
from equipoise_kernels.fp8.attention.mla_decode import MLA_DECODE
from equipoise_kernels.fp8.attention.mla_merge import AttentionOutput
from equipoise_kernels.fp8.selection import resolve, without
from tests.support.kernel_backends import use_backends

RANK, ROTARY = 512, 64


def attend(query_HC, seen_LC, scale):
    """Outputs and natural logarithms of sums, in float32."""
    scores_HL = query_HC.float() @ seen_LC.float().T * scale
    return scores_HL.softmax(-1) @ seen_LC[:, :RANK].float(), scores_HL.logsumexp(-1)


class FlashMla:
    """`flash_mla`, as its interface says: one query a sequence, blocks of 64, its own outputs."""

    def __init__(self):
        self.plans = []

    def get_mla_metadata(self, *_args, **_kwargs):
        self.plans.append(SimpleNamespace(used=False))
        return self.plans[-1], None

    def flash_mla_with_kvcache(
        self, q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,
        num_splits=None, softmax_scale=None, causal=False,
    ):  # fmt: skip
        assert not tile_scheduler_metadata.used
        tile_scheduler_metadata.used = True
        assert num_splits is None
        assert not causal
        num_blocks, positions, num_heads_k, width = k_cache.shape
        assert (positions, num_heads_k, width, head_dim_v) == (64, 1, RANK + ROTARY, RANK)
        assert q.shape[1] == 1
        assert q.is_contiguous()
        assert q.dtype == k_cache.dtype == torch.bfloat16
        assert cache_seqlens.dtype == block_table.dtype == torch.int32
        assert cache_seqlens.is_contiguous()
        assert block_table.stride(-1) == 1
        outs, sums = [], []
        for query, table, length in zip(q, block_table, cache_seqlens.tolist(), strict=True):
            used = table[: math.ceil(max(length, 1) / 64)].tolist()
            assert all(0 <= block < num_blocks for block in used), "read out of bounds"
            out, lse = attend(query[0], k_cache[used].flatten(0, 2)[:length], softmax_scale)
            outs.append(out)
            sums.append(lse)
        return torch.stack(outs).to(q.dtype).unsqueeze(1), torch.stack(sums).unsqueeze(2)


class FlashInferWrapper:
    """`flashinfer.mla.BatchMLAPagedAttentionWrapper`, whose logarithms are to the base of 2."""

    def __init__(self, float_workspace_buffer):
        assert float_workspace_buffer.numel() == 128 * 2**20

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe,
        page_size, causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert qo_indptr.tolist() == list(range(len(kv_len_arr) + 1))
        assert (head_dim_ckv, head_dim_kpe, causal) == (RANK, ROTARY, False)
        assert q_data_type == kv_data_type == torch.bfloat16
        for tensor in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            assert tensor.dtype == torch.int32
        assert len(kv_indices) == kv_indptr[-1]
        self.scale, self.page_size, self.num_heads = sm_scale, page_size, num_heads
        self.pages = kv_indices.tensor_split(kv_indptr[1:-1].tolist())
        self.lengths = kv_len_arr.tolist()

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, return_lse=False):
        assert return_lse
        assert q_nope.shape[1] == self.num_heads
        assert ckv_cache.shape[1] == self.page_size
        cache = torch.cat([ckv_cache, kpe_cache], dim=-1)
        queries = torch.cat([q_nope, q_pe], dim=-1)
        outs, sums = [], []
        for query, pages, length in zip(queries, self.pages, self.lengths, strict=True):
            assert len(pages) == math.ceil(length / self.page_size)
            assert all(0 <= page < len(cache) for page in pages.tolist()), "read out of bounds"
            out, lse = attend(query, cache[pages].flatten(0, 1)[:length], self.scale)
            outs.append(out)
            sums.append(lse / math.log(2))
        return torch.stack(outs).to(q_nope.dtype), torch.stack(sums)


@pytest.fixture
def flash_mla(monkeypatch):
    library = FlashMla()
    monkeypatch.setitem(sys.modules, "flash_mla", library)
    return library


@pytest.fixture
def flashinfer(monkeypatch):
    libraries._flashinfer_wrapper.cache_clear()
    module = SimpleNamespace(BatchMLAPagedAttentionWrapper=FlashInferWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(mla=module))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    yield module
    libraries._flashinfer_wrapper.cache_clear()


@pytest.fixture
def hopper(monkeypatch):
    """As if there was a Hopper GPU; what computes is the stand-in, on the CPU."""
    monkeypatch.setattr(self_test, "_wrong_device", lambda backend: None)
    monkeypatch.setattr(self_test, "_device", lambda: torch.device("cpu"))


def run(backend, *, block_tokens=64, tables, lengths, num_heads=3):
    generator = torch.Generator().manual_seed(5)
    cache = torch.randn(6, block_tokens, RANK + ROTARY, generator=generator).bfloat16()
    query = torch.randn(len(lengths), num_heads, RANK + ROTARY, generator=generator).bfloat16()
    out = AttentionOutput(
        out_BHR=torch.full((len(lengths), num_heads, RANK), 9.0).bfloat16(),
        lse_BH=torch.full((len(lengths), num_heads), 9.0),
    )
    MLA_DECODE.backends[backend](
        query,
        PlainLatents(latents_BPC=cache, rank=RANK),
        tables_BS=torch.tensor(tables, dtype=torch.int32),
        lengths_B=torch.tensor(lengths, dtype=torch.int32),
        scale=0.04,
        tokens_per_split=None,
        out=out,
    )
    return out


# Two blocks, none, one whole and one that no query reads, an unknown one, a negative one, too many.
TABLES = [[5, 2], [77, -9], [4, 1000], [6, 0], [0, -1], [1, 3]]
LENGTHS = [70, 0, 64, 1, 65, 129]


@pytest.mark.parametrize("backend", ["flash_mla", "flashinfer"])
def test_a_library_keeps_the_contract_of_the_twin_also_where_it_would_read_out_of_bounds(
    backend, request
):
    request.getfixturevalue(backend)
    seen, right = (run(name, tables=TABLES, lengths=LENGTHS) for name in (backend, "reference"))
    for ours, theirs in ((seen.out_BHR, right.out_BHR), (seen.lse_BH, right.lse_BH)):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0, equal_nan=True)
    assert right.out_BHR.isnan().flatten(1).all(dim=1).tolist() == [False] * 3 + [True] * 3
    assert (seen.out_BHR[1] == 0).all()


def test_flashinfer_takes_blocks_of_any_size(flashinfer):
    asked = {"block_tokens": 16, "tables": [[5, 2, 0], [3, 3, 3]], "lengths": [33, 16]}
    seen, right = (run(name, **asked) for name in ("flashinfer", "reference"))
    torch.testing.assert_close(seen.lse_BH, right.lse_BH, atol=2e-3, rtol=0)


def test_flash_mla_plans_every_call_because_plans_depend_on_lengths(flash_mla):
    for length in (3, 90):
        run("flash_mla", tables=[[1, 2]], lengths=[length])
    assert [plan.used for plan in flash_mla.plans] == [True, True]


@pytest.mark.parametrize("backend", ["flash_mla", "flashinfer"])
def test_without_queries_no_library_is_called(backend):
    empty = AttentionOutput(out_BHR=torch.empty(0, 3, RANK).bfloat16(), lse_BH=torch.empty(0, 3))
    MLA_DECODE.backends[backend](
        torch.empty(0, 3, RANK + ROTARY).bfloat16(),
        PlainLatents(latents_BPC=torch.zeros(1, 64, RANK + ROTARY).bfloat16(), rank=RANK),
        tables_BS=torch.zeros(0, 1, dtype=torch.int32),
        lengths_B=torch.zeros(0, dtype=torch.int32),
        scale=1.0,
        tokens_per_split=None,
        out=empty,
    )


def test_input_that_a_library_cannot_read_is_rejected_before_the_call():
    def why(backend, **changes):
        right = {"rank": RANK, "rotary": ROTARY, "block_tokens": 64, "quantized": False}
        return misfit(backend, LatentShape(**right | changes))

    for backend in ("flash_mla", "flashinfer"):
        assert why(backend) is None
        assert "compiled for 512 + 64 numbers, not 256 + 64" in why(backend, rank=256)
        assert "no latents in FP8" in why(backend, quantized=True)
    assert why("flash_mla", block_tokens=16) == "it takes blocks of 64 positions, not 16"
    assert why("flashinfer", block_tokens=16) is None
    assert why("triton", rank=16, quantized=True) is None


def test_a_launch_that_a_library_cannot_make_is_rejected_by_name():
    query = torch.zeros(1, 2, RANK + ROTARY).bfloat16()
    plain = PlainLatents(latents_BPC=torch.zeros(1, 64, RANK + ROTARY).bfloat16(), rank=RANK)
    quantized = QuantizedLatents(
        codes_BPR=torch.zeros(1, 64, RANK, dtype=CODE),
        scales_BPG=torch.zeros(1, 64, 4),
        rotary_BPP=torch.zeros(1, 64, ROTARY, dtype=torch.bfloat16),
    )
    for asked, latents, split, words in (
        (query, quantized, None, "no latents in FP8"),
        (query.float(), plain, None, "computes in bfloat16"),
        (query, plain, 64, "by all that it is batched with"),
    ):
        with pytest.raises(KernelInputError, match=f"flash_mla cannot attend here.*{words}"):
            MLA_DECODE.backends["flash_mla"](
                asked,
                latents,
                tables_BS=torch.zeros(1, 1, dtype=torch.int32),
                lengths_B=torch.ones(1, dtype=torch.int32),
                scale=1.0,
                tokens_per_split=split,
                out=None,
            )


@pytest.mark.parametrize("backend", ["flash_mla", "flashinfer"])
def test_a_library_that_solves_the_self_test_is_offered_and_one_that_does_not_is_passed_over(
    backend, request, hopper, monkeypatch
):
    request.getfixturevalue(backend)
    assert self_test.obstacle("mla_decode", backend) is None
    setting = f"auto,mla_decode={backend}"

    def obstacle(operation, name):
        wanted = (operation, name) == ("mla_decode", backend)
        return self_test.obstacle(operation, name) if wanted else None

    assert resolve(setting, obstacle).backends["mla_decode"] == backend
    for wrong in (
        lambda *_args, out, **_options: out.out_BHR.fill_(0.1),
        lambda *_args, out, **_options: out.out_BHR.fill_(float("nan")),
        lambda *_args, **_options: 1 / 0,
    ):
        monkeypatch.setitem(MLA_DECODE.backends, backend, wrong)
        reason = self_test.obstacle("mla_decode", backend)
        assert "away from the reference" in reason or "ZeroDivisionError" in reason
        with pytest.raises(KernelsUnavailableError, match=f"mla_decode cannot run on {backend}"):
            resolve(setting, obstacle)
    if backend == "flash_mla":
        chosen = resolve("auto", obstacle)
        assert chosen.backends["mla_decode"] == "triton"
        assert "ZeroDivisionError" in chosen.obstacles["mla_decode=flash_mla"]


@pytest.mark.parametrize(
    ("backend", "module", "name"),
    [
        ("flash_mla", "flash_mla", "flash_mla_with_kvcache"),
        ("flashinfer", "flashinfer.mla", "BatchMLAPagedAttentionWrapper"),
    ],
)
def test_a_library_that_is_not_there_or_another_release_is_an_obstacle(
    backend, module, name, monkeypatch
):
    monkeypatch.setitem(sys.modules, module.partition(".")[0], SimpleNamespace())
    monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    assert self_test.obstacle("mla_decode", backend) == f"this {module} has no {name}"
    monkeypatch.setitem(sys.modules, module, None)
    assert f"{module} cannot be imported" in self_test.obstacle("mla_decode", backend)


def test_a_process_leaves_out_what_cannot_compute_its_model(monkeypatch):
    everything = resolve("auto", lambda _operation, _name: None)
    assert everything.backends["mla_decode"] == "flash_mla"
    reasons = {"mla_decode=flash_mla": "it takes blocks of 64 positions, not 16"}
    fewer = without(everything, reasons)
    assert fewer.backends["mla_decode"] == "triton"
    assert fewer.obstacles["mla_decode=flash_mla"] == reasons["mla_decode=flash_mla"]
    use_backends(monkeypatch, everything)
    selection.exclude(reasons)
    assert selection.own() == selection.current() == fewer
    named = resolve("auto,mla_decode=flash_mla", lambda _operation, _name: None)
    with pytest.raises(KernelsUnavailableError, match="it takes blocks of 64 positions, not 16"):
        without(named, reasons)
