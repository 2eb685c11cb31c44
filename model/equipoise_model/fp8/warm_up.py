"""`warm_up`: launches every kernel that serving needs, before a worker serves.

Triton compiles a kernel at its first launch, in a second or two. Ranks wait for each other in every
step, so a rank that compiles while others wait would exceed the step timeout, and a CUDA graph
cannot be captured while a kernel is loaded. Runs the model on padding rows, which store no latents,
at every size where a kernel's configuration may change: alone, and through a loopback of the
exchange between ranks. It also allocates what the largest step needs, so that a worker without
enough memory fails when it starts.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from equipoise_kernels.fp8 import selection
from equipoise_kernels.fp8.all_to_all.buffer import EpBuffer
from equipoise_kernels.fp8.all_to_all.collective import CollectiveBackend
from equipoise_kernels.fp8.all_to_all.opening import OpenedBuffer
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.moe.replica_balance import balance_to_slots
from equipoise_kernels.fp8.moe.routes import SlotTables
from equipoise_kernels.replica_choice import SHARE_BITS
from equipoise_model.exchange import RowExchange
from equipoise_model.expert_step import ExpertStep
from equipoise_model.fp8.prefill import STRETCH, Chunk, ExpandedRows, expands
from equipoise_model.fp8.rows import MicroBatch, StepRows
from equipoise_model.fp8.slot_exchange import PART_TOKENS, SlotExchange
from equipoise_model.fp8.transformer import Fp8Transformer
from equipoise_model.latent_cache import LatentCache
from equipoise_model.placement import PlacementTables

_MOST_REPLICAS = 16
"""Replicas of one expert up to which routing is compiled; a layout with more compiles it again."""

_MOST_SHARED_REPLICAS = 64
"""The same if the shared expert is one of them: every token goes to it, so it has the most."""

_BALANCED_REPLICAS = (8, 16)
"""Replicas of one expert up to which balancing is compiled."""

_DEEP_EP = "deep_ep"


def warm_up_sizes(max_rows: int) -> tuple[int, ...]:
    """Rows of the steps to run: powers of two, and the most.

    Configurations change at powers of two of rows, or of rows per expert.
    """
    powers = range((max_rows - 1).bit_length())
    return (*(1 << power for power in powers), max_rows)


@torch.no_grad()
def warm_up(model: Fp8Transformer, cache: LatentCache, *, max_rows: int) -> None:
    """Run steps of up to `max_rows` rows, after dense weights are loaded; slots may hold anything.

    Raises:
        torch.OutOfMemoryError: the largest step does not fit in the device's memory.
    """
    for exchange in (None, *_loopbacks(model)):
        for num_rows in reversed(warm_up_sizes(max_rows)):
            _run(model, cache, _placement(model), num_rows=num_rows, exchange=exchange)
        for placement in _replicated(model):
            # Tables of blocks are read by other kernels.
            _run(model, cache, placement, num_rows=1, exchange=exchange, widths=(1,))
    _run_prompt(model, cache, num_rows=max_rows)


def warm_up_balance(
    *, num_experts: int, num_ranks: int, slots_per_rank: int, device: torch.device
) -> None:
    """Launch what balances replicas between so many ranks, before they take steps together.

    A layout with more than 16 replicas of an expert compiles it again.
    """
    slots_E1 = torch.arange(num_experts, device=device).unsqueeze(1)
    for num_replicas in _BALANCED_REPLICAS:
        even = SlotTables(
            slots_of_expert_ER=slots_E1.repeat(1, num_replicas),
            replica_count_E=torch.ones(num_experts, dtype=torch.int64, device=device),
        )
        ends_ER = torch.full_like(even.slots_of_expert_ER, 1 << SHARE_BITS)
        for tables in (even, replace(even, share_ends_ER=ends_ER)):
            balance_to_slots(
                torch.full((1, 1), -1, device=device),
                torch.zeros(num_ranks, num_experts, dtype=torch.int64, device=device),
                tables,
                rank=0,
                slots_per_rank=slots_per_rank,
            )


def _run(
    model: Fp8Transformer,
    cache: LatentCache,
    placement: PlacementTables,
    *,
    num_rows: int,
    exchange: SlotExchange | None,
    widths: tuple[int | None, ...] = (1, None),
) -> None:
    """Run steps over tables of these widths, None for all, as eager steps and as captured ones."""
    device = model.embed_tokens.weight.device
    placement = placement.to(device)
    rows = StepRows.padding(num_rows, cache=cache, device=device)
    num_valid = torch.ones(1, dtype=torch.int32, device=device)
    for width in widths:
        tables_TS = rows.tables_TS[:, :width].contiguous()
        for is_captured in (False, True):
            step = _step(placement, num_rows=num_rows, exchange=exchange, is_captured=is_captured)
            batch = MicroBatch(
                rows=replace(rows, tables_TS=tables_TS),
                experts=step,
                num_valid=num_valid if is_captured else None,
            )
            hidden_TD = model.forward([batch], cache)
            model.lm_head(hidden_TD)
            for depth in range(1, 1 + model.num_mtp_layers):
                hidden_TD = model.forward_draft(
                    hidden_TD,
                    rows.tokens_T,
                    depth=depth,
                    rows=batch.rows,
                    cache=cache,
                    experts=step.resumed(
                        layer=model.config.num_moe_layers + depth - 1, tokens_by_rank=(num_rows,)
                    ),
                )


def _run_prompt(model: Fp8Transformer, cache: LatentCache, *, num_rows: int) -> None:
    """Attend from a prompt in the expanded form, to as many positions as are rebuilt together."""
    device = model.embed_tokens.weight.device
    config, num_rows = model.config, min(num_rows, cache.max_len)
    num_positions = min(cache.max_len, max(STRETCH, num_rows))
    lengths = (num_rows, num_positions, cache.max_len)
    if not any(expands(config, num_queries=num_rows, num_positions=one) for one in lengths):
        return
    chunk = Chunk(
        first_row=0,
        num_rows=num_rows,
        position=num_positions - num_rows,
        blocks=range(cache.num_blocks),
    )
    rows = StepRows.padding(num_rows, cache=cache, device=device)
    batch = MicroBatch(
        rows=rows,
        experts=_step(_placement(model).to(device), num_rows=num_rows, exchange=None),
        expanded=ExpandedRows.of_chunks(
            [chunk], num_rows=num_rows, block_tokens=cache.block_tokens
        ).to(device),
    )
    model.forward([batch], cache)


def _step(
    placement: PlacementTables,
    *,
    num_rows: int,
    exchange: SlotExchange | None,
    is_captured: bool = False,
) -> ExpertStep:
    """A step of a rank alone."""
    device = placement.replica_count.device
    return ExpertStep(
        placement=placement,
        ranks=RowExchange(group=None, rank=0, count=1),
        tokens_by_rank=(num_rows,),
        token_ids_T=torch.arange(num_rows, device=device),
        slot_load_LS=torch.zeros(
            placement.num_layers, placement.slots_per_rank, dtype=torch.int64, device=device
        ),
        exchange=exchange,
        is_captured=is_captured,
    )


def _placement(model: Fp8Transformer, *, num_replicas: int = 1) -> PlacementTables:
    """Tables that send every expert to one of this rank's slots, so that none is unknown."""
    config, num_slots = model.config, model.slots[0].num_slots
    shape = (len(model.moe_layers), config.num_placed_experts)
    slots_E = torch.arange(config.num_placed_experts) % num_slots
    return PlacementTables(
        generation=0,
        num_ranks=1,
        num_slots=num_slots,
        slots_of_expert=slots_E[None, :, None].repeat(shape[0], 1, num_replicas),
        replica_count=torch.full(shape, num_replicas),
    )


def _replicated(model: Fp8Transformer) -> Iterator[PlacementTables]:
    """Tables with more replicas, with and without shares: kernels are compiled for each width."""
    num_replicas = 1
    most = _MOST_SHARED_REPLICAS if model.config.shared_as_routed else _MOST_REPLICAS
    while num_replicas <= most:
        even = _placement(model, num_replicas=num_replicas)
        yield even
        yield replace(even, share_ends=torch.full_like(even.slots_of_expert, 1 << 15))
        num_replicas *= 2


def _loopbacks(model: Fp8Transformer) -> Iterator[SlotExchange]:
    """Exchanges of a single rank with itself, in each form in which rows may arrive."""
    config = model.config
    backends = [selection.REFERENCE]
    if selection.is_started() and _DEEP_EP in selection.own().possible["all_to_all"]:
        backends.append(_DEEP_EP)
    for backend in backends:
        shape = EpShape(
            rank=0,
            num_ranks=1,
            slots_per_rank=model.slots[0].num_slots,
            top_k=config.slots_per_token,
            dim=config.hidden_size,
            max_tokens=PART_TOKENS,
            payload=Payload.BF16 if backend == _DEEP_EP else Payload.FP8,
        )
        # Every padding row chooses the same experts, which may share a slot.
        crowded = replace(shape, max_tokens=PART_TOKENS * config.slots_per_token)
        loopback = CollectiveBackend(crowded, group=None, timeout_s=1.0)
        buffer = EpBuffer(crowded, loopback, device=model.embed_tokens.weight.device)
        opened = OpenedBuffer(buffer=buffer, shape=shape, backend=backend, passed_over={})
        yield SlotExchange(opened, max_captured_rows=1, timeout_s=1.0, generation=0)
