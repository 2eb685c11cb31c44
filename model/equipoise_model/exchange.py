"""`RowExchange`: all-to-all exchanges of rows between the ranks of a group, differentiable.

Owns the collectives of a step and turns their failures into messages. Every exchange is bounded by
the timeout of its process group.
"""

import time
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch import distributed as dist

from equipoise_model.ranges import named


class ExchangeError(RuntimeError):
    """Ranks could not exchange rows: one of them is gone, stuck or unreachable."""


class RowExchange:
    """This rank among `count` ranks; a rank alone has no group and exchanges nothing.

    `waited_s` is the total time in exchanges, most of it spent waiting for slower peers. With a
    GPU, it is only the time that the host waited.
    """

    def __init__(self, *, group: dist.ProcessGroup | None, rank: int, count: int) -> None:
        assert 0 <= rank < count
        assert group is not None or count == 1
        self.rank = rank
        self.count = count
        self._group = group
        self.waited_s = 0.0

    @classmethod
    def of_group(cls, group: dist.ProcessGroup) -> Self:
        """This process's rank of a group."""
        return cls(group=group, rank=dist.get_rank(group), count=dist.get_world_size(group))

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.count == 1

    def close(self) -> None:
        """Release the group; its threads and sockets end with its last user."""
        self._group = None

    def swap_numbers(self, numbers: Sequence[int]) -> list[int]:
        """Send each rank its number and return the number that each sent to this one.

        Raises:
            ExchangeError: another rank is gone or slower than the group's timeout.
        """
        if self.alone:
            return list(numbers)
        ones = [1] * self.count
        swapped = self.exchange(torch.tensor(numbers).unsqueeze(1), send=ones, receive=ones)
        return [int(number) for number in swapped.flatten()]

    def exchange(self, x_ND: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send each rank its share of the rows and receive one from each, in rank order.

        Args:
            x_ND: the rows for rank 0, then those for rank 1, and so on.
            send: rows for each rank; they sum to N.
            receive: rows that each rank sends to this one; 0 is allowed in both.

        Raises:
            ExchangeError: another rank is gone or slower than the group's timeout.
        """
        assert self._group is not None
        began = time.perf_counter()
        with named("exchange"):
            received: Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
                x_ND, list(send), list(receive), self._group
            )
        self.waited_s += time.perf_counter() - began
        return received


class _AllToAll(torch.autograd.Function):
    """`all_to_all_single`; the gradient takes the same way back."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.splits = (send, receive, group)
        return _all_to_all(x_ND, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.splits
        return _all_to_all(grads[0], receive, send, group), None, None, None


def _all_to_all(
    x_ND: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> Tensor:
    # A bug here must not look like a peer's failure: torch raises RuntimeError for both.
    assert sum(send) == x_ND.shape[0]
    assert len(send) == len(receive) == dist.get_world_size(group)
    received = x_ND.new_empty(sum(receive), *x_ND.shape[1:])
    try:
        dist.all_to_all_single(received, x_ND.contiguous(), receive, send, group=group)
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {dist.get_rank(group)} could not exchange rows with the other "
            f"{dist.get_world_size(group) - 1} rank(s), one of which is gone or stuck: {error}"
        ) from error
    return received
