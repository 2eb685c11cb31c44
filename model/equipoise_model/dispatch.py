"""`ExpertParallel`: one rank's part in sending rows to experts; `ExpertStep`: one step of it.

Both data planes begin a step here and read its tables; they differ in what follows:

  where                 expert -> physical slot          assignments counted by
  plain                 ExpertStep._choose_slots         _run_pairs
  FP8, one rank         fp8/moe/route.py route_kernel    route_kernel
  FP8, several ranks    fp8/moe/route.py route_kernel    SlotExchange.run, on the receiver

No row is ever dropped, however skewed the routing.

In the plain plane, rows travel by the exchanges of `hops`: directly, or over a rank of each node.
On GPUs the kernels' `EpBuffer` sends counts with the rows, and the host does not need them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch import distributed as dist

from equipoise_kernels.nodes import Nodes
from equipoise_kernels.plain.permute import permute_rows, slot_order, unpermute_rows
from equipoise_kernels.replica_choice import choose_replicas
from equipoise_model.config import ModelConfig
from equipoise_model.exchange import RowExchange
from equipoise_model.experts import PhysicalSlots
from equipoise_model.fp8.slot_exchange import SlotExchange
from equipoise_model.hops import Choices, RunPairs, no_hop, no_rows, one_hop, two_hops
from equipoise_model.node_traffic import NodeSpread, NodeTraffic
from equipoise_model.overlap import Order, Stage, Stages
from equipoise_model.placement import PlacementTables
from equipoise_model.plain.router import Routing
from equipoise_model.ranges import named


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotLoad:
    """The assignments that one rank's slots received in one generation."""

    generation: int
    slot_load_LS: npt.NDArray[np.int64]
    """Assignments, int64 [layers, slots per rank]."""


class ExpertParallel:
    """Dispatches a model's rows on one rank; used from the engine's thread only.

    It counts on the device of its placement's tables, which must be the model's. Construct it with
    `local` or `distributed`.
    """

    def __init__(
        self,
        placement: PlacementTables,
        *,
        ranks: RowExchange,
        exchange: SlotExchange | None = None,
        pace_s_per_row: float = 0.0,
        order: Order = Order.PREFILL,
        traffic: NodeTraffic | None = None,
        sums_on_nodes: bool = False,
    ) -> None:
        assert placement.num_ranks == ranks.count
        assert exchange is None or not ranks.alone
        self._exchange = exchange
        self._traffic = traffic
        self._sums_on_nodes = sums_on_nodes
        self._is_two_hop = False
        self._order = order
        self._pace_s_per_row = pace_s_per_row
        self._placement = placement
        self._ranks = ranks
        self._slot_load_LS = _no_rows(placement)
        self._previous: SlotLoad | None = None
        self._num_tokens_seen = 0
        self._agreed: Sequence[Sequence[int]] | None = None

    @classmethod
    def local(
        cls,
        config: ModelConfig,
        placement: PlacementTables | None = None,
        *,
        device: torch.device | None = None,
        pace_s_per_row: float = 0.0,
    ) -> Self:
        """One rank that holds every expert; slot e holds expert e, unless a placement is given.

        Without one, its layers include those of the multi-token-prediction modules.

        Its tables move to `device`, if given. `pace_s_per_row` is as in `distributed`.
        """
        placement = placement or PlacementTables.identity(
            num_layers=config.num_expert_layers, num_experts=config.num_placed_experts
        )
        placement = placement if device is None else placement.to(device)
        ranks = RowExchange(group=None, rank=0, count=1)
        return cls(placement, ranks=ranks, pace_s_per_row=pace_s_per_row)

    @classmethod
    def distributed(
        cls,
        placement: PlacementTables,
        *,
        group: dist.ProcessGroup,
        exchange: SlotExchange | None = None,
        pace_s_per_row: float = 0.0,
        order: Order = Order.PREFILL,
        nodes: Nodes | None = None,
        sums_on_nodes: bool = False,
    ) -> Self:
        """This process's rank of a group; all ranks start with the same placement.

        `exchange` sends rows between ranks of an FP8 model; it starts with that placement's
        generation. In the plain plane, a layer's experts take at least `pace_s_per_row` seconds for
        each assignment that this rank receives; the rank sleeps for the rest. The micro-batches of
        a step take turns in an `order` that is the same on all ranks.

        `nodes` are those of the ranks, one by default. With `sums_on_nodes`, outputs are summed on
        their nodes in steps of two hops.
        """
        ranks, traffic = RowExchange.of_group(group), None
        if nodes is not None and nodes.count > 1:
            device = placement.replica_count.device
            traffic = NodeTraffic(nodes, rank=ranks.rank, device=device)
        return cls(
            placement,
            ranks=ranks,
            exchange=exchange,
            pace_s_per_row=pace_s_per_row,
            order=order,
            traffic=traffic,
            sums_on_nodes=sums_on_nodes,
        )

    @property
    def waited_s(self) -> float:
        """Total seconds spent exchanging rows with other ranks."""
        return self._ranks.waited_s + (self._exchange.waited_s if self._exchange else 0.0)

    @property
    def placement(self) -> PlacementTables:
        """The current generation's tables."""
        return self._placement

    @property
    def spread(self) -> NodeSpread | None:
        """How this rank's rows have spread over nodes; None if there is only one."""
        return None if self._traffic is None else self._traffic.spread()

    def agree(self, tokens_by_batch: Sequence[Sequence[int]], *, is_two_hop: bool = False) -> None:
        """Set how many rows each rank brings to each micro-batch of the next step.

        `is_two_hop` sends rows of this step and those that follow over a rank of each node. All
        this follows from the step's headers. Without it, a distributed `begin_step` gathers the
        numbers of a single micro-batch, at the cost of one exchange.
        """
        assert all(len(tokens_by_rank) == self._ranks.count for tokens_by_rank in tokens_by_batch)
        self._is_two_hop = is_two_hop and self._traffic is not None
        self._agreed = tokens_by_batch

    def begin_step(self, *, num_tokens: int) -> "ExpertStep":
        """Start a forward step with `num_tokens` rows of this rank, possibly 0.

        Raises:
            ExchangeError: another rank did not answer when the numbers of rows were gathered.
        """
        tokens_by_batch, self._agreed = self._agreed, None
        if tokens_by_batch is None:
            tokens_by_batch = self._ranks.swap_numbers([[num_tokens] * self._ranks.count])
        tokens_by_rank = tuple(map(sum, zip(*tokens_by_batch, strict=True)))
        assert tokens_by_rank[self._ranks.rank] == num_tokens
        # Ranks take turns in one sequence, so that their choices of replicas interleave too.
        first = self._num_tokens_seen
        self._num_tokens_seen += num_tokens
        turns_T = torch.arange(first, first + num_tokens, device=self._slot_load_LS.device)
        token_ids_T = turns_T * self._ranks.count + self._ranks.rank
        return ExpertStep(
            placement=self._placement,
            ranks=self._ranks,
            tokens_by_rank=tokens_by_rank,
            tokens_by_batch=tokens_by_batch,
            order=self._order,
            token_ids_T=token_ids_T,
            slot_load_LS=self._slot_load_LS,
            exchange=self._exchange,
            pace_s_per_row=self._pace_s_per_row,
            traffic=self._traffic,
            is_two_hop=self._is_two_hop,
            sums_on_nodes=self._sums_on_nodes,
        )

    def close(self) -> None:
        """Release the group and the memory of the exchange; no step may follow."""
        if self._exchange is not None:
            self._exchange.close()
        self._ranks.close()

    def switch(self, placement: PlacementTables) -> None:
        """Use another placement from the next step on; its experts must be in their slots."""
        assert placement.generation > self._placement.generation
        assert placement.slots_of_expert.shape[:2] == self._placement.slots_of_expert.shape[:2]
        assert placement.slots_per_rank == self._placement.slots_per_rank
        assert placement.num_ranks == self._placement.num_ranks
        self._previous = self._load()
        self._placement = placement
        self._slot_load_LS = _no_rows(placement)
        if self._exchange is not None:
            self._exchange.switch(placement.generation)

    def loads(self) -> tuple[SlotLoad, ...]:
        """Return copies of this generation's counters and of the previous one's final counters.

        Counters only grow within a generation. Call between steps.
        """
        return (self._load(),) if self._previous is None else (self._load(), self._previous)

    def _load(self) -> SlotLoad:
        return SlotLoad(
            generation=self._placement.generation,
            slot_load_LS=self._slot_load_LS.numpy(force=True).copy(),
        )


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
    _layer: int = 0

    @property
    def alone(self) -> bool:
        """Whether this rank holds every expert."""
        return self.ranks.alone

    @property
    def num_tokens(self) -> int:
        """Rows of this rank."""
        return int(self.token_ids_T.shape[0])

    def micro_batches(self) -> list[Self]:
        """Return the step of each micro-batch: consecutive rows of this one."""
        rank = self.ranks.rank
        token_ids = self.token_ids_T.split([by_rank[rank] for by_rank in self.tokens_by_batch])
        return [
            replace(self, tokens_by_rank=by_rank, tokens_by_batch=(), token_ids_T=token_ids_T)
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

    def _choose_slots(self, expert_ids_TK: Tensor, *, layer: int) -> Tensor:
        share_ends = self.placement.share_ends
        replicas_TK = choose_replicas(
            expert_ids_TK,
            self.token_ids_T,
            self.placement.replica_count[layer],
            layer=layer,
            share_ends_ER=None if share_ends is None else share_ends[layer],
        )
        return self.placement.slots_of_expert[layer][expert_ids_TK, replicas_TK]


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


def _no_rows(placement: PlacementTables) -> Tensor:
    shape = (placement.num_layers, placement.slots_per_rank)
    return torch.zeros(shape, dtype=torch.int64, device=placement.replica_count.device)
