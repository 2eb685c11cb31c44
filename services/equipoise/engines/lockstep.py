"""`Lockstep`: collectives that all ranks start at the same step and read some steps later.

They run on a CPU group of the engine's ranks, beside its forward passes, so that reading rarely
waits: a peer that took part in a later pass has long started the collective.
"""

import hashlib
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions

from equipoise.rank.errors import GroupError

ROW_WIDTH = 32
"""Numbers that a rank sends in a round, in every release: gloo ends a process that receives more
than it expects."""


class LockstepError(GroupError):
    """A collective failed or timed out: this rank cannot know what the others decided."""


class MixedLayoutsError(LockstepError):
    """Ranks use different layouts: another pass could give wrong tokens."""


class Pending:
    """A collective in flight."""

    def __init__(self, work: dist.Work, result: Tensor, *, timeout_s: float) -> None:
        self._work = work
        self._result = result
        self._timeout_s = timeout_s

    def result(self) -> Tensor:
        """Wait for the result.

        Raises:
            LockstepError: a rank did not take part in time, or is gone.
        """
        began_s = time.monotonic()
        try:
            if not self._work.wait(timedelta(seconds=self._timeout_s)):
                raise LockstepError("a collective between the ranks failed")
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            if time.monotonic() - began_s < self._timeout_s:
                what = "a rank is gone: look at the log of each, and restart the engine"
            else:
                what = (
                    f"not all ranks answered within {self._timeout_s:g} s (is the plugin installed "
                    "and EQUIPOISE_BALANCER set on each of them?)"
                )
            raise LockstepError(f"{what}: {reason}") from error
        return self._result


class Lockstep:
    """Collectives of one CPU group; for the engine's thread, in the same order on all ranks."""

    def __init__(
        self, group: dist.ProcessGroup, *, rank: int, num_ranks: int, timeout_s: float = 60.0
    ) -> None:
        self._group = group
        self.rank = rank
        """This rank, from 0."""
        self.num_ranks = num_ranks
        """Ranks of the group."""
        self._timeout_s = timeout_s
        # A collective that some rank never starts must end too: the process cannot exit before.
        # Later than any wait for it, which then says what is wrong.
        self._longest = timedelta(seconds=2 * timeout_s)

    def gather(self, row: Tensor) -> Pending:
        """Start gathering a row, [...], of each rank; the result is [ranks, ...]."""
        rows = torch.empty((self.num_ranks, *row.shape), dtype=row.dtype)
        options = AllgatherOptions()
        options.timeout = self._longest
        work = self._group.allgather([list(rows.unbind())], [row], options)
        return Pending(work, rows, timeout_s=self._timeout_s)

    def sum(self, values: Tensor) -> Pending:
        """Start adding up values of all ranks, in place."""
        options = AllreduceOptions()
        options.timeout = self._longest
        work = self._group.allreduce([values], options)
        return Pending(work, values, timeout_s=self._timeout_s)


class RowForm:
    """What the numbers of a round are; ranks whose release has another form are told apart."""

    def __init__(self, *parts: object) -> None:
        """`parts` are all that ranks must have in common to read one another's rows."""
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=7).digest()
        self._word = int.from_bytes(digest, "big")

    def pack(self, numbers: Sequence[int]) -> Tensor:
        """Return a rank's row, int64 [ROW_WIDTH]."""
        row = torch.zeros(ROW_WIDTH, dtype=torch.int64)
        row[: len(numbers) + 1] = torch.tensor([self._word, *numbers])
        return row

    def unpack(self, rows: Tensor, *, count: int, names: Sequence[str]) -> list[list[int]]:
        """Return the first `count` numbers of each rank of [ranks, ROW_WIDTH].

        Raises:
            GroupError: ranks have other forms.
        """
        found: list[list[int]] = rows[:, : count + 1].tolist()
        others = [name for name, row in zip(names, found, strict=True) if row[0] != found[0][0]]
        if others:
            raise GroupError(
                f"{names[0]} and {', '.join(others)} run different releases of the plugin: install "
                "the same one on all ranks, and restart the engine"
            )
        return [row[1:] for row in found]
