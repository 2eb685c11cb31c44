"""`one_hop`, `two_hops`: how a MoE layer's rows reach their experts' ranks in the plain plane.

  one hop    A row goes to each rank that needs it, once. In a group of few ranks it goes to all.
  two hops   A row goes to each node that needs it, once: to the rank with the same index there,
             its relay, which forwards it to the ranks that need it. Outputs return the same way.

Both return each row's weighted sum in float32, the same to the last bit: outputs are summed where
the row came from, choice 0 first. With two hops they may be summed on their nodes instead, before
they return. That saves rows between nodes, but the last bits then depend on the layout.

Both are generators that pause while rows travel. Of two hops, only the one between nodes is paused
for; those within a node are short.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise_kernels.plain.permute import slot_order, unpermute_rows
from equipoise_model.exchange import RowExchange
from equipoise_model.node_traffic import NodeTraffic
from equipoise_model.overlap import Stage, Stages

RunPairs = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Runs assignments on this rank: rows [A, D], assignments and their slots on this rank, int64 [N]
-> outputs [N, D]. Assignment n is choice n % K of row n // K."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """Where T rows go."""

    slots_TK: Tensor
    """Physical slots, integers."""
    weights_TK: Tensor
    """Factors of the slots' outputs, float32."""
    slots_per_rank: int
    """Physical slots of each rank."""

    @property
    def ranks(self) -> Tensor:
        """The slots' ranks, int64 [T, K]."""
        return self.slots_TK.to(torch.int64) // self.slots_per_rank

    def packed(self, x_TD: Tensor, *, weighted: bool) -> Tensor:
        """Put slots, and weights if asked, beside rows: [T, D + ..].

        As words of the rows' dtype, which nothing computes with.
        """
        parts = [x_TD, self.slots_TK.to(torch.int32).view(x_TD.dtype)]
        if weighted:
            parts.append(self.weights_TK.view(x_TD.dtype))
        return torch.cat(parts, dim=1)

    def unpacked(self, message_AW: Tensor, *, dim: int) -> tuple[Tensor, "Choices"]:
        """Invert `packed` for rows [A, dim] of any rank; weights that were not sent are empty."""
        words = self.slots_TK.shape[1] * 4 // message_AW.element_size()
        x_AD, slots, weights = message_AW.tensor_split([dim, dim + words], dim=1)
        choices = Choices(
            slots_TK=slots.contiguous().view(torch.int32),
            weights_TK=weights.contiguous().view(torch.float32),
            slots_per_rank=self.slots_per_rank,
        )
        return x_AD, choices

    def on_rank(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the assignments on a rank, their slots there, and which they are, bool [T, K]."""
        is_here_TK = self.ranks == rank
        pairs_N = is_here_TK.flatten().nonzero().squeeze(1)
        slots_N = self.slots_TK.flatten()[pairs_N].to(torch.int64) - rank * self.slots_per_rank
        return pairs_N, slots_N, is_here_TK


def no_hop(x_TD: Tensor, choices: Choices, run: RunPairs) -> Stages[Tensor]:
    """Compute the weighted sum for rows [T, D] on a rank alone."""
    yield Stage.SENT
    slots_N = choices.slots_TK.flatten()
    y_ND = run(x_TD, torch.arange(slots_N.shape[0], device=slots_N.device), slots_N)
    yield Stage.COMPUTED
    return weighted_sum(y_ND, choices.weights_TK)


def no_rows(x_TD: Tensor) -> Stages[Tensor]:
    """Compute the sum for no rows in a step in which no rank has any."""
    yield Stage.SENT
    yield Stage.COMPUTED
    return torch.zeros_like(x_TD)


def one_hop(
    x_TD: Tensor,
    choices: Choices,
    *,
    ranks: RowExchange,
    tokens_by_rank: Sequence[int],
    traffic: NodeTraffic | None,
    run: RunPairs,
) -> Stages[Tensor]:
    """Compute the weighted sum for rows [T, D]; each rank brings `tokens_by_rank` of them.

    Raises:
        ExchangeError: another rank is gone or slower than the group's timeout.
    """
    is_exact = _is_exact(ranks, choices)
    needed_RT = _needed(choices.ranks, num_ranks=ranks.count)
    if not is_exact:
        needed_RT.fill_(value=True)
    send = needed_RT.sum(1).tolist()
    receive = ranks.swap_numbers([send])[0] if is_exact else tokens_by_rank
    message = choices.packed(x_TD, weighted=False)[_rows(needed_RT)]
    coming = ranks.begin_exchange(message, send=send, receive=receive)
    yield Stage.SENT
    x_AD, came = choices.unpacked(coming(), dim=x_TD.shape[1])
    pairs_N, slots_N, is_here_AK = came.on_rank(ranks.rank)
    back = _by_sender(is_here_AK, receive)
    ranks_N = choices.ranks.flatten()
    outputs = ranks.begin_exchange(
        run(x_AD, pairs_N, slots_N), send=back, receive=_by_rank(ranks_N, ranks)
    )
    if traffic is not None:
        traffic.choose(choices.ranks)
        rows = traffic.between(send)
        traffic.note(direct=rows, rows=rows, outputs=traffic.between(back))
    yield Stage.COMPUTED
    return weighted_sum(unpermute_rows(outputs(), slot_order(ranks_N)), choices.weights_TK)


def two_hops(
    x_TD: Tensor,
    choices: Choices,
    *,
    ranks: RowExchange,
    traffic: NodeTraffic,
    run: RunPairs,
    sums_on_nodes: bool,
) -> Stages[Tensor]:
    """Compute what `one_hop` does, by the nodes of `traffic`.

    With `sums_on_nodes`, outputs are summed on their nodes, and then nodes in their order.

    Raises:
        ExchangeError: another rank is gone or slower than the group's timeout.
    """
    ranks_TK, num_tokens = choices.ranks, len(x_TD)
    relays = torch.tensor(traffic.nodes.relays(ranks.rank), device=x_TD.device)
    needed_NT = traffic.choose(ranks_TK)
    via_RT = needed_NT.new_zeros(ranks.count, num_tokens).index_copy_(0, relays, needed_NT)
    ends_RT = _needed(ranks_TK, num_ranks=ranks.count)
    send, ends = via_RT.sum(1).tolist(), ends_RT.sum(1).tolist()
    # From end to end and before any row, so that a missing rank is not mistaken for its relay.
    receive, ends_here = ranks.swap_numbers([send, ends])
    message = choices.packed(x_TD, weighted=sums_on_nodes)[_rows(via_RT)]
    coming = ranks.begin_exchange(message, send=send, receive=receive)
    yield Stage.SENT
    relay = _Relay(coming(), choices, ranks=ranks, traffic=traffic, dim=x_TD.shape[1])
    y_PD = relay.run(ends_here, run)
    relays_P = relays[traffic.nodes_of(ranks_TK)].flatten()
    if sums_on_nodes:
        back, come, y_PD = receive, send, relay.summed(y_PD)
    else:
        back, come = relay.pairs_by_sender(receive), _by_rank(relays_P, ranks)
    outputs = ranks.begin_exchange(y_PD, send=back, receive=come)
    direct = ends if _is_exact(ranks, choices) else [num_tokens] * ranks.count
    traffic.note(
        direct=traffic.between(direct), rows=traffic.between(send), outputs=traffic.between(back)
    )
    yield Stage.COMPUTED
    if sums_on_nodes:
        return _sum_of_nodes(outputs(), needed_NT, relays)
    return weighted_sum(unpermute_rows(outputs(), slot_order(relays_P)), choices.weights_TK)


def weighted_sum(y_ND: Tensor, weights_TK: Tensor) -> Tensor:
    """Sum a row's outputs in float32, weighted, choice 0 first: [T, D].

    The fixed order makes the sum independent of the layout, to the last bit.
    """
    y_TKD = y_ND.float().view(*weights_TK.shape, y_ND.shape[-1])
    weighted_TKD = y_TKD * weights_TK.unsqueeze(-1)
    total_TD, *others = weighted_TKD.unbind(1)
    for choice_TD in others:
        total_TD = total_TD + choice_TD
    return total_TD


class _Relay:
    """Rows that a rank forwards within its node, by the rank they come from."""

    def __init__(
        self,
        message_BW: Tensor,
        choices: Choices,
        *,
        ranks: RowExchange,
        traffic: NodeTraffic,
        dim: int,
    ) -> None:
        self._message_BW, self._dim = message_BW, dim
        self._ranks, self._nodes = ranks, traffic.nodes
        self._node = traffic.nodes.of_rank[ranks.rank]
        _, self._choices = choices.unpacked(message_BW, dim=dim)
        self._is_here_BK = traffic.nodes_of(self._choices.ranks) == self._node

    def run(self, ends_here: Sequence[int], run: RunPairs) -> Tensor:
        """Run the rows' assignments on this node: outputs [P, D], by row and then choice.

        `ends_here` are the rows that each rank sends to this one, by whatever relay.
        """
        ranks, own = self._ranks, self._nodes.ranks(self._node)
        ranks_BK = self._choices.ranks
        needed_RB = _needed(ranks_BK, num_ranks=ranks.count)
        needed_RB[[rank for rank in range(ranks.count) if rank not in own]] = False
        senders = {relay: self._nodes.origins(relay) for relay in own}
        receive = [sum(ends_here[o] for o in senders.get(r, ())) for r in range(ranks.count)]
        came_AW = ranks.exchange(
            self._message_BW[_rows(needed_RB)], send=needed_RB.sum(1).tolist(), receive=receive
        )
        x_AD, came = self._choices.unpacked(came_AW, dim=self._dim)
        pairs_N, slots_N, is_here_AK = came.on_rank(ranks.rank)
        # In the order in which one hop brings them: by the rank that they are from.
        origins = torch.tensor([origin for relay in own for origin in senders[relay]])
        counts = torch.tensor([ends_here[origin] for origin in origins.tolist()])
        origins_A = origins.repeat_interleave(counts).to(pairs_N.device)
        order_N = origins_A[pairs_N // is_here_AK.shape[1]].argsort(stable=True)
        y_ND = unpermute_rows(run(x_AD, pairs_N[order_N], slots_N[order_N]), order_N)
        ranks_P = ranks_BK[self._is_here_BK]
        y_PD = ranks.exchange(
            y_ND, send=_by_sender(is_here_AK, receive), receive=_by_rank(ranks_P, ranks)
        )
        return unpermute_rows(y_PD, slot_order(ranks_P))

    def pairs_by_sender(self, received: Sequence[int]) -> list[int]:
        """Assignments on this node of the rows that each rank sent."""
        return _by_sender(self._is_here_BK, received)

    def summed(self, y_PD: Tensor) -> Tensor:
        """Sum each row's outputs on this node, weighted, in the order of its choices: float32."""
        y_BKD = y_PD.new_zeros(*self._is_here_BK.shape, self._dim)
        y_BKD[self._is_here_BK] = y_PD
        return weighted_sum(y_BKD.flatten(0, 1), self._choices.weights_TK)


def _sum_of_nodes(sums_SD: Tensor, needed_NT: Tensor, relays: Tensor) -> Tensor:
    """Add up nodes' sums, which come by relay and then row: float32 [T, D]."""
    total_TD = sums_SD.new_zeros(needed_NT.shape[1], sums_SD.shape[1])
    by_relay = sums_SD.split(needed_NT[relays.argsort()].sum(1).tolist())
    for node, place in enumerate(relays.argsort().argsort().tolist()):
        total_TD[needed_NT[node]] += by_relay[place]
    return total_TD


def _is_exact(ranks: RowExchange, choices: Choices) -> bool:
    """Whether one hop sends rows only to the ranks that need them, not to all."""
    return ranks.count > choices.slots_TK.shape[1]


def _needed(ranks_TK: Tensor, *, num_ranks: int) -> Tensor:
    """Which ranks need which rows, bool [R, T]."""
    needed_RT = torch.zeros(num_ranks, len(ranks_TK), dtype=torch.bool, device=ranks_TK.device)
    return needed_RT.scatter_(0, ranks_TK.T, value=True)


def _rows(needed_RT: Tensor) -> Tensor:
    """The rows to send, by rank."""
    return needed_RT.nonzero()[:, 1]


def _by_sender(is_here_AK: Tensor, received: Sequence[int]) -> list[int]:
    """Assignments of the rows that each rank sent."""
    return [int(of_rank.sum()) for of_rank in is_here_AK.split(list(received))]


def _by_rank(ranks_N: Tensor, ranks: RowExchange) -> list[int]:
    """How many of these there are of each rank."""
    counts: list[int] = torch.bincount(ranks_N, minlength=ranks.count).tolist()
    return counts
