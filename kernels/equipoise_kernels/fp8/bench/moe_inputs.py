"""Routing, orders and rows of DeepSeek-V3's size, for the benchmark and for tuning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise_kernels.fp8.moe.route import route_reference
from equipoise_kernels.fp8.moe.routes import Routes, RoutingRule, SlotTables, empty_routes
from equipoise_kernels.fp8.moe.row_order import RowOrder, order_rows

RULE = RoutingRule(num_experts=256, num_groups=8, top_groups=4, top_k=8, normalize=True, scale=2.5)
_REPLICAS = 2
ALIGNMENT = 128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouteInputs:
    """Inputs of `route`; every expert has the same number of replicas."""

    logits_TE: Tensor
    bias_E: Tensor
    rule: RoutingRule
    tables: SlotTables
    token_ids_T: Tensor
    num_valid: Tensor

    @property
    def num_slots(self) -> int:
        """Physical slots of the layout."""
        return self.tables.slots_of_expert_ER.numel()

    def run(
        self, backend: object, *, rows_S: Tensor | None, out: Routes, **options: object
    ) -> None:
        """Launch a backend of `route`."""
        backend(  # type: ignore[operator]
            self.logits_TE,
            self.bias_E,
            rule=self.rule,
            tables=self.tables,
            token_ids_T=self.token_ids_T,
            layer=7,
            rows_S=rows_S,
            num_valid=self.num_valid,
            out=out,
            **options,
        )

    def counters(self) -> Tensor:
        """Zeroed counters of every slot."""
        return torch.zeros(self.num_slots, dtype=torch.int64, device=self.bias_E.device)


def route_inputs(
    num_rows: int,
    generator: torch.Generator,
    *,
    rule: RoutingRule = RULE,
    replicas: int = _REPLICAS,
) -> RouteInputs:
    """Random logits and biases; an eighth of the rows is padding."""
    device = generator.device
    experts = torch.arange(rule.num_experts, device=device)
    places = torch.arange(replicas, device=device) * rule.num_experts
    return RouteInputs(
        logits_TE=torch.randn(num_rows, rule.num_experts, generator=generator, device=device),
        bias_E=torch.randn(rule.num_experts, generator=generator, device=device) / 8,
        rule=rule,
        tables=SlotTables(
            slots_of_expert_ER=experts[:, None] + places,
            replica_count_E=torch.full_like(experts, replicas),
        ),
        token_ids_T=torch.arange(num_rows, device=device),
        num_valid=torch.tensor([num_rows - num_rows // 8], dtype=torch.int32, device=device),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BalanceInputs:
    """Inputs of `replica_balance` on the middle rank."""

    expert_ids_TK: Tensor
    counts_RE: Tensor
    tables: SlotTables
    slots_per_rank: int

    def run(self, backend: object, *, out_TK: Tensor) -> None:
        """Launch a backend of `replica_balance`."""
        backend(  # type: ignore[operator]
            self.expert_ids_TK,
            self.counts_RE,
            self.tables,
            rank=len(self.counts_RE) // 2,
            slots_per_rank=self.slots_per_rank,
            out_TK=out_TK,
        )


def balance_inputs(
    num_rows: int,
    generator: torch.Generator,
    *,
    num_ranks: int,
    slots_per_rank: int,
    rule: RoutingRule = RULE,
) -> BalanceInputs:
    """Rows of every rank, of which some experts are chosen far more often; these have replicas.

    The most popular expert has one more replica for every fourth redundant slot, and the next
    ones one more each.
    """
    device, num_experts = generator.device, rule.num_experts
    redundant = num_ranks * slots_per_rank - num_experts
    spread = redundant - redundant // 4
    count_E = torch.ones(num_experts, dtype=torch.int64, device=device)
    count_E[0] += redundant // 4
    count_E += torch.bincount(
        1 + torch.arange(spread, device=device) % (num_experts - 1), minlength=num_experts
    )
    places = torch.arange(int(count_E.max()), device=device)
    used = places < count_E.unsqueeze(1)
    # Neighbouring replicas are on neighbouring ranks.
    turns = torch.arange(num_ranks * slots_per_rank, device=device)
    slots_ER = torch.full(used.shape, -1, device=device)
    slots_ER[used] = turns % num_ranks * slots_per_rank + turns // num_ranks
    bias_E = -torch.arange(num_experts, device=device) / num_experts
    noise = torch.randn(num_ranks, num_rows, num_experts, generator=generator, device=device)
    ids_RTK = (bias_E + noise).topk(rule.top_k).indices
    counts_RE = torch.zeros(num_ranks, num_experts, dtype=torch.int64, device=device)
    flat_RN = ids_RTK.flatten(1)
    counts_RE.scatter_add_(1, flat_RN, torch.ones_like(flat_RN))
    return BalanceInputs(
        expert_ids_TK=ids_RTK[num_ranks // 2].contiguous(),
        counts_RE=counts_RE,
        tables=SlotTables(slots_of_expert_ER=slots_ER, replica_count_E=count_E),
        slots_per_rank=slots_per_rank,
    )


def routed_slots(num_rows: int, generator: torch.Generator, *, rule: RoutingRule = RULE) -> Tensor:
    """Slots int64 [T, K] of random rows."""
    inputs = route_inputs(num_rows, generator, rule=rule)
    out = empty_routes(num_rows, rule.top_k, device=generator.device)
    inputs.run(route_reference, rows_S=inputs.counters(), out=out)
    return out.slots_TK


def row_order_of(
    num_rows: int, generator: torch.Generator, *, rule: RoutingRule = RULE
) -> RowOrder:
    """The order of such rows, with each slot's starting at a multiple of 128."""
    slots = routed_slots(num_rows, generator, rule=rule)
    return order_rows(slots, num_slots=_REPLICAS * rule.num_experts, alignment=ALIGNMENT)
