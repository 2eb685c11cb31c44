"""`ExpertStep`: one step of sending rows to experts, or one of its micro-batches.

Both data planes read its tables; they differ in what follows:

  where                 expert -> physical slot          assignments counted by
  plain                 ExpertStep._choose_slots         _run_pairs
  FP8, one rank         fp8/moe/route.py route_kernel    route_kernel
  FP8, several ranks    the same, or by all ranks'       SlotExchange.stages, on the receiver
                        counts fp8/moe/replica_balance

No row is ever dropped, however skewed the routing.

In the plain plane, rows travel by the exchanges of `hops`: directly, or over a rank of each node.
On GPUs the kernels' `EpBuffer` sends counts with the rows, and the host does not need them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from equipoise_kernels.plain.permute import permute_rows, slot_order, unpermute_rows
from equipoise_kernels.replica_balance import balanced_replicas, count_experts
from equipoise_kernels.replica_choice import choose_replicas
from equipoise_model.exchange import RowExchange
from equipoise_model.experts import PhysicalSlots
from equipoise_model.fp8.slot_exchange import ExchangedStep, SlotExchange
from equipoise_model.hops import Choices, RunPairs, no_hop, no_rows, one_hop, two_hops
from equipoise_model.node_traffic import NodeTraffic
from equipoise_model.overlap import Order, Stage, Stages
from equipoise_model.placement import PlacementTables
from equipoise_model.plain.router import Routing
from equipoise_model.ranges import named


@dataclass(slots=True, kw_only=True, eq=False)
class ExpertStep:
    """One forward step, or one of its micro-batches.

    Its MoE layers run `stages` once each, in order, on all ranks. The layers of
    multi-token-prediction modules do so in a step that is `resumed`.

    FP8 layers call `enter_layer` instead, and use the tables, counters and exchange themselves.
    """

    placement: PlacementTables
    """Tables of the generation that the step runs in."""
    ranks: RowExchange
    """The ranks that take the step."""
    tokens_by_rank: Sequence[int]
    """Rows that each rank brings."""
    tokens_by_batch: Sequence[Sequence[int]] = ()
    """The same for each of the step's micro-batches; empty for one of them."""
    order: Order = Order.PREFILL
    """In which order they take turns."""
    token_ids_T: Tensor
    """Running numbers of this rank's rows, int64."""
    slot_load_LS: Tensor
    """Counters, int64 [layers, slots per rank]; the step adds to them."""
    exchange: SlotExchange | None = None
    """Sends rows between several ranks of an FP8 model; None otherwise."""
    is_captured: bool = False
    """Whether the step is captured, or the one before a capture, which must launch the same."""
    pace_s_per_row: float = 0.0
    """Least seconds of a layer's experts for each assignment."""
    traffic: NodeTraffic | None = None
    """Counts rows by node; None if there is only one."""
    is_two_hop: bool = False
    """Whether rows travel over a rank of each node."""
    sums_on_nodes: bool = False
    """Whether outputs are summed on their nodes before they return in two hops."""
    is_balanced: bool = False
    """Whether ranks exchange their counts of experts in each layer, and choose replicas by them."""
    most_of_batches: int = 0
    """Most rows that a rank brings to any micro-batch, if this is one of several."""
    _layer: int = 0

    @property
    def alone(self) -> bool:
        """Whether this rank holds every expert."""
        return self.ranks.alone

    @property
    def num_tokens(self) -> int:
        """Rows of this rank."""
        return int(self.token_ids_T.shape[0])

    @property
    def exchanged(self) -> ExchangedStep:
        """What all ranks know of how its rows travel."""
        most_tokens = max(self.tokens_by_rank)
        return ExchangedStep(
            most_tokens=most_tokens,
            most_of_batches=self.most_of_batches or most_tokens,
            is_fixed=self.is_captured,
            is_two_hop=self.is_two_hop,
        )

    def micro_batches(self) -> list[Self]:
        """Return the step of each micro-batch: consecutive rows of this one."""
        rank = self.ranks.rank
        token_ids = self.token_ids_T.split([by_rank[rank] for by_rank in self.tokens_by_batch])
        whole = replace(
            self, tokens_by_batch=(), most_of_batches=max(map(max, self.tokens_by_batch))
        )
        return [
            replace(whole, tokens_by_rank=by_rank, token_ids_T=token_ids_T)
            for by_rank, token_ids_T in zip(self.tokens_by_batch, token_ids, strict=True)
        ]

    def resumed(self, *, layer: int, tokens_by_rank: Sequence[int]) -> Self:
        """Return the step from `layer` on, for all of its rows on some ranks and none on others.

        Its rows choose the same replicas; what was captured is launched.
        """
        num_tokens = tokens_by_rank[self.ranks.rank]
        assert num_tokens in (0, self.token_ids_T.shape[0])
        return replace(
            self,
            tokens_by_rank=tokens_by_rank,
            token_ids_T=self.token_ids_T[:num_tokens],
            is_captured=False,
            _layer=layer,
        )

    def enter_layer(self) -> int:
        """Return the index of the next layer, for layers that do not call `run`."""
        self._layer += 1
        return self._layer - 1

    def stages(self, x_TD: Tensor, routing: Routing, experts: PhysicalSlots) -> Stages[Tensor]:
        """Compute the experts' weighted sum for rows [T, D], in float32, from `SENT` on.

        Raises:
            ExchangeError: another rank is gone or slower than the group's timeout.
        """
        layer = self.enter_layer()
        assert x_TD.shape[0] == self.token_ids_T.shape[0]
        assert experts.num_slots == self.placement.slots_per_rank
        slots_TK = self._choose_slots(routing.expert_ids_TK, layer=layer)
        run = partial(
            _run_pairs,
            experts=experts,
            load_S=self.slot_load_LS[layer],
            top_k=slots_TK.shape[1],
            pace_s_per_row=self.pace_s_per_row,
        )
        choices = Choices(
            slots_TK=slots_TK,
            weights_TK=routing.weights_TK,
            slots_per_rank=self.placement.slots_per_rank,
        )
        y_TD = yield from self._travel(x_TD, choices, run)
        yield Stage.COMBINED
        return y_TD

    def _travel(self, x_TD: Tensor, choices: Choices, run: RunPairs) -> Stages[Tensor]:
        if self.ranks.alone:
            return no_hop(x_TD, choices, run)
        if not any(self.tokens_by_rank):
            return no_rows(x_TD)
        if self.is_two_hop:
            assert self.traffic is not None
            return two_hops(
                x_TD,
                choices,
                ranks=self.ranks,
                traffic=self.traffic,
                run=run,
                sums_on_nodes=self.sums_on_nodes,
            )
        return one_hop(
            x_TD,
            choices,
            ranks=self.ranks,
            tokens_by_rank=self.tokens_by_rank,
            traffic=self.traffic,
            run=run,
        )

    @property
    def balances(self) -> bool:
        """Whether the slots of this step's rows follow from `counts_by_rank`, on every rank.

        Those of captured steps do not: they are small, and exchange nothing that the host awaits.
        """
        return self.is_balanced and not self.is_captured and any(self.tokens_by_rank)

    def counts_by_rank(self, expert_ids_TK: Tensor) -> Tensor:
        """Exchange how often each rank chose each expert in this layer, int64 [ranks, E].

        Every rank calls it, even without rows.

        Raises:
            ExchangeError: another rank is gone or slower than the group's timeout.
        """
        num_experts = self.placement.replica_count.shape[1]
        return self.ranks.gather(count_experts(expert_ids_TK, num_experts=num_experts))

    def _choose_slots(self, expert_ids_TK: Tensor, *, layer: int) -> Tensor:
        slots_ER, count_E, ends_ER = self.placement.of_layer(layer)
        if self.balances:
            replicas_TK = balanced_replicas(
                expert_ids_TK,
                self.counts_by_rank(expert_ids_TK),
                slots_ER,
                count_E,
                rank=self.ranks.rank,
                slots_per_rank=self.placement.slots_per_rank,
                share_ends_ER=ends_ER,
            )
        else:
            replicas_TK = choose_replicas(
                expert_ids_TK, self.token_ids_T, count_E, layer=layer, share_ends_ER=ends_ER
            )
        return slots_ER[expert_ids_TK, replicas_TK]


def _run_pairs(
    x_TD: Tensor,
    pairs_N: Tensor,
    slots_N: Tensor,
    *,
    experts: PhysicalSlots,
    load_S: Tensor,
    top_k: int,
    pace_s_per_row: float,
) -> Tensor:
    """Count assignments, run them through this rank's slots, and return outputs in their order."""
    began = time.perf_counter()
    order_N = slot_order(slots_N)
    rows_S = torch.bincount(slots_N, minlength=experts.num_slots)
    load_S += rows_S
    with named("experts"):
        y_ND = experts(permute_rows(x_TD, pairs_N[order_N], top_k=top_k), rows_S.tolist())
        y_ND = unpermute_rows(y_ND, order_N)
        if pace_s_per_row:
            paced_s = pace_s_per_row * slots_N.shape[0]
            time.sleep(max(0.0, paced_s - (time.perf_counter() - began)))
        return y_ND
