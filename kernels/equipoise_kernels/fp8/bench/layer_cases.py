"""Gate F1: a decode step's MoE layer in one graph, against the time that its bytes take.

Covers one rank: its tokens are routed and quantised; rows are in slots as a dispatch delivers them,
pass two grouped products with the activation in between, and are summed. Gate E2 covers the
exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from equipoise_kernels.formats import QuantizedWeight, ScaleFormat, empty_rows
from equipoise_kernels.fp8.bench.bench import Bench
from equipoise_kernels.fp8.bench.checks import backend_faults, repeat_faults, result_faults
from equipoise_kernels.fp8.bench.moe_inputs import route_inputs
from equipoise_kernels.fp8.bench.report import Sample
from equipoise_kernels.fp8.gemm.grouped import GROUPED_GEMM
from equipoise_kernels.fp8.gemm.schedule import MaskedRows
from equipoise_kernels.fp8.moe.permute import COMBINE, PERMUTE
from equipoise_kernels.fp8.moe.route import ROUTE
from equipoise_kernels.fp8.moe.routes import RoutingRule, empty_routes
from equipoise_kernels.fp8.moe.row_order import RowOrder
from equipoise_kernels.fp8.quant.group_quant import GROUP_QUANT
from equipoise_kernels.fp8.quant.silu_mul_quant import SILU_MUL_QUANT
from equipoise_kernels.fp8.testing.cases import spread_slab

# What a rank of 8 with 32 slots receives in a step of 128 tokens per rank: 1024 rows.
_RULE = RoutingRule(num_experts=32, num_groups=8, top_groups=4, top_k=8, normalize=True, scale=2.5)
_TOKENS = 128
_HIDDEN = 7168
_EXPERT_HIDDEN = 2048
# Weights small enough that activations and sums stay in bfloat16's range.
_WEIGHT_SCALE = 2.0**-9


def decode_layer(
    bench: Bench,
    *,
    num_tokens: int = _TOKENS,
    rule: RoutingRule = _RULE,
    dim: int = _HIDDEN,
    expert_dim: int = _EXPERT_HIDDEN,
) -> list[Sample]:
    """F1: time over the sum of the operations' floors."""
    layer = _DecodeLayer(bench, num_tokens=num_tokens, rule=rule, dim=dim, expert_dim=expert_dim)
    layer.out_TD.fill_(float("nan"))
    timing = bench.timer.interleaved({"layer": [lambda: layer.run("triton")]})["layer"]
    seen = layer.out_TD.clone()
    layer.run("reference")
    faults = result_faults(seen, layer.out_TD.double())
    faults += repeat_faults(lambda: layer.run("triton"), layer.out_TD)
    faults += backend_faults(
        bench.timer.kernel_names(lambda: layer.run("triton")), "grouped_gemm_kernel"
    )
    floors = {
        name: max(
            num_bytes / bench.machine.copy_tb_s / 1e6, flop / (2 * bench.machine.bf16_tflops) / 1e6
        )
        for name, (num_bytes, flop) in layer.work().items()
    }
    return [
        Sample(
            gate="F1",
            shape=f"{num_tokens} tokens, {layer.num_rows} rows in {rule.num_experts} slots, "
            f"{dim} x {expert_dim}",
            value=timing.median_us / sum(floors.values()),
            raw={"us": timing.median_us, "spread": timing.spread}
            | {f"{name}_floor_us": floor for name, floor in floors.items()},
            faults=faults,
        )
    ]


class _DecodeLayer:
    """Buffers of one layer, and its operations in order."""

    def __init__(
        self, bench: Bench, *, num_tokens: int, rule: RoutingRule, dim: int, expert_dim: int
    ) -> None:
        device, generator = bench.device, bench.generator
        self._rule, self._dim, self._expert_dim = rule, dim, expert_dim
        self._routing = replace(
            route_inputs(num_tokens, generator, rule=rule, replicas=1),
            num_valid=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        )
        self._routes = empty_routes(num_tokens, rule.top_k, device=device)
        self._counters = self._routing.counters()
        self._x_TD = torch.randn(num_tokens, dim, generator=generator, device=device).bfloat16()
        self._sent = empty_rows((num_tokens, dim), device=device)
        self._route("reference")
        # A slot has at most one row per token.
        self._order, counts = slot_places(self._routes.slots_TK, rule.num_experts, num_tokens)
        self.num_rows = int(counts.sum())
        self._schedule = MaskedRows(
            rows_of_group=counts, expected_rows=-(-self.num_rows // rule.num_experts)
        )
        self._slots = torch.arange(rule.num_experts, dtype=torch.int32, device=device)
        shape = (rule.num_experts, num_tokens)
        self._came = empty_rows((*shape, dim), device=device)
        self._hidden_SMH = torch.empty(*shape, 2 * expert_dim, device=device).bfloat16()
        self._active = empty_rows((*shape, expert_dim), device=device)
        self._back_SMD = torch.empty(*shape, dim, device=device).bfloat16()
        self.out_TD: Tensor = torch.empty(num_tokens, dim, device=device).bfloat16()
        self._gate_up = _slab(rule.num_experts, (2 * expert_dim, dim), generator)
        self._down = _slab(rule.num_experts, (dim, expert_dim), generator)

    def run(self, backend: str) -> None:
        """Run the layer with one backend of every operation."""
        self._route(backend)
        GROUP_QUANT.backends[backend](self._x_TD, scale_format=ScaleFormat.FP32, out=self._sent)
        came = self._came.codes.flatten(0, 1), self._came.scales.flatten(0, 1)
        PERMUTE.backends[backend](
            (self._sent.codes.view(torch.int32), self._sent.scales),
            self._order,
            outs=(came[0].view(torch.int32), came[1]),
        )
        multiply: Callable[..., None] = GROUPED_GEMM.backends[backend]
        multiply(
            self._came, self._gate_up, self._slots, schedule=self._schedule, out=self._hidden_SMH
        )
        SILU_MUL_QUANT.backends[backend](
            self._hidden_SMH,
            rows_per_group=self._schedule.rows_of_group,
            scale_format=ScaleFormat.FP32,
            out=self._active,
        )
        multiply(self._active, self._down, self._slots, schedule=self._schedule, out=self._back_SMD)
        COMBINE.backends[backend](
            self._back_SMD.flatten(0, 1), self._order, self._routes.weights_TK, out=self.out_TD
        )

    def work(self) -> Mapping[str, tuple[int, int]]:
        """Bytes that each operation must move, each once, and the operations of its products."""
        num_tokens, dim, expert_dim = *self._x_TD.shape, self._expert_dim
        rows, slots = self.num_rows, int((self._schedule.rows_of_group > 0).sum())
        weights = slots * dim * expert_dim
        return {
            "route": (4 * num_tokens * self._rule.num_experts, 0),
            "group_quant": (3 * num_tokens * dim, 0),
            "permute": ((num_tokens + rows) * dim, 0),
            "gate_up": (
                2 * weights + rows * (dim + 4 * expert_dim),
                4 * rows * dim * expert_dim,
            ),
            "silu_mul_quant": (5 * rows * expert_dim, 0),
            "down": (weights + rows * (expert_dim + 2 * dim), 2 * rows * dim * expert_dim),
            "combine": (2 * (rows + num_tokens) * dim, 0),
        }

    def _route(self, backend: str) -> None:
        self._routing.run(ROUTE.backends[backend], rows_S=self._counters, out=self._routes)


def slot_places(slots_TK: Tensor, num_slots: int, capacity: int) -> tuple[RowOrder, Tensor]:
    """Place rows in [slots, capacity] by token, as a low-latency dispatch does; also rows per slot.

    Args:
        slots_TK: int64; -1 for none.
        num_slots: slots.
        capacity: rows reserved per slot, enough for every slot.
    """
    is_own_TKS = slots_TK.unsqueeze(-1) == torch.arange(num_slots, device=slots_TK.device)
    earlier_NS = is_own_TKS.flatten(0, 1).cumsum(dim=0) - 1
    slots_N = slots_TK.flatten()
    has_place_N = slots_N >= 0
    places_N = slots_N * capacity + earlier_NS.gather(1, slots_N.clamp_min(0)[:, None]).squeeze(1)
    places_N = places_N.masked_fill(~has_place_N, -1).to(torch.int32)
    pairs_M = torch.full((num_slots * capacity,), -1, dtype=torch.int32, device=slots_TK.device)
    pairs_M[places_N[has_place_N].long()] = has_place_N.nonzero().squeeze(1).to(torch.int32)
    counts_S = is_own_TKS.sum(dim=(0, 1)).to(torch.int32)
    starts_S = torch.arange(num_slots, device=slots_TK.device) * capacity
    order = RowOrder(
        place_of_pair_TK=places_N.view(slots_TK.shape),
        pair_of_row_M=pairs_M,
        slot_ends_S=(starts_S + counts_S).to(torch.int32),
    )
    return order, counts_S


def _slab(num_slots: int, shape: tuple[int, int], generator: torch.Generator) -> QuantizedWeight:
    slab = spread_slab(num_slots, shape, generator)
    return QuantizedWeight(codes=slab.codes, scales=slab.scales * _WEIGHT_SCALE)
