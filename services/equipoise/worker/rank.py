"""`Rank`: a worker in one epoch: engine, and what serves it and reports of it.

Owns putting these together in order and taking them apart again. Decides nothing by itself.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from equipoise.telemetry.logs import about
from equipoise.trust.credentials import Credentials
from equipoise.wire.messages import (
    GroupLost,
    Heartbeat,
    JoinEpoch,
    Refused,
    Report,
    RunningState,
    Serving,
    Staged,
    Switched,
)
from equipoise.worker.stager import Stager, placement_of
from equipoise.worker.core import ModelCore, single_threaded
from equipoise.worker.engine import Engine, StepResult
from equipoise.worker.joining import Joined
from equipoise.worker.reporter import Reporter
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.settings import WorkerSettings
from equipoise.worker.spans import RankSpans
from equipoise.worker.timings import Timings
from equipoise.worker.transfer import ExpertPuller
from equipoise.worker.waits import Waits
from equipoise_model.device import use
from equipoise_model.dispatch import ExpertParallel

Say = Callable[[Report | Staged | Refused | Switched | Serving | GroupLost], None]
"""Tells the balancer; may drop what cannot be told now."""


_log = logging.getLogger(__name__)


class Rank:
    """A rank that serves. Used from the event loop; the engine has a thread of its own.

    `scheduler` has the worker's requests, `say` tells the balancer, `deliver` takes each step's
    result on the event loop, `timings` count how long things take, `waits` what took too long;
    `spans` tell of stages and switches.
    """

    def __init__(
        self,
        joined: Joined,
        *,
        core: ModelCore,
        settings: WorkerSettings,
        scheduler: Scheduler,
        boot_id: str,
        say: Say,
        deliver: Callable[[StepResult], None],
        timings: Timings,
        credentials: Credentials,
        waits: Waits,
        spans: RankSpans,
    ) -> None:
        join_epoch, held = joined.join_epoch, joined.held
        loop = asyncio.get_running_loop()
        self.join_epoch = join_epoch
        self.held = held
        self._group = joined.group
        self._say = say
        self._deliver = deliver
        self._timings = timings
        self._spans = spans
        self._last_switch: Switched | None = None
        self._device = core.device
        self._experts = _expert_parallel(joined, core)
        self._steps = core.operations.steps(joined.exchange)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self.engine = Engine(
            model=core.model,
            cache=core.cache,
            experts=self._experts,
            drafter=core.drafter(settings),
            held=held,
            group=joined.group,
            scheduler=scheduler,
            epoch=join_epoch.epoch,
            names=tuple(peer.worker for peer in join_epoch.peers),
            # One wake-up of the event loop per step, however many tokens it made.
            publish=lambda result: _call_soon(loop, self._receive, result),
            step_s=timings.step_s,
        )
        self._puller = ExpertPuller(
            checkpoint=core.checkpoint,
            held=held,
            epoch=join_epoch.epoch,
            rank=join_epoch.rank,
            peers=join_epoch.peers,
            expert_bytes=core.shape.expert_bytes,
            bytes_per_s=settings.pull_mib_per_s * 2**20,
            credentials=credentials,
            waits=waits,
        )
        self.stager = Stager(
            engine=self.engine,
            held=held,
            puller=self._puller,
            slots=core.slots,
            epoch=join_epoch.epoch,
            rank=join_epoch.rank,
            answer=say,
            spans=spans,
        )
        self._reporter = Reporter(
            engine=self.engine,
            boot_id=boot_id,
            epoch=join_epoch.epoch,
            rank=join_epoch.rank,
            interval_s=join_epoch.report_interval_s,
            send=say,
            waits=waits,
        )

    async def run(self) -> None:
        """Step until `leave`.

        Raises:
            GroupError: a peer failed, left or disagrees.
        """
        reports = asyncio.create_task(self._reporter.run())
        stepping = asyncio.get_running_loop().run_in_executor(self._thread, self._step)
        try:
            await asyncio.shield(stepping)
        finally:
            self.engine.leave()
            reports.cancel()
            await asyncio.wait([stepping, reports])
            await self.stager.close()
            await self._puller.close()
            self._thread.shutdown()

    def leave(self) -> None:
        """Tell the peers in the next header, and end `run` behind it."""
        self.engine.leave()

    def report(self) -> None:
        """Tell the balancer now what is due at the next interval."""
        self._reporter.report()

    def same_as(self, join_epoch: JoinEpoch) -> bool:
        """Whether a repeated JoinEpoch names the epoch and rank this already is."""
        mine = (self.join_epoch.epoch, self.join_epoch.rank)
        return mine == (join_epoch.epoch, join_epoch.rank)

    def state(self) -> RunningState:
        """What runs here: the truth for a balancer that comes back."""
        contents = self.held.contents
        return RunningState(
            epoch=self.join_epoch.epoch,
            rank=self.join_epoch.rank,
            staged_generation=self.engine.staged_generation,
            layout=contents.layout,
            checksums=contents.checksums,
            steps=self._steps,
        )

    def serving(self) -> Serving:
        """The message that this rank takes part in steps, and with what."""
        state = self.state()
        return Serving(
            epoch=state.epoch,
            rank=state.rank,
            generation=state.generation,
            checksums=state.checksums,
            steps=state.steps,
        )

    @property
    def num_corrupted(self) -> int:
        """Experts pulled in this epoch whose bytes failed their checksum."""
        return self._puller.num_corrupted

    @property
    def last_switch(self) -> Switched | None:
        """The message about the latest switch, if there was one."""
        return self._last_switch

    def heartbeat(self, sequence: int) -> Heartbeat:
        """Proof of life with what reconciliation needs."""
        return Heartbeat(
            epoch=self.join_epoch.epoch,
            generation=self.engine.generation,
            staged_generation=self.engine.staged_generation,
            sequence=sequence,
        )

    def _step(self) -> None:
        single_threaded()
        use(self._device)
        try:
            self.engine.run()
        finally:
            # Its memory is the other ranks' too: none of them steps in this group any more.
            self._experts.close()
            self._group.close()

    def _receive(self, result: StepResult) -> None:
        self._deliver(result)
        switch = result.switch
        if switch is not None:
            self._timings.stall_s.observe(switch.stall_us / 1e6)
            self._last_switch = Switched(
                epoch=self.join_epoch.epoch,
                rank=self.join_epoch.rank,
                generation=switch.generation,
                step=switch.step,
                stall_us=switch.stall_us,
                median_step_us=switch.median_step_us,
                checksums=switch.checksums,
            )
            self._say(self._last_switch)
            self._spans.switched(self._last_switch)
            _log.info(
                "generation %d runs from step %d on; the switch took %d us, a step takes %d us",
                switch.generation,
                switch.step,
                switch.stall_us,
                switch.median_step_us,
                extra=about(
                    epoch=self.join_epoch.epoch,
                    rank=self.join_epoch.rank,
                    generation=switch.generation,
                ),
            )


def _expert_parallel(joined: Joined, core: ModelCore) -> ExpertParallel:
    placement = placement_of(joined.join_epoch.layout).to(core.device)
    process_group = joined.group.process_group
    if process_group is None:
        return ExpertParallel.local(core.checkpoint.config, placement)
    return ExpertParallel.distributed(placement, group=process_group, exchange=joined.exchange)


def _call_soon(
    loop: asyncio.AbstractEventLoop, receive: Callable[[StepResult], None], result: StepResult
) -> None:
    """Hand a step over; a loop that is closing has nobody left to take it."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(receive, result)
