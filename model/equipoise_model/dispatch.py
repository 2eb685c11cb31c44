"""`ExpertParallel`: carries rows to the ranks that hold their experts, and back.

The one place that turns logical experts into physical slots, and the one that counts rows per slot.
No row is ever dropped, however skewed the routing.

A layer costs two all-to-all exchanges: every rank sends its rows and their slots to all ranks, each
runs its own slots' experts, and every output goes back by itself. Sending a row only where its
experts are, as the kernels' `EpBuffer` does, needs a third exchange before, for the counts. While a
pool has about as many ranks as a row has experts, that saves no traffic, and a small step's time is
the number of exchanges: between four ranks over gloo on two busy cores, rows of 256 numbers and 4
choices, medians of 60 alternating rounds were 8.8 ms against 20.9 ms with 2 rows a rank, and 8.8 ms
against 17.4 ms with 64. On GPUs the counts travel with the rows, and the host need not know them:
there, in FP8, the layers go through `slot_exchange` by the tables that a step has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch import distributed as dist

from equipoise_kernels.plain.permute import permute_rows, slot_order, unpermute_rows
from equipoise_kernels.replica_choice import choose_replicas
from equipoise_model.config import ModelConfig
from equipoise_model.exchange import RankGroup
from equipoise_model.experts import PhysicalSlots
from equipoise_model.fp8.slot_exchange import SlotExchange
from equipoise_model.placement import PlacementTables
from equipoise_model.plain.router import Routing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotLoad:
    """Rows that one rank's slots received in one generation: int64 [layers, slots of the rank]."""

    generation: int
    rows_LS: npt.NDArray[np.int64]


class ExpertParallel:
    """One rank's part in dispatching a model's rows; used from the engine's thread only.

    It counts where its placement's tables are, which is where the model must be. Use `local` or
    `distributed`.
    """

    def __init__(
        self, placement: PlacementTables, *, ranks: RankGroup, exchange: SlotExchange | None = None
    ) -> None:
        assert placement.num_ranks == ranks.count
        assert exchange is None or not ranks.alone
        self._exchange = exchange
        self._placement = placement
        self._ranks = ranks
        self._rows_LS = _no_rows(placement)
        self._previous: SlotLoad | None = None
        self._num_tokens_seen = 0
        self._agreed: tuple[int, ...] | None = None

    @classmethod
    def local(
        cls,
        config: ModelConfig,
        placement: PlacementTables | None = None,
        *,
        device: torch.device | None = None,
    ) -> Self:
        """One rank that holds every expert: slot e holds expert e, unless a placement is given.

        Its tables are on `device`, unless they are to stay where they are.
        """
        placement = placement or PlacementTables.identity(
            num_layers=config.num_moe_layers, num_experts=config.n_routed_experts
        )
        placement = placement if device is None else placement.to(device)
        return cls(placement, ranks=RankGroup(group=None, rank=0, count=1))

    @classmethod
    def distributed(
        cls,
        placement: PlacementTables,
        *,
        group: dist.ProcessGroup,
        exchange: SlotExchange | None = None,
    ) -> Self:
        """This process's rank of a group; all ranks start with the same placement.

        `exchange` is what a model in FP8 carries rows with, in that placement's generation.
        """
        return cls(placement, ranks=RankGroup.of_group(group), exchange=exchange)

    @property
    def waited_s(self) -> float:
        """Seconds spent in exchanges with the other ranks so far."""
        return self._ranks.waited_s + (self._exchange.waited_s if self._exchange else 0.0)

    @property
    def placement(self) -> PlacementTables:
        """The running generation's."""
        return self._placement

    def agree(self, tokens_by_rank: Sequence[int]) -> None:
        """Say how many rows each rank brings to the next step, if a step header told.

        Without it, a distributed `begin_step` asks the ranks: one exchange more.
        """
        assert len(tokens_by_rank) == self._ranks.count
        self._agreed = tuple(tokens_by_rank)

    def begin_step(self, *, num_tokens: int) -> "ExpertStep":
        """Start a forward step with `num_tokens` rows of this rank; 0 is fine.

        Raises:
            ExchangeError: the ranks had to be asked, and one of them did not answer.
        """
        tokens_by_rank, self._agreed = self._agreed, None
        if tokens_by_rank is None:
            tokens_by_rank = self._ranks.gather_numbers(num_tokens)
        assert tokens_by_rank[self._ranks.rank] == num_tokens
        # RankGroup take turns in one sequence, so that their choices of replicas interleave too.
        first = self._num_tokens_seen
        self._num_tokens_seen += num_tokens
        turns_T = torch.arange(first, first + num_tokens, device=self._rows_LS.device)
        token_ids_T = turns_T * self._ranks.count + self._ranks.rank
        return ExpertStep(
            placement=self._placement,
            ranks=self._ranks,
            tokens_by_rank=tokens_by_rank,
            token_ids_T=token_ids_T,
            rows_LS=self._rows_LS,
            exchange=self._exchange,
        )

    def close(self) -> None:
        """Give back what the ranks exchange rows through; no step follows."""
        if self._exchange is not None:
            self._exchange.close()

    def switch(self, placement: PlacementTables) -> None:
        """Use another placement from the next step on; its experts are in their slots already."""
        assert placement.generation > self._placement.generation
        assert placement.slots_of_expert.shape[:2] == self._placement.slots_of_expert.shape[:2]
        assert placement.slots_per_rank == self._placement.slots_per_rank
        assert placement.num_ranks == self._placement.num_ranks
        self._previous = self._load()
        self._placement = placement
        self._rows_LS = _no_rows(placement)
        if self._exchange is not None:
            self._exchange.switch(placement.generation)

    def loads(self) -> tuple[SlotLoad, ...]:
        """Copies of what was counted in this generation, and finally in the one before if any.

        Counts only grow within a generation. To be called between steps.
        """
        return (self._load(),) if self._previous is None else (self._load(), self._previous)

    def _load(self) -> SlotLoad:
        return SlotLoad(
            generation=self._placement.generation, rows_LS=self._rows_LS.numpy(force=True).copy()
        )


class ExpertStep:
    """One forward step; its MoE layers call `run` once each, in order, on all ranks.

    `token_ids_T` are the running numbers of its rows, int64, `rows_LS` this generation's counters,
    int64 [layers, slots of the rank], which it adds to. `exchange` is what several ranks of a model
    in FP8 carry rows with; its layers use that and the tables here, and do not call `run`.
    """

    def __init__(
        self,
        *,
        placement: PlacementTables,
        ranks: RankGroup,
        tokens_by_rank: tuple[int, ...],
        token_ids_T: Tensor,
        rows_LS: Tensor,
        exchange: SlotExchange | None = None,
    ) -> None:
        self._placement = placement
        self._ranks = ranks
        self._tokens_by_rank = tokens_by_rank
        self.exchange = exchange
        self.token_ids_T = token_ids_T
        self.rows_LS = rows_LS
        self._layer = 0

    @property
    def alone(self) -> bool:
        """Whether this rank holds every expert."""
        return self._ranks.alone

    @property
    def ranks(self) -> RankGroup:
        """Whose step it is."""
        return self._ranks

    @property
    def tokens_by_rank(self) -> tuple[int, ...]:
        """Rows that each rank brings."""
        return self._tokens_by_rank

    @property
    def placement(self) -> PlacementTables:
        """The generation that this step runs in."""
        return self._placement

    def enter_layer(self) -> int:
        """The index of the layer that comes now, for who runs it by these tables, not by `run`."""
        self._layer += 1
        return self._layer - 1

    def run(self, x_TD: Tensor, routing: Routing, experts: PhysicalSlots) -> Tensor:
        """The routed experts' weighted sum for rows [T, D], in the rows' dtype.

        Raises:
            ExchangeError: a rank is gone or slower than the group's timeout.
        """
        layer = self.enter_layer()
        assert x_TD.shape[0] == self.token_ids_T.shape[0]
        assert experts.num_slots == self._placement.slots_per_rank
        slots_TK = self._choose_slots(routing.expert_ids_TK, layer=layer)
        run = self._run_here if self._ranks.alone else self._run_everywhere
        y_ND = run(x_TD, slots_TK, experts, self.rows_LS[layer])
        return _combine(y_ND, routing.weights_TK).to(x_TD.dtype)

    def _choose_slots(self, expert_ids_TK: Tensor, *, layer: int) -> Tensor:
        share_ends = self._placement.share_ends
        replicas_TK = choose_replicas(
            expert_ids_TK,
            self.token_ids_T,
            self._placement.replica_count[layer],
            layer=layer,
            share_ends_ER=None if share_ends is None else share_ends[layer],
        )
        return self._placement.slots_of_expert[layer][expert_ids_TK, replicas_TK]

    def _run_here(
        self, x_TD: Tensor, slots_TK: Tensor, experts: PhysicalSlots, load_S: Tensor
    ) -> Tensor:
        """Outputs of all T * K (row, choice) pairs, by row and then choice."""
        slots_N = slots_TK.flatten()
        pairs_N = torch.arange(slots_N.shape[0], device=slots_N.device)
        return _run_pairs(
            x_TD, pairs_N, slots_N, experts=experts, load_S=load_S, top_k=slots_TK.shape[1]
        )

    def _run_everywhere(
        self, x_TD: Tensor, slots_TK: Tensor, experts: PhysicalSlots, load_S: Tensor
    ) -> Tensor:
        """The same as `_run_here`, computed by all ranks together."""
        ranks, num_slots, dim = self._ranks, experts.num_slots, x_TD.shape[1]
        if not any(self._tokens_by_rank):
            return x_TD.new_zeros(0, dim)
        # Slots travel beside their row, as its dtype's bits; nothing computes with them meanwhile.
        message = torch.cat([x_TD, slots_TK.to(torch.int32).view(x_TD.dtype)], dim=1)
        message = ranks.share(message, tokens_by_rank=self._tokens_by_rank)
        x_AD, slots_AK = message[:, :dim], message[:, dim:].contiguous().view(torch.int32)
        here_AK = slots_AK.to(torch.int64) - ranks.rank * num_slots
        own_AK = (here_AK >= 0) & (here_AK < num_slots)
        pairs_N = own_AK.flatten().nonzero().squeeze(1)
        y_ND = _run_pairs(
            x_AD,
            pairs_N,
            here_AK.flatten()[pairs_N],
            experts=experts,
            load_S=load_S,
            top_k=slots_TK.shape[1],
        )
        ranks_N = slots_TK.flatten() // num_slots
        y_ND = ranks.exchange(
            y_ND,
            send=[int(rows.sum()) for rows in own_AK.split(list(self._tokens_by_rank))],
            receive=torch.bincount(ranks_N, minlength=ranks.count).tolist(),
        )
        return unpermute_rows(y_ND, slot_order(ranks_N))


def _run_pairs(
    x_TD: Tensor,
    pairs_N: Tensor,
    slots_N: Tensor,
    *,
    experts: PhysicalSlots,
    load_S: Tensor,
    top_k: int,
) -> Tensor:
    """Outputs of (row, choice) pairs, in their order, through this rank's slots; counts them."""
    order_N = slot_order(slots_N)
    rows_S = torch.bincount(slots_N, minlength=experts.num_slots)
    load_S += rows_S
    y_ND = experts(permute_rows(x_TD, pairs_N[order_N], top_k=top_k), rows_S.tolist())
    return unpermute_rows(y_ND, order_N)


def _combine(y_ND: Tensor, weights_TK: Tensor) -> Tensor:
    """Weighted sum over a row's choices in float32, choice 0 first.

    The fixed order makes the sum independent of the layout, to the last bit.
    """
    y_TKD = y_ND.float().view(*weights_TK.shape, y_ND.shape[-1])
    weighted_TKD = y_TKD * weights_TK.unsqueeze(-1)
    total_TD, *others = weighted_TKD.unbind(1)
    for choice_TD in others:
        total_TD = total_TD + choice_TD
    return total_TD


def _no_rows(placement: PlacementTables) -> Tensor:
    shape = (placement.num_layers, placement.slots_per_rank)
    return torch.zeros(shape, dtype=torch.int64, device=placement.replica_count.device)
