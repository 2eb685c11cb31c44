"""`Epochs`: a worker's ranks, one after the other, for as long as it lives.

A group of ranks that breaks is no end: the worker keeps its requests and its experts, says that the
group is over, and becomes a rank of the next epoch it is assigned to.
"""

import asyncio
import logging
import threading
from collections.abc import Callable

from opentelemetry.trace import Tracer

from equipoise.telemetry.loading import Loading
from equipoise.telemetry.logs import about
from equipoise.trust.credentials import Credentials
from equipoise.wire.messages import GroupLost, JoinEpoch, Wait
from equipoise.worker.core import ModelCore
from equipoise.worker.errors import GroupError, StepTimeoutError, TransferError, WorkerError
from equipoise.worker.inference import InferenceService
from equipoise.worker.joining import Joined, Slots, join
from equipoise.worker.rank import Rank, Say
from equipoise.worker.settings import WorkerSettings
from equipoise.worker.spans import RankSpans
from equipoise.worker.timings import Timings
from equipoise.worker.transfer import ExpertTransferService
from equipoise.worker.waits import Waits

_log = logging.getLogger(__name__)


class Epochs:
    """Take up each JoinEpoch in turn; used from the event loop only.

    `say` tells the balancer; `serves` is called with whether requests are taken when that changes.
    """

    def __init__(
        self,
        *,
        core: ModelCore,
        settings: WorkerSettings,
        boot_id: str,
        transfer: ExpertTransferService,
        inference: InferenceService,
        say: Say,
        serves: Callable[[bool], None],
        credentials: Credentials,
        waits: Waits,
        tracer: Tracer | None = None,
    ) -> None:
        self._core = core
        self._settings = settings
        self._boot_id = boot_id
        self._transfer = transfer
        self._inference = inference
        self._say = say
        self._serves = serves
        self._credentials = credentials
        self._waits = waits
        self._spans = RankSpans(tracer, pool=settings.pool, worker=settings.worker)
        self._slots = Slots(
            core,
            credentials=credentials,
            waits=waits,
            loading=Loading(log_format=settings.log_format),
        )
        self.timings = Timings()
        self.scheduler = core.scheduler(settings)
        self._epoch = 0
        self._next: asyncio.Queue[JoinEpoch] = asyncio.Queue()
        self._given_up = threading.Event()
        self._outage: asyncio.TimerHandle | None = None
        self._ended = False
        self._staged_generation = 0
        self.rank: Rank | None = None
        self.lost: GroupLost | None = None

    @property
    def has_begun(self) -> bool:
        """Whether this worker was ever assigned to an epoch."""
        return self._epoch > 0

    def join(self, join_epoch: JoinEpoch) -> None:
        """Become a rank of an epoch; the newest one counts, and repeating it changes nothing."""
        rank = self.rank
        if rank is not None and rank.same_as(join_epoch):
            # Said again, because the stream may have broken before the balancer heard it.
            self._say_serving(rank)
        elif join_epoch.epoch <= self._epoch:
            _log.info("epoch %d was taken up before: ignored", join_epoch.epoch)
        else:
            self._epoch = join_epoch.epoch
            self._next.put_nowait(join_epoch)
            self._leave()

    async def run(self) -> None:
        """Live through epochs until cancelled or ended.

        Raises:
            WorkerError: the experts of an epoch could not be had.
        """
        while not self._ended:
            join_epoch = await self._next.get()
            if join_epoch.epoch == self._epoch:
                await self._live(join_epoch)

    def end(self) -> None:
        """Leave the present epoch, and enter no other."""
        self._ended = True
        self._leave()
        if self._outage is not None:
            self._outage.cancel()

    def _leave(self) -> None:
        """Tell the peers in the next header; whoever still joins gives up."""
        self._given_up.set()
        if self.rank is not None:
            self.rank.leave()

    async def _live(self, join_epoch: JoinEpoch) -> None:
        self._given_up = threading.Event()
        held = self._slots.held
        if held is not None:
            self._transfer.open(held, epoch=join_epoch.epoch)
        try:
            joined = await join(
                join_epoch, slots=self._slots, settings=self._settings, given_up=self._given_up
            )
            await self._serve(joined)
        except TransferError as error:
            raise WorkerError(f"epoch {join_epoch.epoch} cannot be joined: {error}") from error
        except GroupError as error:
            if isinstance(error, StepTimeoutError):
                self._waits.note(Wait.STEP, f"epoch {join_epoch.epoch} ended: {error}")
            self._lose(join_epoch, str(error))

    async def _serve(self, joined: Joined) -> None:
        join_epoch = joined.join_epoch
        rank = Rank(
            joined,
            core=self._core,
            settings=self._settings,
            scheduler=self.scheduler,
            boot_id=self._boot_id,
            say=self._say,
            deliver=self._inference.deliver,
            timings=self.timings,
            credentials=self._credentials,
            waits=self._waits,
            spans=self._spans,
        )
        self.rank, self.lost = rank, None
        if self._given_up.is_set():
            rank.leave()
        self._transfer.open(joined.held, epoch=join_epoch.epoch)
        if self._outage is not None:
            self._outage.cancel()
        self._inference.open(rank.engine)
        self._serves(True)
        self._say_serving(rank)
        _log.info(
            "rank %d of %d in epoch %d, generation %d",
            join_epoch.rank,
            len(join_epoch.peers),
            join_epoch.epoch,
            join_epoch.layout.generation,
            extra=about(
                epoch=join_epoch.epoch,
                rank=join_epoch.rank,
                generation=join_epoch.layout.generation,
            ),
        )
        try:
            await rank.run()
        finally:
            self._staged_generation = max(self._staged_generation, rank.engine.staged_generation)
            self.rank = None
            self.timings.num_corrupted += rank.num_corrupted

    def _say_serving(self, rank: Rank) -> None:
        self._say(rank.serving())
        if rank.last_switch is not None:
            self._say(rank.last_switch)

    def _lose(self, join_epoch: JoinEpoch, reason: str) -> None:
        """The group is over; requests wait for the next one, up to a bound."""
        if self._ended:
            return
        held = self._slots.held
        ran = 0 if held is None else held.contents.layout.generation
        self.lost = GroupLost(
            epoch=join_epoch.epoch,
            reason=reason,
            expert_of_slot=None if held is None else held.expert_of_slot,
            generation=max(join_epoch.layout.generation, ran, self._staged_generation),
        )
        _log.warning("epoch %d is over: %s", join_epoch.epoch, reason)
        if self._epoch == join_epoch.epoch:
            self._say(self.lost)
        if self._outage is None or self._outage.cancelled():
            loop = asyncio.get_running_loop()
            self._outage = loop.call_later(self._settings.outage_timeout_s, self._turn_away, reason)

    def _turn_away(self, reason: str) -> None:
        told = f"the ranks did not form anew within {self._settings.outage_timeout_s:g} s: {reason}"
        self._waits.note(Wait.OUTAGE, f"requests were ended: {told}")
        self._inference.close(told)
        self._serves(False)
