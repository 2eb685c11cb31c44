"""All specialisations of the committed configurations, by operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

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


class Tunable(NamedTuple):
    """An operation with configurations."""

    space: tuple[Any, ...]
    """The configurations to choose from, all of one dataclass."""
    specializations: Callable[[Any], list[Specialization]]
    """What a configuration compiles to."""


# A specialisation that needs sizes gets those of DeepSeek-V3 with 32 slots per rank.
_LATENTS: Mapping[str, Any] = {"rank": 512, "rotary": 64, "block_tokens": 16}

TUNABLES: Mapping[str, Tunable] = {
    "all_to_all": Tunable(peer.CONFIG_SPACE, partial(peer.specializations, shape=_EIGHT_RANKS)),
    "gemm": Tunable(dense.CONFIG_SPACE, dense.specializations),
    "grouped_gemm": Tunable(
        grouped.CONFIG_SPACE, partial(grouped.specializations, num_groups=_GROUPS)
    ),
    "group_quant": Tunable(group_quant.CONFIG_SPACE, group_quant.specializations),
    "rms_norm_quant": Tunable(
        rms_norm_quant.CONFIG_SPACE, partial(rms_norm_quant.specializations, dim=_HIDDEN)
    ),
    "route": Tunable(
        route.CONFIG_SPACE, partial(route.specializations, rule=_RULE, max_replicas=_MAX_REPLICAS)
    ),
    "row_order": Tunable(
        row_order.CONFIG_SPACE, partial(row_order.specializations, num_slots=_GROUPS)
    ),
    "permute": Tunable(permute.CONFIG_SPACE, permute.permute_specializations),
    "combine": Tunable(
        permute.CONFIG_SPACE, partial(permute.combine_specializations, top_k=_RULE.top_k)
    ),
    "latent_write": Tunable(
        latent_write.CONFIG_SPACE, partial(latent_write.specializations, **_LATENTS)
    ),
    "mla_decode": Tunable(mla_decode.CONFIG_SPACE, partial(mla_decode.specializations, **_LATENTS)),
    "silu_mul_quant": Tunable(silu_mul_quant.CONFIG_SPACE, silu_mul_quant.specializations),
}


def committed_configs() -> list[tuple[str, Any]]:
    """Operation and configuration, each once."""
    found: dict[tuple[str, Any], None] = {}
    for operation, tunable in TUNABLES.items():
        for file in configurations.committed(operation).values():
            for entry in file:
                found[operation, type(tunable.space[0])(**entry.config)] = None
    return list(found)


def committed_specializations() -> list[Specialization]:
    """Everything to compile, each once, including kernels without configurations."""
    found = {s.name: s for s in weight_quant.specializations()}
    for operation, config in committed_configs():
        found |= {s.name: s for s in TUNABLES[operation].specializations(config)}
    return list(found.values())
