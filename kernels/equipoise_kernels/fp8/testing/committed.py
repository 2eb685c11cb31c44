"""All specialisations of the committed configurations, by operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equipoise_kernels.formats import GROUP
from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.peer_operation import ALL_TO_ALL
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.attention.latent_write import LATENT_WRITE
from equipoise_kernels.fp8.attention.mla_decode import MLA_DECODE
from equipoise_kernels.fp8.attention.mla_prefill import MLA_PREFILL
from equipoise_kernels.fp8.gemm.dense import GEMM
from equipoise_kernels.fp8.gemm.grouped import GROUPED_GEMM
from equipoise_kernels.fp8.moe.permute import COMBINE, PERMUTE
from equipoise_kernels.fp8.moe.replica_balance import REPLICA_BALANCE, LayoutSizes
from equipoise_kernels.fp8.moe.route import ROUTE
from equipoise_kernels.fp8.moe.routes import RoutingRule
from equipoise_kernels.fp8.moe.row_order import ROW_ORDER
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.quant.group_quant import GROUP_QUANT
from equipoise_kernels.fp8.quant.rms_norm_quant import RMS_NORM_QUANT
from equipoise_kernels.fp8.quant.silu_mul_quant import SILU_MUL_QUANT
from equipoise_kernels.fp8.quant.weight_quant import QUANTIZE_WEIGHT
from equipoise_kernels.fp8.specialization import Specialization

_HIDDEN = 7168
_GROUPS = 32
_EIGHT_RANKS = EpShape(
    rank=0,
    num_ranks=8,
    slots_per_rank=_GROUPS,
    top_k=8,
    dim=_HIDDEN,
    max_tokens=128,
    payload=Payload.FP8,
)
_RULE = RoutingRule(num_experts=256, num_groups=8, top_groups=4, top_k=8, normalize=True, scale=2.5)
_MAX_REPLICAS = 8

# Most that the kernels take: few experts with many replicas, many with few, and in between.
_LAYOUTS = tuple(
    LayoutSizes(
        num_experts=_RULE.num_experts,
        num_ranks=num_ranks,
        slots_per_rank=slots_per_rank,
        most_replicas=most_replicas,
    )
    for num_ranks, slots_per_rank, most_replicas in (
        (32, 9, 8),
        (144, 2, 64),
        (32, 10, 32),
        (64, 8, 8),
    )
)

_LATENTS = {"rank": 512, "rotary": 64, "block_tokens": 64}
# Specialisations that need sizes get those of DeepSeek-V3 with 32 slots per rank.
_SIZES: Mapping[str, Mapping[str, Any]] = {
    "all_to_all": {"shape": _EIGHT_RANKS},
    "grouped_gemm": {"num_groups": _GROUPS},
    "rms_norm_quant": {"dim": _HIDDEN},
    "route": {"rule": _RULE, "max_replicas": _MAX_REPLICAS},
    "row_order": {"num_slots": _GROUPS},
    "permute": {"top_k": _RULE.top_k, "groups": _HIDDEN // GROUP},
    "combine": {"top_k": _RULE.top_k},
    "latent_write": _LATENTS,
    "mla_decode": _LATENTS,
    "mla_prefill": {"plain": 128, "rotary": 64, "value": 128},
}

TUNABLES: Mapping[str, KernelOperation[Any, Any]] = {
    operation.name: operation
    for operation in (
        ALL_TO_ALL,
        GEMM,
        GROUPED_GEMM,
        GROUP_QUANT,
        RMS_NORM_QUANT,
        ROUTE,
        ROW_ORDER,
        PERMUTE,
        COMBINE,
        LATENT_WRITE,
        MLA_DECODE,
        MLA_PREFILL,
        SILU_MUL_QUANT,
    )
}
"""The operations with configurations, by name."""


def specializations(operation: str, config: Any) -> list[Specialization]:
    """What a configuration compiles to."""
    return TUNABLES[operation].specializations(config, **_SIZES.get(operation, {}))


def committed_configs() -> list[tuple[str, Any]]:
    """Operation and configuration, each once."""
    found: dict[tuple[str, Any], None] = {}
    for name, operation in TUNABLES.items():
        for file in configurations.committed(name).values():
            for entry in file:
                found[name, type(operation.configs[0])(**entry.config)] = None
    return list(found)


def committed_specializations() -> list[Specialization]:
    """Everything to compile, each once, including kernels without configurations."""
    found = QUANTIZE_WEIGHT.specializations()
    for layout in _LAYOUTS:
        found += REPLICA_BALANCE.specializations(layout)
    for operation, config in committed_configs():
        found += specializations(operation, config)
    return list({what.name: what for what in found}.values())
