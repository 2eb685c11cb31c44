"""`NumberClaims`: the epochs and generations that workers have used, or may have."""

from collections.abc import Collection
from zlib import crc32

from equipoise.pool.effects import Chain, Log
from equipoise.pool.hello_checks import LARGE_LEAP, RejectedWorkerError, UsedNumbers
from equipoise.pool.layouts import PoolLayouts
from equipoise.pool.members import Roster
from equipoise.wire.errors import InvalidMessageError

MAX_CLAIMS = 64
"""Claims remembered, by worker and number; of more, the least recent ones are forgotten."""

SKIPPED_NUMBERS = 1000
"""Numbers that a balancer leaves out before the first epoch that it opens in a pool, and when it
takes over an epoch that does not have all ranks.

The store may have lost its latest records, which are fewer than that, and the ranks that know of
them may be absent."""

SPREAD = 10_000
"""Up to that many more are left out, depending on the term and on which processes the ranks are:
the store may lose that epoch as well, before its ranks are sent it."""


class NumberClaims:
    """Checks the numbers that workers report, and makes the pool use higher ones."""

    def __init__(self, *, roster: Roster, layouts: PoolLayouts, term: int) -> None:
        self._term = term
        self._roster = roster
        self._layouts = layouts
        # By (worker, number): by how much it raised that since it was last named for it.
        self._raised: dict[tuple[str, str], int] = {}

    def check_hello(self, worker: str, used: UsedNumbers, *, now: float) -> None:
        """Check the numbers of a Hello.

        Raises:
            RejectedWorkerError: no pool can have reached them.
        """
        if (fault := self._fault(worker, used, now=now)) is not None:
            raise RejectedWorkerError(f"hello_{fault[0]}_leap", fault[1])

    def count(self, worker: str, used: UsedNumbers, *, kind: str, now: float) -> Chain:
        """Take over the numbers that a connected worker reports.

        Raises:
            InvalidMessageError: no pool can have reached them.
        """
        if (fault := self._fault(worker, used, now=now)) is not None:
            raise InvalidMessageError(f"{kind}_{fault[0]}_leap", fault[1])
        return self.reserve(worker, used)

    def reserve(self, worker: str, used: UsedNumbers, *, clock_s: int = 0) -> Chain:
        """Use higher numbers from here on, whatever the store forgot.

        A worker that raises them far is named, whether it does so at once or in many reports, and
        some more are left out: it may raise those of another leader as far. Other engines number
        their epochs by a clock: `clock_s` is in Unix seconds, 0 for our workers.
        """
        leaps = used.leaps(known=self._used, clock_s=clock_s)
        self._roster.reserve_epoch(used.epoch)
        self._layouts.reserve(used.generation)
        logs: list[Log] = []
        for what, (reported, by) in leaps.items():
            raised = self._raised.pop((worker, what), 0) + by
            if raised <= LARGE_LEAP:
                self._raised[worker, what] = raised
                continue
            text = (
                f"worker {worker} reports {what} {reported}, far above its pool: it has raised it "
                f"by {raised}, and later ones are above it"
            )
            logs.append(Log(text=text, is_warning=True, worker=worker))
        for forgotten in list(self._raised)[:-MAX_CLAIMS]:
            del self._raised[forgotten]
        if logs:
            self._leave_out(worker)
        return tuple(logs)

    def skip(self, workers: Collection[str]) -> None:
        """Leave out numbers that only absent ranks may know, when `workers` are the first ranks.

        Balancers of different terms that know the same use different numbers, and so does one
        balancer for different processes.
        """
        members = self._roster.members
        self._leave_out(sorted((name, members[name].hello.boot_id) for name in workers))

    def _leave_out(self, why: object) -> None:
        """Leave out some numbers: how many depends on the term and on the reason."""
        num_skipped = SKIPPED_NUMBERS + crc32(repr((self._term, why)).encode()) % SPREAD
        used = self._used
        self._roster.reserve_epoch(used.epoch + num_skipped)
        self._layouts.reserve(used.generation + num_skipped)

    def _fault(self, worker: str, used: UsedNumbers, *, now: float) -> tuple[str, str] | None:
        """Which number no pool can have reached, and the reason to reject it."""
        fault = used.fault(known=self._used, now=now)
        return fault and (fault[0], f"worker {worker} reports {fault[1]}: restart it")

    @property
    def _used(self) -> UsedNumbers:
        """The highest numbers that this balancer knows of."""
        generation = self._layouts.next_generation - 1
        return UsedNumbers(epoch=self._roster.highest_epoch, generation=generation)
