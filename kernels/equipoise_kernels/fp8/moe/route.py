"""From router logits to physical slots, in one kernel: choice, replicas, weights, counts.

Contract: logits [T, E] float32 with contiguous columns; T may be 0. A row's experts are those of
`plain.route` on the logits' sigmoids: in descending order of biased score, the lower expert first
among equals, NaN last. Each expert's replica is that of `replica_choice`, bit by bit, and the
layout's table gives its slot. With a shared expert, every row's last choice is that expert, with
weight 1. Tables are in device memory, so that a captured CUDA graph follows a
layout switch.

Rows from `num_valid` on are padding: expert and slot -1, weight 0, not counted. Counts are
integers, so the order of additions does not matter. A slot outside the counters is not counted, and
a replica beyond the table is its last one: nothing is read or written out of bounds.

Backends agree exactly on experts, slots and counts if their sigmoids do. Sigmoids, and the sum that
normalises weights, may differ in the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import require
from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.jit import constant, jit, next_power_of_two, tl
from equipoise_kernels.fp8.moe.ranking import LOWEST, TAKEN, best, in_best_groups, key, ranked
from equipoise_kernels.fp8.moe.routes import Routes, RoutingRule, SlotTables, empty_routes
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.specialization import Specialization
from equipoise_kernels.plain.route import route
from equipoise_kernels.replica_choice import (
    GOLDEN,
    MASK,
    MIX_FACTORS,
    SHARE_BITS,
    choose_replicas,
)

_GOLDEN = constant(GOLDEN)
_MASK = constant(MASK)
_MIX_1 = constant(MIX_FACTORS[0])
_MIX_2 = constant(MIX_FACTORS[1])
_SHARE_BITS = constant(SHARE_BITS)
_ALL_SHARES = constant(1 << SHARE_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConfig:
    """Launch parameters; a program routes one row."""

    num_warps: int
    """Warps per program."""


CONFIG_SPACE = tuple(RouteConfig(num_warps=num_warps) for num_warps in (1, 2, 4))


def route_to_slots(
    logits_TE: Tensor,
    bias_E: Tensor,
    *,
    rule: RoutingRule,
    tables: SlotTables,
    token_ids_T: Tensor,
    layer: int,
    rows_S: Tensor | None = None,
    num_valid: Tensor | None = None,
    out: Routes | None = None,
) -> Routes:
    """Route rows with the backend selected for this process.

    Args:
        logits_TE: the router's logits, before the sigmoid.
        bias_E: float32, added to sigmoids for the choice.
        rule: the model's routing rule.
        tables: the layer's replicas.
        token_ids_T: a running number per row, int64, at least 0.
        layer: index of the MoE layer.
        rows_S: int64 counters of assignments per physical slot, added to; None to not count.
        num_valid: int32 [1] on the device, number of rows that are not padding; None for all.
        out: where to write; allocated by default.

    Raises:
        KernelInputError: the arguments break the contract.
    """
    require("logits", logits_TE, torch.float32)
    if logits_TE.dim() != 2:
        raise KernelInputError(f"logits must be [T, E], not {list(logits_TE.shape)}")
    num_rows = logits_TE.shape[0]
    require("logits", logits_TE, shape=(num_rows, rule.num_experts), dense=True)
    require("slots_of_expert", tables.slots_of_expert_ER[:, 0], shape=(rule.num_placed,))
    vectors: list[tuple[str, Tensor, torch.dtype, int]] = [
        ("bias", bias_E, torch.float32, rule.num_experts),
        ("token_ids", token_ids_T, torch.int64, num_rows),
    ]
    if rows_S is not None:
        vectors.append(("rows", rows_S, torch.int64, rows_S.numel()))
    if num_valid is not None:
        vectors.append(("num_valid", num_valid, torch.int32, 1))
    for name, vector, dtype, size in vectors:
        require(name, vector, dtype, shape=(size,), contiguous=True, like=logits_TE)
    require("slots_of_expert", tables.slots_of_expert_ER, like=logits_TE)
    out = out or empty_routes(num_rows, rule.num_choices, device=logits_TE.device)
    require("out", out.slots_TK, shape=(num_rows, rule.num_choices), like=logits_TE)
    ROUTE.on(logits_TE.device)(
        logits_TE,
        bias_E,
        rule=rule,
        tables=tables,
        token_ids_T=token_ids_T,
        layer=layer,
        rows_S=rows_S,
        num_valid=num_valid,
        out=out,
    )
    return out


def route_reference(
    logits_TE: Tensor,
    bias_E: Tensor,
    *,
    rule: RoutingRule,
    tables: SlotTables,
    token_ids_T: Tensor,
    layer: int,
    rows_S: Tensor | None,
    num_valid: Tensor | None,
    out: Routes,
) -> None:
    """The torch twin."""
    ids_TK, weights_TK = route(
        torch.sigmoid(logits_TE),
        bias_E,
        num_groups=rule.num_groups,
        top_groups=rule.top_groups,
        top_k=rule.top_k,
        normalize=rule.normalize,
        scale=rule.scale,
    )
    if rule.shared:
        ids_TK = functional.pad(ids_TK, (0, 1), value=rule.num_experts)
        weights_TK = functional.pad(weights_TK, (0, 1), value=1.0)
    replicas_TK = choose_replicas(
        ids_TK,
        token_ids_T,
        tables.replica_count_E,
        layer=layer,
        share_ends_ER=tables.share_ends_ER,
    )
    slots_TK = tables.slots_of_expert_ER[ids_TK, replicas_TK]
    if num_valid is not None:
        padding_T1 = (torch.arange(len(ids_TK), device=ids_TK.device) >= num_valid).unsqueeze(1)
        ids_TK, slots_TK = ids_TK.masked_fill(padding_T1, -1), slots_TK.masked_fill(padding_T1, -1)
        weights_TK = weights_TK.masked_fill(padding_T1, 0.0)
    out.expert_ids_TK.copy_(ids_TK)
    out.slots_TK.copy_(slots_TK)
    out.weights_TK.copy_(weights_TK)
    if rows_S is not None:
        counted = slots_TK[(slots_TK >= 0) & (slots_TK < len(rows_S))]
        rows_S += torch.bincount(counted, minlength=len(rows_S))


def route_triton(
    logits_TE: Tensor,
    bias_E: Tensor,
    *,
    rule: RoutingRule,
    tables: SlotTables,
    token_ids_T: Tensor,
    layer: int,
    rows_S: Tensor | None,
    num_valid: Tensor | None,
    out: Routes,
    config: RouteConfig | None = None,
) -> None:
    """Launch the kernel, with the committed configuration of this device by default."""
    num_rows = logits_TE.shape[0]
    if num_rows == 0:
        return
    config = config or ROUTE.config(rows=num_rows)
    shares = tables.slots_of_expert_ER if tables.share_ends_ER is None else tables.share_ends_ER
    route_kernel[(num_rows,)](
        logits_TE,
        bias_E,
        token_ids_T,
        tables.slots_of_expert_ER,
        tables.replica_count_E,
        shares,
        token_ids_T if rows_S is None else rows_S,
        token_ids_T if num_valid is None else num_valid,
        out.expert_ids_TK,
        out.slots_TK,
        out.weights_TK,
        rule.scale,
        layer,
        0 if rows_S is None else rows_S.numel(),
        tables.slots_of_expert_ER.shape[1],
        logits_TE.stride(0),
        tables.slots_of_expert_ER.stride(0),
        shares.stride(0),
        out.expert_ids_TK.stride(0),
        out.slots_TK.stride(0),
        out.weights_TK.stride(0),
        **_constants(
            rule,
            max_replicas=tables.slots_of_expert_ER.shape[1],
            has_shares=tables.share_ends_ER is not None,
            has_padding=num_valid is not None,
        ),
        **configurations.options(config),
    )


@jit
def route_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    slots_of_expert_ptr: tl.tensor,
    replica_count_ptr: tl.tensor,
    share_ends_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    num_valid_ptr: tl.tensor,
    expert_ids_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    scale: float,
    layer: int,
    num_slots: int,
    num_places: int,
    logits_stride: int,
    table_stride: int,
    share_stride: int,
    expert_ids_stride: int,
    slots_stride: int,
    weights_stride: int,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_PLACES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_SHARES: tl.constexpr,
    HAS_PADDING: tl.constexpr,
) -> None:
    """Each program routes one row, with experts in registers as [groups, experts of a group]."""
    row = tl.program_id(0).to(tl.int64)
    choices = tl.arange(0, PADDED_K)
    stored = choices < CHOICES
    is_valid = row < tl.load(num_valid_ptr) if HAS_PADDING else row >= 0

    group = tl.arange(0, PADDED_GROUPS)[:, None]
    member = tl.arange(0, PADDED_SIZE)[None, :]
    expert = group * GROUP_SIZE + member
    inside = (group < GROUPS) & (member < GROUP_SIZE)
    logits = tl.load(logits_ptr + row * logits_stride + expert, mask=inside, other=0.0)
    scores = tl.where(inside, tl.sigmoid(logits), 0.0)
    biased = scores + tl.load(bias_ptr + expert, mask=inside, other=0.0)
    keys = _eligible(tl.where(inside, key(biased), TAKEN), inside, GROUPS, TOP_GROUPS)
    ids, weights = _chosen(keys, scores, expert, TOP_K, PADDED_K)
    if NORMALIZE:
        weights = tl.div_rn(weights, tl.sum(weights, axis=0) + 1e-20 + tl.zeros_like(weights))
    weights *= scale
    if CHOICES > TOP_K:
        ids = tl.where(choices == TOP_K, GROUPS * GROUP_SIZE, ids)
        weights = tl.where(choices == TOP_K, 1.0, weights)

    fraction = (tl.load(token_ids_ptr + row) * _GOLDEN + _mix(ids + layer * 65536)) & _MASK
    if HAS_SHARES:
        share_ptrs = share_ends_ptr + ids * share_stride
        replicas = _replica_by_shares(fraction, share_ptrs, num_places, PADDED_PLACES)
    else:
        replicas = (fraction * tl.load(replica_count_ptr + ids)) >> 32
    replicas = tl.minimum(replicas, num_places - 1)
    slots = tl.load(slots_of_expert_ptr + ids * table_stride + replicas)

    counted = stored & is_valid & (slots >= 0) & (slots < num_slots)
    tl.atomic_add(rows_ptr + slots, tl.full([PADDED_K], 1, tl.int64), mask=counted, sem="relaxed")
    ids = tl.where(is_valid, ids, -1)
    tl.store(expert_ids_ptr + row * expert_ids_stride + choices, ids, mask=stored)
    tl.store(slots_ptr + row * slots_stride + choices, tl.where(is_valid, slots, -1), mask=stored)
    weights = tl.where(is_valid, weights, 0.0)
    tl.store(weights_ptr + row * weights_stride + choices, weights, mask=stored)


@jit
def _eligible(
    keys: tl.tensor, inside: tl.tensor, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr
) -> tl.tensor:
    """Keys, the lowest of all for experts outside the best groups."""
    if TOP_GROUPS < GROUPS:
        keys = tl.where(in_best_groups(keys, TOP_GROUPS), keys, LOWEST)
        keys = tl.where(inside, keys, TAKEN)
    return keys


@jit
def _chosen(
    keys: tl.tensor,
    scores: tl.tensor,
    expert: tl.tensor,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Experts by descending key, int64 [PADDED_K], and their scores; zeros after TOP_K."""
    choices = tl.arange(0, PADDED_K)
    ids = tl.zeros([PADDED_K], tl.int64)
    weights = tl.zeros([PADDED_K], tl.float32)
    for choice in tl.static_range(TOP_K):
        winner = best(ranked(keys, expert))
        weight = tl.sum(tl.sum(tl.where(expert == winner, scores, 0.0), axis=1), axis=0)
        keys = tl.where(expert == winner, TAKEN, keys)
        ids = tl.where(choices == choice, winner, ids)
        weights = tl.where(choices == choice, weight, weights)
    return ids, weights


@jit
def _replica_by_shares(
    fraction: tl.tensor, share_ptrs: tl.tensor, num_places: int, PADDED_PLACES: tl.constexpr
) -> tl.tensor:
    """How many shares of each expert end at or before its fraction of 2^32."""
    place = tl.arange(0, PADDED_PLACES)[None, :]
    inside = place < num_places
    ends = tl.load(share_ptrs[:, None] + place, mask=inside, other=_ALL_SHARES)
    position = fraction >> (32 - _SHARE_BITS)
    return tl.sum((position[:, None] >= ends).to(tl.int64), axis=1)


@jit
def _mix(values: tl.tensor) -> tl.tensor:
    """`replica_choice`'s hash, in the same int64 arithmetic."""
    mixed = values & _MASK
    mixed = ((mixed ^ (mixed >> 16)) * _MIX_1) & _MASK
    mixed = ((mixed ^ (mixed >> 13)) * _MIX_2) & _MASK
    return mixed ^ (mixed >> 16)


def specializations(
    config: RouteConfig, rule: RoutingRule, *, max_replicas: int
) -> list[Specialization]:
    """Specialisations of a configuration: with and without shares."""
    return [
        Specialization(
            kernel=route_kernel,
            name=f"route {config} shares={has_shares}",
            types={
                "logits_ptr bias_ptr weights_ptr": "*fp32",
                "token_ids_ptr slots_of_expert_ptr replica_count_ptr share_ends_ptr "
                "rows_ptr expert_ids_ptr slots_ptr": "*i64",
                "num_valid_ptr": "*i32",
                "scale": "fp32",
            },
            multiples_of_16="logits_stride",
            options=configurations.options(config)
            | _constants(rule, max_replicas=max_replicas, has_shares=has_shares, has_padding=True),
        )
        for has_shares in (False, True)
    ]


def _constants(
    rule: RoutingRule, *, max_replicas: int, has_shares: bool, has_padding: bool
) -> dict[str, int | bool]:
    return {
        "GROUPS": rule.num_groups,
        "GROUP_SIZE": rule.group_size,
        "PADDED_GROUPS": next_power_of_two(rule.num_groups),
        "PADDED_SIZE": next_power_of_two(rule.group_size),
        "TOP_GROUPS": rule.top_groups,
        "TOP_K": rule.top_k,
        "CHOICES": rule.num_choices,
        "PADDED_K": next_power_of_two(rule.num_choices),
        "PADDED_PLACES": next_power_of_two(max_replicas) if has_shares else 1,
        "NORMALIZE": rule.normalize,
        "HAS_SHARES": has_shares,
        "HAS_PADDING": has_padding,
    }


ROUTE = KernelOperation(
    name="route",
    backends={"reference": route_reference, "triton": route_triton},
    configs=CONFIG_SPACE,
    specializations=specializations,
)
