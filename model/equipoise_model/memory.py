"""`plan_memory`: the memory that one rank of a model needs, term by term, before it is allocated.

Weights, latents and exchange buffers are exact. Activations, graphs and the allowance for the CUDA
runtime are upper estimates. Pure: it allocates nothing and asks no device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Self

import torch

from equipoise_kernels.formats import GROUP
from equipoise_kernels.fp8.attention.mla_decode import most_partial_results
from equipoise_kernels.fp8.gemm.schedule import GROUP_ALIGNMENT
from equipoise_model.config import ModelConfig
from equipoise_model.device import compute_dtype
from equipoise_model.fp8.prefill import stretch_bytes
from equipoise_model.fp8.slot_exchange import exchange_tokens
from equipoise_model.fp8.transformer import Fp8Transformer
from equipoise_model.latent_cache import LatentCache
from equipoise_model.plain.attention import attention_bytes
from equipoise_model.plain.transformer import Transformer
from equipoise_model.sampling import sampling_bytes
from equipoise_model.sampling_params import MAX_SCORED_ROWS
from equipoise_model.serving_model import ServingModel

GIB = 2**30

ALLOWANCE_BYTES = 2 * GIB
"""Estimate for the CUDA context, NCCL, loaded kernels and the allocator's fragments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSizes:
    """What a worker's settings say about memory."""

    is_fp8: bool
    """Whether the FP8 plane computes; else the plain one does."""
    on_gpu: bool
    """Whether the device is a GPU."""
    num_ranks: int
    """Ranks of the complete pool."""
    slots_per_rank: int
    """Physical slots per MoE layer."""
    spare_slots: int
    """Places per MoE layer beyond the slots, in which experts are staged; FP8 only."""
    places: int = 0
    """Places that layers share, and share the spare ones with; 0 for one for each slot."""
    num_blocks: int
    """Blocks of the latent cache."""
    block_tokens: int
    """Positions per block."""
    fp8_latents: bool
    """Whether latents are stored in FP8."""
    context_length: int
    """Most positions of a request."""
    max_requests: int
    """Requests generated concurrently."""
    max_step_tokens: int
    """Tokens of one step."""
    max_graph_rows: int
    """Rows of the largest captured decode step; 0 captures none."""
    speculate: int
    """Draft tokens per generated token."""
    row_block: int | None = None
    """Rows of every matrix product in batch-invariant mode, which only the plain plane has."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations, of latents, and of weights that are not in FP8."""
        return torch.bfloat16 if self.is_fp8 else compute_dtype(on_gpu=self.on_gpu)

    @property
    def dtype_name(self) -> str:
        """Its name, human-readable."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One use of memory."""

    name: str
    """What it is for."""
    num_bytes: int
    """Bytes with these settings."""
    least_bytes: int
    """Bytes with the smallest settings that still serve this model."""
    basis: str
    """How it is computed."""
    remedy: str
    """Which settings make it smaller; empty if none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of one rank."""

    terms: tuple[Term, ...]
    """Memory of the device that computes; of the host if that is a CPU."""
    host_terms: tuple[Term, ...]
    """Memory of the host beside a GPU; empty on a CPU."""

    @property
    def num_bytes(self) -> int:
        """All of the device's terms together."""
        return sum(term.num_bytes for term in self.terms)

    @property
    def host_bytes(self) -> int:
        """All of the host's terms together."""
        return sum(term.num_bytes for term in self.host_terms)

    def obstacle(self, capacity_bytes: int) -> str | None:
        """Why a device with this much memory cannot hold the rank, with the remedy, or None.

        Names the terms that free enough when their settings alone are lowered, those that can
        shrink the most first; if there is none, all that can shrink.
        """
        excess = self.num_bytes - capacity_bytes
        if excess <= 0:
            return None
        total = (
            f"this rank needs {_gib(self.num_bytes)}, {_gib(excess)} more than the device's "
            f"{_gib(capacity_bytes)}"
        )
        if sum(term.least_bytes for term in self.terms) > capacity_bytes:
            largest = sorted(self.terms, key=lambda term: -term.least_bytes)[:2]
            fixed = " and ".join(f"{one.name} {_gib(one.least_bytes)}" for one in largest)
            return (
                f"{total}, and no setting of this worker frees enough, because at least {fixed} "
                "remain: use more ranks, weights in FP8, or devices with more memory"
            )
        ranked = sorted(self.terms, key=lambda term: term.least_bytes - term.num_bytes)
        sufficient = [term for term in ranked if term.num_bytes - term.least_bytes >= excess]
        shown = sufficient or [term for term in ranked if term.num_bytes > term.least_bytes]
        advice = "; ".join(f"{one.name} take {_gib(one.num_bytes)}: {one.remedy}" for one in shown)
        return f"{total}; {'one of these suffices' if sufficient else 'shrink several'}: {advice}"


def plan_memory(config: ModelConfig, sizes: RankSizes) -> MemoryPlan:
    """Compute the memory of one rank of a model.

    `config` is the model as it computes: with `quantization_config` in the FP8 plane.
    """
    dense_bytes = _dense_bytes(config, sizes)
    shared = "" if config.shared_as_routed else "shared experts, "
    held = f"in FP8 and {sizes.dtype_name}" if sizes.is_fp8 else f"in {sizes.dtype_name}"
    terms = [
        Term(
            name="dense weights",
            num_bytes=dense_bytes,
            least_bytes=dense_bytes,
            basis=f"attention, dense layers, {shared}embeddings, draft modules, {held}",
            remedy="",
        ),
        *_expert_terms(config, sizes),
        *_working_terms(config, sizes),
    ]
    if not sizes.on_gpu:
        return MemoryPlan(terms=tuple(terms), host_terms=())
    allowance = Term(
        name="CUDA runtime",
        num_bytes=ALLOWANCE_BYTES,
        least_bytes=ALLOWANCE_BYTES,
        basis="an allowance for context, NCCL, kernels and fragments",
        remedy="",
    )
    return MemoryPlan(terms=(*terms, allowance), host_terms=_host_terms(config, sizes))


def _expert_terms(config: ModelConfig, sizes: RankSizes) -> tuple[Term, ...]:
    layers, slot_bytes = _num_layers(config, sizes), _slot_bytes(config, sizes)
    spare = sizes.spare_slots if sizes.is_fp8 else 0
    form = "FP8" if sizes.is_fp8 else sizes.dtype_name
    each = f"{slot_bytes / 1e6:.2f} MB in {form}"
    if sizes.places:
        held, unit, option = sizes.places, f"x {each}", "--places"
        least = ceil(config.num_placed_experts * layers / sizes.num_ranks)
        staged, kind = spare, "places"
    else:
        held, unit, option = (
            sizes.slots_per_rank,
            f"x {layers} MoE layers x {each}",
            "--slots-per-rank",
        )
        least = min(held, ceil(config.num_placed_experts / sizes.num_ranks))
        staged, kind, slot_bytes = spare, "slots", layers * slot_bytes
    return (
        Term(
            name="experts",
            num_bytes=held * slot_bytes,
            least_bytes=least * slot_bytes,
            basis=f"{held} {kind} {unit}",
            remedy=f"lower {option}, to {least} at the least, or add ranks",
        ),
        Term(
            name="staging slots",
            num_bytes=staged * slot_bytes,
            least_bytes=0,
            basis=f"{staged} spare {kind} {unit}",
            remedy="lower --spare-slots",
        ),
    )


def latent_token_bytes(config: ModelConfig, sizes: RankSizes) -> int:
    """Bytes of one position's latents in all layers."""
    return _cache(config, sizes, num_blocks=1).bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBytes:
    """Bytes per row of a step, by what it passes."""

    residual: int
    """Hidden states beside a layer."""
    attention: int
    """Queries, absorbed queries and outputs of all heads, in FP8."""
    partial: int
    """Float32 results of one split of a long context."""
    logits: int
    """A sampled row's logits, and their copy that is sampled from."""
    expert: int
    """A row at an expert: received, aligned, activated, and its output; of the plain plane also the
    output's parts, or its weighted copy."""
    message: int
    """A row in DeepEP's buffers."""

    @classmethod
    def of(cls, config: ModelConfig, *, is_fp8: bool, dtype: torch.dtype) -> Self:
        """Return those of a model; `dtype` is that of activations."""
        heads, rank, dim = config.num_attention_heads, config.kv_lora_rank, config.hidden_size
        hidden, number = config.moe_intermediate_size, dtype.itemsize
        width = config.qk_head_dim + config.latent_dim + 2 * rank + config.v_head_dim
        codes = 2 * (dim + dim // GROUP * 4) + hidden + hidden // GROUP * 4
        plain = max(number * (4 * dim + 3 * hidden), (8 + number) * dim)
        return cls(
            residual=8 * number * dim,
            attention=heads * width * number,
            partial=heads * (rank + 1) * 4,
            logits=2 * number * config.vocab_size,
            expert=codes + 4 * hidden + 2 * dim if is_fp8 else plain,
            message=2 * dim + max(16, dim // GROUP * 4),
        )


def exchange_bytes(config: ModelConfig, sizes: RankSizes) -> int:
    """Bytes of the buffers through which FP8 ranks exchange rows.

    Those of DeepEP's low-latency layout (its csrc/config.hpp): two buffers each to send and to
    receive a message for every slot and token. Triton's windows are smaller.
    """
    if not sizes.is_fp8 or sizes.num_ranks == 1:
        return 0
    messages = sizes.num_ranks * sizes.slots_per_rank * _exchange_tokens(sizes)
    return 4 * messages * RowBytes.of(config, is_fp8=True, dtype=sizes.dtype).message


def step_bytes(config: ModelConfig, sizes: RankSizes, *, rows: int) -> int:
    """Estimate the largest activations of a step with `rows` rows on every rank, in bytes.

    Those of its layers or of sampling, whichever are larger, beside rows and logits.
    """
    row = RowBytes.of(config, is_fp8=sizes.is_fp8, dtype=sizes.dtype)
    if sizes.row_block is not None:
        rows = sizes.row_block * ceil(rows / sizes.row_block)
    sampled = min(rows, sizes.max_requests * (1 + sizes.speculate) + MAX_SCORED_ROWS)
    widest = max(_layer_bytes(config, sizes, rows=rows), sampling_bytes(sampled, config.vocab_size))
    return rows * row.residual + sampled * row.logits + widest


def graph_bytes(config: ModelConfig, sizes: RankSizes, *, rows: int) -> int:
    """Estimate the activations of a captured step, which ends before the logits, in bytes."""
    row = RowBytes.of(config, is_fp8=sizes.is_fp8, dtype=sizes.dtype)
    return rows * row.residual + _layer_bytes(config, sizes, rows=rows)


def _layer_bytes(config: ModelConfig, sizes: RankSizes, *, rows: int) -> int:
    """The largest activations within a layer: in attention or in feed-forward networks."""
    row = RowBytes.of(config, is_fp8=sizes.is_fp8, dtype=sizes.dtype)
    experts = _expert_rows(config, sizes, rows=rows) * row.expert
    if sizes.is_fp8:
        heads, length = config.num_attention_heads, sizes.context_length
        partial = most_partial_results(rows, num_heads=heads, num_positions=length) * row.partial
        rebuilt = stretch_bytes(config, num_queries=rows, num_positions=max(rows, length))
        return max(rows * row.attention + partial + rebuilt, experts)
    attention = attention_bytes(
        config,
        num_rows=rows,
        num_sequences=sizes.max_requests,
        num_positions=sizes.context_length,
        row_block=sizes.row_block,
        itemsize=sizes.dtype.itemsize,
    )
    # The gate, the other product in row blocks and joined, and what is activated.
    dense = rows * 4 * config.intermediate_size * sizes.dtype.itemsize
    return max(attention, dense, experts)


def _working_terms(config: ModelConfig, sizes: RankSizes) -> Iterator[Term]:
    """What grows with requests and steps."""
    token_bytes = latent_token_bytes(config, sizes)
    least_blocks = ceil(sizes.context_length / sizes.block_tokens) + 1
    num_blocks = sizes.num_blocks + 1
    block_bytes = sizes.block_tokens * token_bytes
    fp8 = "" if sizes.fp8_latents or not sizes.is_fp8 else ", or choose --latents fp8"
    latents = "FP8" if sizes.fp8_latents else sizes.dtype_name
    yield Term(
        name="latents",
        num_bytes=num_blocks * block_bytes,
        least_bytes=min(num_blocks, least_blocks) * block_bytes,
        basis=f"{num_blocks * sizes.block_tokens} tokens x {token_bytes} bytes in {latents}",
        remedy=f"lower --cache-tokens, --max-requests or --context-length{fp8}",
    )
    buffers = exchange_bytes(config, sizes)
    yield Term(
        name="exchange buffers",
        num_bytes=buffers,
        least_bytes=buffers,
        basis=f"{sizes.num_ranks} ranks x {_exchange_tokens(sizes)} tokens, as DeepEP's",
        remedy="",
    )
    # The plain plane copies the latents of all requests of a step.
    fewest, copied = sizes, ""
    if not sizes.is_fp8:
        fewest, copied = replace(sizes, max_requests=1), ", --max-requests or --context-length"
    yield Term(
        name="activations",
        num_bytes=step_bytes(config, sizes, rows=sizes.max_step_tokens),
        least_bytes=step_bytes(
            config, fewest, rows=min(fewest.max_step_tokens, fewest.max_requests)
        ),
        basis=f"estimate for a step of {sizes.max_step_tokens} tokens",
        remedy=f"lower --max-step-tokens{copied}",
    )
    rows = sizes.max_graph_rows if sizes.is_fp8 and sizes.on_gpu else 0
    yield Term(
        name="graphs",
        num_bytes=graph_bytes(config, sizes, rows=rows) if rows else 0,
        least_bytes=0,
        basis=f"estimate for captured steps of up to {rows} rows, which share memory",
        remedy="lower --max-graph-rows",
    )


def _host_terms(config: ModelConfig, sizes: RankSizes) -> tuple[Term, ...]:
    layers = _num_layers(config, sizes)
    process = Term(
        name="process",
        num_bytes=4 * GIB,
        least_bytes=4 * GIB,
        basis="an allowance for PyTorch, CUDA and requests",
        remedy="",
    )
    epoch = Term(
        name="experts of a new epoch",
        num_bytes=(sizes.places or sizes.slots_per_rank * layers) * config.expert_bytes,
        least_bytes=0,
        basis="the payloads of all slots, if an epoch changes every one of them",
        remedy="lower --slots-per-rank",
    )
    return (process, epoch)


def _num_layers(config: ModelConfig, sizes: RankSizes) -> int:
    """Layers with slots: with drafts, those of the multi-token-prediction modules too."""
    return config.num_expert_layers if sizes.speculate else config.num_moe_layers


def _exchange_tokens(sizes: RankSizes) -> int:
    return exchange_tokens(sizes.max_step_tokens, max_graph_rows=sizes.max_graph_rows)


def _expert_rows(config: ModelConfig, sizes: RankSizes, *, rows: int) -> int:
    """Most rows that a rank's slots compute at once, padding included."""
    pairs = min(config.slots_per_token, sizes.slots_per_rank)
    at_once = rows
    if sizes.is_fp8 and sizes.num_ranks > 1:
        at_once = min(rows, _exchange_tokens(sizes))
    padding = sizes.slots_per_rank * (GROUP_ALIGNMENT if sizes.is_fp8 else sizes.row_block or 0)
    return sizes.num_ranks * at_once * pairs + padding


def _slot_bytes(config: ModelConfig, sizes: RankSizes) -> int:
    """Bytes of one slot in one layer, without its entry in the map of places."""
    if sizes.is_fp8:
        return config.expert_bytes
    return 3 * config.moe_intermediate_size * config.hidden_size * sizes.dtype.itemsize


def _dense_bytes(config: ModelConfig, sizes: RankSizes) -> int:
    """Bytes of all weights and tables but the experts' slots, from the model itself."""
    with torch.device("meta"):
        model: ServingModel = (
            Fp8Transformer(config, num_slots=1, num_spare=0, mtp=sizes.speculate > 0)
            if sizes.is_fp8
            else Transformer(config, num_slots=1, dtype=sizes.dtype, mtp=sizes.speculate > 0)
        )
    # The FP8 plane's slots are no parameters; the plain plane's are.
    experts = {id(tensor) for moe in model.moe_layers for tensor in moe.experts.parameters()}
    weights = [*model.parameters(), *model.buffers()]
    return sum(one.numel() * one.element_size() for one in weights if id(one) not in experts)


def _cache(config: ModelConfig, sizes: RankSizes, *, num_blocks: int) -> LatentCache:
    """A cache of the rank's kind without memory."""
    return LatentCache(
        config,
        num_blocks=num_blocks,
        max_len=sizes.block_tokens,
        mtp=sizes.speculate > 0,
        dtype=sizes.dtype,
        device="meta",
        block_tokens=sizes.block_tokens,
        fp8=sizes.fp8_latents,
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
