"""`RowExchange`: all-to-all exchanges of rows between the ranks of a group, differentiable.

Owns the collectives of a step and turns their failures into messages. Every exchange is bounded by
the timeout of its process group. Several may be under way at once, if all ranks begin them in the
same order.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch import distributed as dist

from equipoise_model.ranges import named


class ExchangeError(RuntimeError):
    """Ranks could not exchange rows: one of them is gone, stuck or unreachable."""


class RowExchange:
    """This rank among `count` ranks; a rank alone has no group and exchanges nothing.

    `waited_s` is the total time spent waiting for exchanges to end. With a GPU, it is only the time
    that the host waited.
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

    def swap_numbers(self, numbers: Sequence[Sequence[int]]) -> list[list[int]]:
        """Swap several numbers with each rank, at the cost of one exchange.

        Args:
            numbers: several lists, each of one number for each rank.

        Returns:
            The same lists, of the numbers that each rank sent to this one.

        Raises:
            ExchangeError: another rank is gone or slower than the group's timeout.
        """
        if self.alone:
            return [list(of_ranks) for of_ranks in numbers]
        ones = [1] * self.count
        swapped: list[list[int]] = self.exchange(
            torch.tensor(numbers).T, send=ones, receive=ones
        ).T.tolist()
        return swapped

    def gather(self, x_N: Tensor) -> Tensor:
        """Return every rank's numbers, [ranks, N], at the cost of one exchange.

        Raises:
            ExchangeError: another rank is gone or slower than the group's timeout.
        """
        assert self._group is not None
        began = time.perf_counter()
        gathered_M = x_N.new_empty(self.count * len(x_N))
        with named("exchange"), _reporting(self._group):
            dist.all_gather_into_tensor(gathered_M, x_N, group=self._group)
        self.waited_s += time.perf_counter() - began
        return gathered_M.view(self.count, len(x_N))

    def exchange(self, x_ND: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send each rank its share of the rows and receive one from each, in rank order.

        Args:
            x_ND: the rows for rank 0, then those for rank 1, and so on.
            send: rows for each rank; they sum to N.
            receive: rows that each rank sends to this one; 0 is allowed in both.

        Raises:
            ExchangeError: another rank is gone or slower than the group's timeout.
        """
        return self.begin_exchange(x_ND, send=send, receive=receive)()

    def begin_exchange(
        self, x_ND: Tensor, *, send: Sequence[int], receive: Sequence[int]
    ) -> Callable[[], Tensor]:
        """Begin what `exchange` does; the returned callable waits and returns the rows.

        Raises:
            ExchangeError: as `exchange`, here or from the callable.
        """
        assert self._group is not None
        group, works = self._group, list[dist.Work]()
        received: Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
            x_ND, (list(send), list(receive)), group, works
        )

        def wait() -> Tensor:
            began = time.perf_counter()
            with named("exchange"), _reporting(group):
                works.pop().wait()
            self.waited_s += time.perf_counter() - began
            return received

        return wait


class _AllToAll(torch.autograd.Function):
    """Begins `all_to_all_single`, and adds its work; the gradient takes the same way back."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        splits: tuple[list[int], list[int]],
        group: dist.ProcessGroup,
        works: list[dist.Work],
    ) -> Tensor:
        ctx.splits, ctx.group = splits, group
        received, work = _all_to_all(x_ND, *splits, group)
        works.append(work)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive = ctx.splits
        received, work = _all_to_all(grads[0], receive, send, ctx.group)
        with _reporting(ctx.group):
            work.wait()
        return received, None, None, None


def _all_to_all(
    x_ND: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, dist.Work]:
    # A bug here must not look like a peer's failure: torch raises RuntimeError for both.
    assert sum(send) == x_ND.shape[0]
    assert len(send) == len(receive) == dist.get_world_size(group)
    received = x_ND.new_empty(sum(receive), *x_ND.shape[1:])
    with _reporting(group):
        work = dist.all_to_all_single(
            received, x_ND.contiguous(), receive, send, group=group, async_op=True
        )
    assert work is not None, "this process is in the group"
    return received, work


@contextmanager
def _reporting(group: dist.ProcessGroup) -> Iterator[None]:
    """Raise a collective's failure as `ExchangeError`."""
    try:
        yield
    except RuntimeError as error:
        rank, others = dist.get_rank(group), dist.get_world_size(group) - 1
        broken = _broken_connections(group)
        # After a timeout all connections are closed, and nothing shows who caused it.
        cause = (
            f"the connection to rank {' and '.join(map(str, broken))} is broken"
            if 0 < len(broken) < max(2, others)
            else "one of them is gone or stuck"
        )
        raise ExchangeError(
            f"rank {rank} could not exchange rows with the other {others} rank(s), because "
            f"{cause}: {error}"
        ) from error


def _broken_connections(group: dist.ProcessGroup) -> list[int]:
    """Ranks to which nothing can be sent any more."""
    broken = []
    for rank in range(dist.get_world_size(group)):
        if rank != dist.get_rank(group):
            try:
                dist.isend(torch.zeros(1), group=group, group_dst=rank)
            except RuntimeError:
                broken.append(rank)
    return broken
