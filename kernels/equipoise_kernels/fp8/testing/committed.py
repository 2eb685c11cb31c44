"""All specialisations of the committed configurations, by operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.all_to_all import peer
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.attention import latent_write, mla_decode
from equipoise_kernels.fp8.gemm import dense, grouped
from equipoise_kernels.fp8.moe import permute, route, row_order
from equipoise_kernels.fp8.moe.routes import RoutingRule
from equipoise_kernels.fp8.quant import group_quant, rms_norm_quant, silu_mul_quant, weight_quant
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """An operation with configurations.

    A specialisation that needs sizes gets those of DeepSeek-V3 with 32 slots per rank.
    """

    kind: type[Any]
    """The dataclass of its configurations."""
    space: tuple[Any, ...]
    """The configurations to choose from."""
    specializations: Callable[[Any], list[Specialization]]
    """What a configuration compiles to."""


TUNABLES: Mapping[str, Tunable] = {
    "all_to_all": Tunable(
        kind=peer.AllToAllConfig,
        space=peer.CONFIG_SPACE,
        specializations=lambda config: peer.specializations(config, _EIGHT_RANKS),
    ),
    "gemm": Tunable(
        kind=dense.GemmConfig,
        space=dense.CONFIG_SPACE,
        specializations=dense.specializations,
    ),
    "grouped_gemm": Tunable(
        kind=grouped.GroupedGemmConfig,
        space=grouped.CONFIG_SPACE,
        specializations=lambda config: grouped.specializations(config, num_groups=_GROUPS),
    ),
    "group_quant": Tunable(
        kind=group_quant.GroupQuantConfig,
        space=group_quant.CONFIG_SPACE,
        specializations=group_quant.specializations,
    ),
    "rms_norm_quant": Tunable(
        kind=rms_norm_quant.RmsNormQuantConfig,
        space=rms_norm_quant.CONFIG_SPACE,
        specializations=lambda config: rms_norm_quant.specializations(config, _HIDDEN),
    ),
    "route": Tunable(
        kind=route.RouteConfig,
        space=route.CONFIG_SPACE,
        specializations=lambda config: route.specializations(
            config, _RULE, max_replicas=_MAX_REPLICAS
        ),
    ),
    "row_order": Tunable(
        kind=row_order.RowOrderConfig,
        space=row_order.CONFIG_SPACE,
        specializations=lambda config: row_order.specializations(config, num_slots=_GROUPS),
    ),
    "permute": Tunable(
        kind=permute.PermuteConfig,
        space=permute.CONFIG_SPACE,
        specializations=permute.permute_specializations,
    ),
    "combine": Tunable(
        kind=permute.PermuteConfig,
        space=permute.CONFIG_SPACE,
        specializations=lambda config: permute.combine_specializations(config, top_k=_RULE.top_k),
    ),
    "latent_write": Tunable(
        kind=latent_write.LatentWriteConfig,
        space=latent_write.CONFIG_SPACE,
        specializations=lambda config: latent_write.specializations(
            config, rank=512, rotary=64, block_tokens=16
        ),
    ),
    "mla_decode": Tunable(
        kind=mla_decode.MlaDecodeConfig,
        space=mla_decode.CONFIG_SPACE,
        specializations=lambda config: mla_decode.specializations(
            config, rank=512, rotary=64, block_tokens=16
        ),
    ),
    "silu_mul_quant": Tunable(
        kind=silu_mul_quant.SiluMulQuantConfig,
        space=silu_mul_quant.CONFIG_SPACE,
        specializations=silu_mul_quant.specializations,
    ),
}


def committed_configs() -> list[tuple[str, Any]]:
    """Operation and configuration, each once."""
    found: dict[tuple[str, Any], None] = {}
    for operation, tunable in TUNABLES.items():
        for file in configurations.committed(operation).values():
            for entry in file:
                found[operation, tunable.kind(**entry.config)] = None
    return list(found)


def committed_specializations() -> list[Specialization]:
    """Everything to compile, each once, including kernels without configurations."""
    found = {s.name: s for s in weight_quant.specializations()}
    for operation, config in committed_configs():
        found |= {s.name: s for s in TUNABLES[operation].specializations(config)}
    return list(found.values())
