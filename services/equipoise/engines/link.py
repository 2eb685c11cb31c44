"""`EngineLink`: the balancer's stream and the peers' port of a rank inside an engine.

It has a thread and an event loop of its own; the engine's thread never waits for it.
"""

import asyncio
import atexit
import logging
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import replace
from typing import Any

from equipoise.engines.absent import NoSpans, no_checkpoint
from equipoise.engines.comparison import differs, is_updated
from equipoise.engines.errors import UnsupportedEngineError
from equipoise.engines.hello import hello_of
from equipoise.engines.port import PeerPort
from equipoise.engines.seat import EngineSeat
from equipoise.engines.settings import EngineSettings, Mode
from equipoise.planning.layout import Layout
from equipoise.planning.phase import Phase
from equipoise.rank.agent import Agent, Outbox
from equipoise.rank.engine import used_and_staged
from equipoise.rank.errors import DamagedSlotError, NotHeldError
from equipoise.rank.reporter import Reporter
from equipoise.rank.scrubber import Scrubber
from equipoise.rank.stager import Stager
from equipoise.rank.transfer import ExpertPuller
from equipoise.rank.waits import ACK_TIMEOUT_S, SOURCE_TIMEOUT_S, Waits
from equipoise.wire.balancer_messages import Abort, BalancerMessage, JoinEpoch, Rejection, Stage
from equipoise.wire.messages import (
    Heartbeat,
    Hello,
    LayoutRejected,
    Switched,
    Wait,
)
from equipoise_api.v1 import worker_link_pb2

SCRUB_BYTES_PER_S = 64 * 2**20
"""How fast held slots are hashed again, to notice weights that something else changed."""

IDLE_AFTER_S = 5.0
"""Seconds without a forward pass after which an engine is idle; a long prompt takes a second."""

_LEAVE_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)


class EngineLink:
    """One rank's link; used from its own event loop, except for `start`."""

    def __init__(self, settings: EngineSettings) -> None:
        """Nothing is opened before `start`.

        Raises:
            UnsupportedEngineError: a certificate or key is unusable; names the variable.
        """
        self._settings = settings
        self._boot_id = uuid.uuid4().hex
        self._outbox = Outbox()
        self._waits = Waits({Wait.PULL: SOURCE_TIMEOUT_S, Wait.ACK: ACK_TIMEOUT_S})
        self._port = PeerPort(settings)
        self._joined: JoinEpoch | None = None
        self._stager: Stager | None = None
        self._puller: ExpertPuller | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # Tasks of the epoch, which end with it.
        self._epoch_tasks: list[asyncio.Task[None]] = []
        self._following = asyncio.Lock()
        self._failure: BaseException | None = None
        self._rejection = ""

    def start(self, seat: EngineSeat) -> None:
        """Start the thread: the seat is ready. For the engine's thread; must not fail."""
        self._seat = seat
        self._hashed = seat.held.contents
        self._scrubber = Scrubber(
            seat.held,
            checksums=seat.table,
            expert_bytes=seat.model.shape.expert_bytes,
            bytes_per_s=SCRUB_BYTES_PER_S,
        )
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="equipoise-link", daemon=True)
        try:
            self._loop = asyncio.new_event_loop()
            self._thread.start()
        except (OSError, RuntimeError) as error:  # No files or threads are left.
            seat.leave(f"rank {seat.rank} cannot start its link: {error}")
            return
        note_baseline = self._calling(self._note_baseline)
        seat.on_baseline = lambda: note_baseline(None)
        seat.on_switch = self._calling(self._note_switch)
        seat.on_reject = self._calling(self._note_reject)
        seat.on_stop = self._calling(self._note_stop)
        atexit.register(self._leave_at_exit)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except UnsupportedEngineError as error:
            self._seat.leave(f"rank {self._seat.rank}: {error}")
        except Exception as error:  # noqa: BLE001 - the engine serves on
            _log.exception("the link to the balancer ended")
            self._seat.leave(_lost(self._seat.rank, error))
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        """Serve peers and follow the balancer until the seat stops."""
        settings, seat = self._settings, self._seat
        self._begin_epoch()
        self._agent = Agent(
            addresses=settings.balancer.split(","),
            handler=self,
            outbox=self._outbox,
            credentials=self._port.credentials,
            waits=self._waits,
        )
        await self._port.open(seat.worker)
        _log.info("rank %d of pool %s listens on %s", seat.rank, settings.pool, self._port.address)
        self._spawn(self._agent.run())
        await self._ended.wait()
        await self._agent.leave(seat.stopped)
        for task in self._tasks:
            task.cancel()
        await self._end_epoch()
        await self._port.close()

    def _begin_epoch(self) -> None:
        """Serve peers, and hash slots again, by the baseline that the ranks have agreed on."""
        seat = self._seat
        self._hashed = seat.held.contents
        self._scrubber.rebase(seat.table)
        self._port.transfer.open(seat.held, epoch=seat.epoch, suspect=self._scrubber.suspect)
        self._epoch_tasks = [self._spawn(self._scrub())]

    async def _end_epoch(self) -> None:
        """Forget the peers of the epoch, and what is staged in it."""
        stager, puller = self._stager, self._puller
        self._stager = self._puller = self._joined = None
        for task in self._epoch_tasks:
            task.cancel()
        if stager is not None:
            await stager.close()
        if puller is not None:
            await puller.close()

    def _leave_at_exit(self) -> None:
        """Announce a shutdown of the engine to the balancer, if there is time."""
        if self._thread.is_alive() and self._port.address:  # Not in a fork of this process.
            leaving = asyncio.run_coroutine_threadsafe(
                self._agent.leave("the engine is shutting down"), self._loop
            )
            with suppress(FutureTimeoutError):
                leaving.result(_LEAVE_TIMEOUT_S)

    # What the seat calls, by way of this loop.

    def _calling(self, method: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(value: Any) -> None:
            with suppress(RuntimeError):  # The loop is closed: nothing waits for it.
                self._loop.call_soon_threadsafe(method, value)

        return call

    def _note_switch(self, switch: Switched) -> None:
        _log.info(
            "switched to generation %d after pass %d in %d us",
            switch.generation,
            switch.step - 1,
            switch.stall_us,
        )
        self._spawn(self._report_switch(switch))

    async def _report_switch(self, switch: Switched) -> None:
        """Report a switch with the checksums of what its slots hold; passes continue meanwhile.

        If the weights were updated since the switch, nothing is reported: a new epoch follows.
        """
        seat, before = self._seat, self._hashed
        try:
            after = await asyncio.to_thread(seat.held.hash_changed, before)
            if differs(after, seat.table, rank=seat.rank):
                after = await asyncio.to_thread(seat.held.hash_all)
        except NotHeldError as error:
            _log.warning("generation %d is not reported: %s", switch.generation, error)
            return
        if after.layout.generation != switch.generation or seat.epoch != switch.epoch:
            return
        if is_updated(after, before, rank=seat.rank):
            _log.info("generation %d is not reported: the weights were updated", switch.generation)
            if seat.weights_version == seat.hashed_weights:
                seat.note_changed_slots()
            return
        self._hashed = after
        self._outbox.send(replace(switch, checksums=after.checksums))

    def _note_reject(self, rejected: LayoutRejected) -> None:
        if self._stager is not None:
            self._stager.reject(rejected)

    def _note_baseline(self, _: None) -> None:
        """The weights were updated and hashed again: introduce this rank in its new epoch."""
        _log.info("all ranks have hashed the updated weights: epoch %d begins", self._seat.epoch)
        self._spawn(self._follow_baseline())

    async def _follow_baseline(self) -> None:
        async with self._following:  # Another may begin before this epoch has ended.
            await self._end_epoch()
            self._begin_epoch()
        self._agent.reopen()

    def _note_stop(self, _reason: str) -> None:
        if self._failure is not None:  # Not earlier: parts fail when a process exits.
            _log.error("a part of the link failed", exc_info=self._failure)
        self._ended.set()

    # The LinkHandler of the agent.

    def hello(self) -> Hello:
        """Return this rank's state; a generation that is not staged yet is dropped."""
        if self._stager is not None:
            self._stager.drop_unfinished()
        contents, staged = used_and_staged(self._seat.held, self._seat)
        if self._hashed.layout is contents.layout:
            contents = self._hashed
        return hello_of(
            self._seat,
            contents,
            settings=self._settings,
            boot_id=self._boot_id,
            address=self._port.address,
            staged_generation=staged,
        )

    def heartbeat(self, sequence: int) -> Heartbeat:
        """Return this rank's heartbeat."""
        contents, staged = used_and_staged(self._seat.held, self._seat)
        return Heartbeat(
            epoch=self._seat.epoch,
            generation=contents.layout.generation,
            layout_digest=contents.layout.digest(),
            staged_generation=staged,
            sequence=sequence,
            idle=self._seat.idle_s > IDLE_AFTER_S,
            weights_version=self._seat.weights_version,
        )

    def running(self) -> Layout:
        """Return the layout in use."""
        return self._seat.held.contents.layout

    def receive(self, message: BalancerMessage) -> None:
        """Handle a message of the leading balancer."""
        if isinstance(message, JoinEpoch | Stage):
            self._seat.note_number(max(message.epoch, message.layout.generation))
        match message:
            case JoinEpoch():
                self._rejection = ""
                self._join(message)
            case Stage() if self._settings.mode is Mode.OBSERVE:
                self._reject(message.layout.generation, "EQUIPOISE_MODE is observe")
            case Stage() if self._seat.weights_version != self._seat.hashed_weights:
                reason = "its weights were updated: they are being hashed"
                self._reject(message.layout.generation, reason)
            case Stage() if self._stager:
                self._stager.stage(message)
            case Abort() if self._stager:
                _log.info("generation %d is aborted: %s", message.generation, message.reason)
                self._stager.abort(message)
            case Rejection():
                if message.reason != self._rejection:  # It is repeated at each attempt.
                    _log.warning("the balancer rejects this rank: %s", message.reason)
                self._rejection = message.reason
            case _:
                _log.warning("ignored a %s: this rank has not joined", type(message).__name__)

    def message_dropped(self, message: worker_link_pb2.ConnectResponse, reason: str) -> None:
        """Reject a dropped Stage, so that its rollout need not wait for a timeout."""
        if message.HasField("stage"):
            stage = message.stage
            self._reject(stage.change.generation or stage.layout.generation, reason)

    def _reject(self, generation: int, reason: str) -> None:
        epoch, rank = self._seat.epoch, self._seat.rank
        self._outbox.send(
            LayoutRejected(epoch=epoch, rank=rank, generation=generation, reason=reason)
        )

    def _join(self, join_epoch: JoinEpoch) -> None:
        """Take the peers of the epoch that the engine's group is; no other can be joined."""
        seat = self._seat
        if (join_epoch.epoch, join_epoch.rank) != (seat.epoch, seat.rank):
            reason = (
                f"rank {seat.rank} of an engine stays in epoch {seat.epoch}: its group is fixed; "
                "restart the engine if ranks of it are lost"
            )
            _log.error("cannot join epoch %d: %s", join_epoch.epoch, reason)
            self._reject(join_epoch.layout.generation, reason)
            return
        if self._joined is not None:
            return
        self._joined = join_epoch
        puller = self._puller = ExpertPuller(
            join_epoch,
            pool=self._settings.pool,
            held=seat.held,
            read_checkpoint=no_checkpoint,
            checksums=seat.table,
            expert_bytes=seat.model.shape.expert_bytes,
            credentials=self._port.credentials,
            waits=self._waits,
        )
        self._stager = Stager(
            engine=seat,
            held=seat.held,
            puller=puller,
            epoch=seat.epoch,
            send=self._outbox.send,
            spans=NoSpans(),
        )
        reporter = Reporter(
            join_epoch,
            engine=seat,
            boot_id=self._boot_id,
            phase=Phase.MIXED,
            send=self._outbox.send,
            waits=self._waits,
        )
        self._epoch_tasks.append(self._spawn(reporter.run()))

    async def _scrub(self) -> None:
        """Look for slots that hold other bytes than they were filled with, until one does."""
        seat, table = self._seat, self._seat.table
        try:
            await self._scrubber.run()
        except DamagedSlotError as error:
            if seat.table is not table or seat.weights_version != seat.hashed_weights:
                return  # By an update that the ranks know: slots are verified in its epoch again.
            what, _, _ = str(error).partition(";")  # Memory is damaged if no update explains it.
            _log.warning("hashing all slots again, on all ranks: %s", what)
            seat.note_changed_slots()

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Stop balancing, on all ranks together, if a part of this link has failed."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._seat.leave(_lost(self._seat.rank, error))


def _lost(rank: int, error: BaseException) -> str:
    return f"rank {rank} lost its link for good: {type(error).__name__}: {error}"
