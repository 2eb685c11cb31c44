"""`Epochs`: a worker's ranks, one epoch after another, for the process's lifetime.

When a group of ranks fails, the worker keeps its requests and experts, reports GroupLost, and
becomes a rank of the next epoch that the balancer sends.
"""

import asyncio
import logging
import threading

from equipoise.rank.errors import GroupError, PeerLeftError, TransferError, WorkerError
from equipoise.rank.scrubber import Scrubber
from equipoise.telemetry.loading import Loading
from equipoise.telemetry.logs import about
from equipoise.wire.balancer_messages import JoinEpoch
from equipoise.wire.messages import Wait
from equipoise.worker.epoch_state import EpochState
from equipoise.worker.errors import StepTimeoutError
from equipoise.worker.joining import EpochGroup, WorkerSlots, join
from equipoise.worker.parts import WorkerParts
from equipoise.worker.placement import HeldSlots
from equipoise.worker.rank import Rank

_log = logging.getLogger(__name__)


class Epochs:
    """Takes up each JoinEpoch in turn; used from the event loop only."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._slots = WorkerSlots(parts, loading=Loading(log_format=parts.settings.log_format))
        self._scrubber: Scrubber | None = None
        self.state = EpochState()
        self._next: asyncio.Queue[JoinEpoch] = asyncio.Queue()
        self._abandoned = threading.Event()
        self._outage: asyncio.TimerHandle | None = None
        self._ended = False
        self.rank: Rank | None = None
        """This worker's rank; None unless it serves."""

    @property
    def highest_generation(self) -> int:
        """The highest generation that this worker has started in, run or staged; 0 for none."""
        self._count_generations()
        return self.state.highest_generation

    def join(self, join_epoch: JoinEpoch) -> None:
        """Become a rank of an epoch; the newest epoch wins, and a repetition changes nothing."""
        rank = self.rank
        mine = rank and (rank.join_epoch.epoch, rank.join_epoch.rank)
        if rank is not None and mine == (join_epoch.epoch, join_epoch.rank):
            # Answered again, because the stream may have broken before the balancer received it.
            self._send_serving(rank)
        elif self.state.take_up(join_epoch):
            self._next.put_nowait(join_epoch)
            self._leave()
        elif rejection := self.state.rejection(join_epoch):
            # The balancer has forgotten the newest epoch and waits for ranks that never come.
            _log.warning("rejected epoch %d: %s", join_epoch.epoch, rejection.reason)
            self._parts.send(rejection)

    async def run(self) -> None:
        """Serve one epoch after another until cancelled or ended.

        Raises:
            WorkerError: an epoch's experts are unavailable.
        """
        while not self._ended:
            join_epoch = await self._next.get()
            if self.state.is_newest(join_epoch):
                await self._run_epoch(join_epoch)

    def end(self) -> None:
        """Leave the current epoch and enter no other."""
        self._ended = True
        self._leave()
        if self._outage is not None:
            self._outage.cancel()

    def _leave(self) -> None:
        """Announce to the peers in the next header, or stop joining."""
        self._abandoned.set()
        if self.rank is not None:
            self.rank.engine.leave()

    async def _run_epoch(self, join_epoch: JoinEpoch) -> None:
        self._abandoned = threading.Event()
        if self._slots.held is not None:
            self._open_transfer(self._slots.held, join_epoch)
        try:
            joined = await join(
                join_epoch, slots=self._slots, parts=self._parts, abandoned=self._abandoned
            )
            await self._serve(joined)
        except TransferError as error:
            raise WorkerError(f"cannot join epoch {join_epoch.epoch}: {error}") from error
        except GroupError as error:
            if isinstance(error, StepTimeoutError):
                self._parts.waits.note(Wait.STEP, f"epoch {join_epoch.epoch} ended: {error}")
            self._lose(join_epoch, error)
        self._bound_outage()

    def _open_transfer(self, held: HeldSlots, join_epoch: JoinEpoch) -> None:
        scrubber = self._scrubber_of(held)
        suspect = None if scrubber is None else scrubber.suspect
        self._parts.transfer.open(held, epoch=join_epoch.epoch, suspect=suspect)

    async def _serve(self, joined: EpochGroup) -> None:
        scrubber = self._scrubber_of(joined.held)
        rank = Rank(joined, self._parts, scrubber=scrubber)
        self.rank = rank
        self.state.lost = None
        if self._abandoned.is_set():
            rank.engine.leave()
        self._open_transfer(joined.held, joined.join_epoch)
        if self._outage is not None:
            self._outage.cancel()
        self._parts.inference.open(rank.engine)
        self._parts.health.set_serving(True)
        self._send_serving(rank)
        _log_serving(joined.join_epoch)
        try:
            await rank.run()
        finally:
            self._count_generations()
            self.rank = None
            self._parts.timings.num_corrupted += rank.puller.num_corrupted
            if scrubber is not None:
                self._parts.timings.num_scrubbed = scrubber.num_verified

    def _scrubber_of(self, held: HeldSlots) -> Scrubber | None:
        """Return the one of all epochs, which resumes where the epoch before interrupted it."""
        settings, core = self._parts.settings, self._parts.core
        if self._scrubber is None and settings.scrub_mib_per_s:
            self._scrubber = Scrubber(
                held,
                checksums=core.payload_checksums,
                expert_bytes=core.shape.expert_bytes,
                bytes_per_s=settings.scrub_mib_per_s * 2**20,
            )
        return self._scrubber

    def _count_generations(self) -> None:
        if self.rank is not None:
            engine = self.rank.engine
            self.state.use(max(engine.generation, engine.staged_generation))

    def _send_serving(self, rank: Rank) -> None:
        self._parts.send(rank.serving())
        if rank.last_switch is not None:
            self._parts.send(rank.last_switch)

    def _lose(self, join_epoch: JoinEpoch, error: GroupError) -> None:
        """Report that the group is lost."""
        if self._ended:
            return
        held, reason = self._slots.held, str(error)
        lost = self.state.lose(
            join_epoch,
            reason,
            expert_of_slot=None if held is None else held.expert_of_slot,
            unreached=error.unreached,
        )
        level = logging.INFO if isinstance(error, PeerLeftError) else logging.WARNING
        _log.log(level, "epoch %d ended: %s", join_epoch.epoch, reason)
        if self.state.is_newest(join_epoch):
            self._parts.send(lost)

    def _bound_outage(self) -> None:
        """Let requests wait for the next group, up to a timeout since this rank had one."""
        if not self._ended and (self._outage is None or self._outage.cancelled()):
            timeout_s = self._parts.settings.outage_timeout_s
            self._outage = asyncio.get_running_loop().call_later(timeout_s, self._end_requests)

    def _end_requests(self) -> None:
        lost, timeout_s = self.state.lost, self._parts.settings.outage_timeout_s
        reason = "this rank left its group for another" if lost is None else lost.reason
        message = f"the ranks did not re-form a group within {timeout_s:g} s: {reason}"
        self._parts.waits.note(Wait.OUTAGE, f"ended the requests: {message}")
        self._parts.inference.close(message)
        self._parts.health.set_serving(False)


def _log_serving(join_epoch: JoinEpoch) -> None:
    epoch, rank, generation = join_epoch.epoch, join_epoch.rank, join_epoch.layout.generation
    _log.info(
        "rank %d of %d in epoch %d, generation %d",
        rank,
        len(join_epoch.peers),
        epoch,
        generation,
        extra=about(epoch=epoch, rank=rank, generation=generation),
    )
