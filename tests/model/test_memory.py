"""The memory plan equals what models, caches and buffers really allocate."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch

from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.all_to_all.window import WindowMap, virtual_windows
from equipoise_model.config import Fp8Config
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.latent_cache import LatentCache, blocks_for
from equipoise_model.memory import (
    GIB,
    MemoryPlan,
    RankSizes,
    RowBytes,
    Term,
    graph_bytes,
    plan_memory,
    step_bytes,
)
from equipoise_model.operations import Operations
from equipoise_model.plain.transformer import Transformer
from equipoise_model.presets import DEEPSEEK_V3, TINY
from equipoise_model.sampling import sample
from equipoise_model.sampling_params import MAX_SCORED_ROWS, SamplingParams, SamplingRow
from equipoise_model.step import StepBatch
from tests.support.fp8_models import WIDE
from tests.support.live_bytes import LiveBytes
from tests.support.pretended_device import CUDA, OnDevice, pretended_device

CPU = torch.device("cpu")
FP8 = dataclasses.replace(WIDE, quantization_config=Fp8Config(), num_nextn_predict_layers=1)


def sizes(**changes):
    chosen = RankSizes(
        is_fp8=True,
        on_gpu=True,
        num_ranks=2,
        slots_per_rank=3,
        spare_slots=2,
        num_blocks=5,
        block_tokens=16,
        fp8_latents=False,
        context_length=48,
        max_requests=4,
        max_step_tokens=32,
        max_graph_rows=4,
        speculate=0,
    )
    return dataclasses.replace(chosen, **changes)


def bytes_of(plan):
    return {term.name: term.num_bytes for term in plan.terms}


def tensors_in(value, seen):
    """Every tensor that an object holds, in modules, dataclasses, lists and attributes."""
    if isinstance(value, torch.Tensor):
        yield value.numbers if isinstance(value, OnDevice) else value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    elif hasattr(value, "__slots__"):
        parts = [getattr(value, name) for name in value.__slots__]
    else:
        return
    for part in parts:
        yield from tensors_in(part, seen)


def allocated(value):
    storages = {one.untyped_storage().data_ptr(): one for one in tensors_in(value, set())}
    return sum(one.untyped_storage().nbytes() for one in storages.values())


@pytest.mark.parametrize(
    ("fp8", "fp8_latents", "speculate", "device"),
    [
        (True, False, 0, CPU),
        (True, True, 0, CPU),
        (True, True, 1, CPU),
        (False, False, 0, CPU),
        (False, False, 1, CPU),
        (False, False, 1, CUDA),
    ],
    ids=[
        "fp8",
        "fp8 latents",
        "fp8 latents with drafts",
        "float32",
        "float32 with drafts",
        "bfloat16 with drafts",
    ],
)
def test_weights_and_latents_take_the_planned_memory(fp8, fp8_latents, speculate, device):
    config, on_gpu = FP8 if fp8 else TINY, device == CUDA
    chosen = sizes(is_fp8=fp8, fp8_latents=fp8_latents, speculate=speculate, on_gpu=on_gpu)
    operations = Operations(
        device=device, fp8=config.quantization_config, fp8_latents=fp8_latents, block_tokens=16
    )
    with pretended_device() if on_gpu else nullcontext():
        check_memory(config, chosen, operations)


def check_memory(config, chosen, operations):
    speculate, fp8 = chosen.speculate, chosen.is_fp8
    model = operations.model(
        config,
        num_slots=chosen.slots_per_rank,
        num_spare=chosen.spare_slots,
        row_block=None,
        mtp=speculate > 0,
        max_graph_rows=0,
    )
    cache = operations.cache(
        config, num_blocks=chosen.num_blocks, max_len=chosen.context_length, mtp=speculate > 0
    )
    planned = bytes_of(plan_memory(config, chosen))
    weights = sum(planned[name] for name in ("dense weights", "experts", "staging slots"))
    # The map of slots to places: four bytes each, which the plan leaves out.
    maps = 4 * chosen.slots_per_rank * len(model.slots) if fp8 else 0
    assert allocated(model) == weights + maps
    assert allocated(cache) == planned["latents"]
    slots = sum(allocated(one) for one in model.slots)
    assert slots - maps == planned["experts"] + planned["staging slots"]


def test_exchange_buffers_are_at_least_the_windows_and_deep_eps_layout():
    shape = EpShape(
        rank=0,
        num_ranks=2,
        slots_per_rank=3,
        top_k=FP8.num_experts_per_tok,
        dim=FP8.hidden_size,
        max_tokens=32,
        payload=Payload.FP8,
    )
    (window, _) = virtual_windows(shape, device=CPU)
    planned = bytes_of(plan_memory(FP8, sizes()))["exchange buffers"]
    assert planned >= WindowMap.of_shape(shape).num_bytes == window.local.nbytes
    assert planned >= 4 * 6 * 32 * (2 * 128 + 16)
    assert bytes_of(plan_memory(FP8, sizes(num_ranks=1)))["exchange buffers"] == 0


def test_estimates_grow_with_their_settings():
    few, many = (
        bytes_of(plan_memory(FP8, sizes(max_step_tokens=tokens, max_graph_rows=rows)))
        for tokens, rows in ((32, 0), (64, 4))
    )
    assert few["graphs"] == 0 < many["graphs"]
    assert 0 < few["activations"] < many["activations"]
    # On a CPU nothing is captured, and the host is the device.
    on_cpu = plan_memory(FP8, sizes(on_gpu=False))
    assert bytes_of(on_cpu)["graphs"] == 0
    assert on_cpu.host_terms == ()


TWO_LAYERS = dataclasses.replace(
    TINY, num_hidden_layers=2, num_nextn_predict_layers=0, max_position_embeddings=4096
)
WORDY = dataclasses.replace(TWO_LAYERS, vocab_size=4096)
"""Its logits, and sampling, take more than its layers."""


def batch_of(chunks):
    """A step of chunks (first position, tokens), a sequence each, with as many logits as may be."""
    tables, num_blocks, positions, sequences = [], 0, [], []
    for sequence, (start, length) in enumerate(chunks):
        size = blocks_for(start + length)
        tables.append(range(num_blocks, num_blocks + size))
        num_blocks += size
        positions += range(start, start + length)
        sequences += [sequence] * length
    return StepBatch(
        tokens_T=torch.arange(len(positions)) % 251,
        positions_T=torch.tensor(positions),
        sequences_T=torch.tensor(sequences),
        block_tables=tables,
        sample_rows_S=torch.arange(len(positions))[: len(chunks) + MAX_SCORED_ROWS],
    )


# The most that there may be of so many rows: sequences as long as the context, each with a token,
# or one with a chunk of its prompt; and rows with little context, for which experts take more.
STEPS = {
    "a token": (TWO_LAYERS, 1024, [(1023, 1)]),
    "tokens of many sequences": (TWO_LAYERS, 1024, [(1023, 1)] * 24),
    "a short chunk": (TWO_LAYERS, 1024, [(984, 40)]),
    "a chunk that is expanded": (TWO_LAYERS, 1024, [(824, 200)]),
    "a longer context": (TWO_LAYERS, 4096, [(4095, 1)] * 3),
    "tokens of short sequences": (TWO_LAYERS, 64, [(63, 1)] * 100),
    "many words": (WORDY, 64, [(63, 1)] * 16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row_block", [None, 16])
@pytest.mark.parametrize(("config", "context", "chunks"), STEPS.values(), ids=STEPS)
def test_a_step_of_the_plain_plane_takes_the_memory_that_is_charged(
    config, context, chunks, row_block, dtype
):
    batch = batch_of(chunks)
    num_blocks = 1 + max(table[-1] for table in batch.block_tables)
    model = Transformer(config, row_block=row_block, dtype=dtype).requires_grad_(
        requires_grad=False
    )
    cache = LatentCache(config, num_blocks=num_blocks, max_len=context, dtype=dtype)
    experts = ExpertParallel.local(config)
    row = SamplingRow(params=SamplingParams(top_p=0.9), position=context)
    with LiveBytes() as live:
        output = model.step(batch, cache, experts)
        # As the engine does, which parts them from those that score prompts.
        sampled = output.logits_SV[torch.arange(len(batch.sample_rows_S))]
        sample(sampled, [row] * len(sampled))
    charged = step_bytes(
        config,
        sizes(
            is_fp8=False,
            on_gpu=dtype == torch.bfloat16,
            num_ranks=1,
            slots_per_rank=config.n_routed_experts,
            context_length=context,
            max_requests=len(chunks),
            row_block=row_block,
        ),
        rows=batch.num_tokens,
    )
    assert live.peak <= charged < 2.5 * live.peak


def test_splits_of_long_contexts_take_what_the_kernels_allocate():
    # One rank with one slot, so that attention takes the most.
    def charged(rows, **changes):
        few = {"num_ranks": 1, "slots_per_rank": 1, "max_requests": 1}
        return graph_bytes(DEEPSEEK_V3, sizes(**few, **changes), rows=rows)

    partial = 128 * 513 * 4
    for rows, at_512, at_32k in ((16, 16 + 132, 16 * 64), (64, 64 + 132, 32 * 32)):
        for context_length, results in ((512, at_512), (32_768, at_32k)):
            row = RowBytes.of(DEEPSEEK_V3, is_fp8=True, dtype=torch.bfloat16)
            expected = rows * (row.residual + row.attention) + results * partial
            assert charged(rows, context_length=context_length) == expected


def test_sampling_is_charged_beside_logits_and_not_in_captured_steps():
    few = sizes(num_ranks=1, slots_per_rank=1, max_requests=1)
    row = RowBytes.of(DEEPSEEK_V3, is_fp8=True, dtype=torch.bfloat16)
    # At most 64 rows of 129,280 tokens are sampled at once.
    sampling = 64 * 129_280 * 64
    expected = 100 * (row.residual + 2 * 2 * 129_280) + sampling
    assert step_bytes(DEEPSEEK_V3, few, rows=100) == expected
    assert graph_bytes(DEEPSEEK_V3, few, rows=100) < expected - 100 * 2 * 2 * 129_280


def test_deepseek_v3_in_fp8_takes_44_mb_an_expert_and_fits_32_h100():
    chosen = sizes(
        num_ranks=32,
        slots_per_rank=9,
        num_blocks=12_288,
        context_length=32_768,
        max_requests=128,
        max_step_tokens=1024,
        max_graph_rows=128,
    )
    plan = plan_memory(DEEPSEEK_V3, chosen)
    planned = bytes_of(plan)
    assert planned["experts"] == 9 * 58 * 44_050_944
    # 37 of the 671 billion parameters are not routed experts', and some are in bfloat16.
    assert 17e9 < planned["dense weights"] < 21e9
    assert planned["latents"] == 12_289 * 16 * 61 * 1152
    assert plan.obstacle(78 * GIB) is None
    reason = plan.obstacle(60 * GIB)
    assert "this rank needs 68.0 GiB, 8.0 GiB more than the device's 60.0 GiB" in reason
    assert "one of these suffices: latents take 12.9 GiB: lower --cache-tokens" in reason


def test_what_the_plain_plane_copies_of_the_cache_shrinks_with_requests_and_contexts():
    chosen = sizes(is_fp8=False, context_length=1024, max_requests=64, max_step_tokens=64)
    plan = plan_memory(TINY, chosen)
    (term,) = (one for one in plan.terms if one.name == "activations")
    assert term.least_bytes < term.num_bytes / 10
    reason = plan.obstacle(plan.num_bytes - term.num_bytes // 2)
    assert "lower --max-step-tokens, --max-requests or --context-length" in reason
    few = dataclasses.replace(chosen, max_requests=1, max_step_tokens=1)
    assert bytes_of(plan_memory(TINY, few))["activations"] == term.least_bytes


def test_deepseek_v3_by_torch_takes_two_bytes_a_weight_on_a_gpu_and_four_on_a_cpu():
    config = dataclasses.replace(DEEPSEEK_V3, quantization_config=None)
    chosen = sizes(is_fp8=False, num_ranks=32, slots_per_rank=9, context_length=4096)
    on_gpu = plan_memory(config, chosen)
    on_cpu = plan_memory(config, dataclasses.replace(chosen, on_gpu=False))
    for plan, itemsize, name in ((on_gpu, 2, "bfloat16"), (on_cpu, 4, "float32")):
        assert bytes_of(plan)["experts"] == 9 * 58 * 3 * 2048 * 7168 * itemsize
        assert bytes_of(plan)["latents"] == 6 * 16 * 61 * 576 * itemsize
        for term in plan.terms:
            is_weight = term.name in ("dense weights", "experts", "latents")
            assert not is_weight or term.basis.endswith(f"in {name}"), term
    reason = on_cpu.obstacle(78 * GIB)
    assert "no setting of this worker frees enough, because at least experts 76.1 GiB" in reason


def test_a_plan_that_does_not_fit_names_what_can_shrink():
    def term(name, num_bytes, least_bytes):
        return Term(
            name=name,
            num_bytes=num_bytes * GIB,
            least_bytes=least_bytes * GIB,
            basis="",
            remedy=f"lower --{name}",
        )

    plan = MemoryPlan(terms=(term("a", 10, 8), term("b", 9, 4), term("c", 7, 7)), host_terms=())
    assert plan.obstacle(26 * GIB) is None
    assert "; one of these suffices: b take 9.0 GiB: lower --b; a take" in plan.obstacle(24 * GIB)
    assert plan.obstacle(22 * GIB).endswith("one of these suffices: b take 9.0 GiB: lower --b")
    assert "; shrink several: b take 9.0 GiB" in plan.obstacle(20 * GIB)
    assert "at least a 8.0 GiB and c 7.0 GiB remain: use more ranks" in plan.obstacle(18 * GIB)
