"""`Rank`: a worker in one epoch: the engine, and what stages for it and reports about it.

It assembles these parts and takes them down in order; it makes no decisions.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from equipoise.planning.phase import Phase
from equipoise.rank.engine import used_and_staged
from equipoise.rank.errors import DamagedSlotError, NotHeldError
from equipoise.rank.header import Leaving
from equipoise.rank.reporter import Reporter
from equipoise.rank.scrubber import Scrubber
from equipoise.rank.stager import Stager
from equipoise.telemetry.logs import about
from equipoise.wire.messages import Heartbeat, RunningState, Serving, Switched
from equipoise.worker.core import ModelCore, single_threaded
from equipoise.worker.engine import Engine, StepResult
from equipoise.worker.joining import EpochGroup, nodes_of
from equipoise.worker.parts import WorkerParts
from equipoise.worker.placement import placement_of
from equipoise.worker.settings import ReplicaChoice
from equipoise_model.device import use
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.overlap import Order

_log = logging.getLogger(__name__)


class Rank:
    """A rank that serves. Used from the event loop; the engine has a thread of its own."""

    def __init__(
        self, joined: EpochGroup, parts: WorkerParts, *, scrubber: Scrubber | None
    ) -> None:
        """`scrubber` re-verifies the held slots; None if that is turned off."""
        join_epoch, core, settings = joined.join_epoch, parts.core, parts.settings
        self._loop = asyncio.get_running_loop()
        self.join_epoch = join_epoch
        self.held = joined.held
        self._parts = parts
        self._group = joined.group
        self.last_switch: Switched | None = None
        """The message about the latest switch, once its slots are hashed; None before one."""
        self._hashed = self.held.contents
        self._reporting: asyncio.Task[None] | None = None
        self._experts = _expert_parallel(joined, core, phase=settings.phase)
        self._steps = core.operations.steps(joined.exchange)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self.engine = Engine(
            core=core,
            experts=self._experts,
            held=self.held,
            group=joined.group,
            scheduler=parts.scheduler,
            publish=self._publish,
            step_s=parts.timings.step_s,
            drafter=core.drafter(settings),
            prefill_cost=parts.timings.prefill_cost,
            cut_from_tokens=settings.cut_from_tokens if settings.micro_batches > 1 else 0,
            hops=settings.hops,
            wants_balance=settings.replica_choice is ReplicaChoice.BALANCED,
            after_turn=parts.profiler.note_turn,
        )
        bytes_per_s = settings.pull_mib_per_s * 2**20
        self.puller = parts.puller(join_epoch, held=self.held, bytes_per_s=bytes_per_s)
        self.stager = Stager(
            engine=self.engine,
            held=self.held,
            puller=self.puller,
            epoch=join_epoch.epoch,
            send=parts.send,
            spans=parts.spans,
            num_places=settings.places,
        )
        self.scrubber = scrubber
        self.reporter = Reporter(
            join_epoch,
            engine=self.engine,
            boot_id=parts.boot_id,
            phase=settings.phase,
            send=parts.send,
            waits=parts.waits,
        )

    async def run(self) -> None:
        """Step until the engine leaves.

        Raises:
            GroupError: a peer failed, left or disagrees.
            DamagedSlotError: a slot no longer holds its expert; the balancer was sent what it
                holds, so that it quarantines this process by name.
        """
        reports = asyncio.create_task(self.reporter.run())
        scrubbing = asyncio.create_task(self._scrub())
        stepping = asyncio.get_running_loop().run_in_executor(self._thread, self._step)
        try:
            done, _ = await asyncio.wait(
                {stepping, scrubbing, reports}, return_when=asyncio.FIRST_COMPLETED
            )
            while done:
                await done.pop()
        except DamagedSlotError:
            self.engine.leave(Leaving.DAMAGED)
            raise
        finally:
            self.engine.leave()
            reports.cancel()
            scrubbing.cancel()
            if self._reporting is not None:
                self._reporting.cancel()
            # Collects their exceptions, too: at a stop, peers that leave end this rank's last step.
            await asyncio.gather(stepping, reports, scrubbing, return_exceptions=True)
            await self.stager.close()
            await self.puller.close()
            self._thread.shutdown()
            # An error's traceback refers to this frame: through them, its group would live on.
            del stepping

    def state(self) -> RunningState:
        """Return what this rank runs, for a balancer that reconnects."""
        contents, staged = used_and_staged(self.held, self.engine)
        if self._hashed.layout is contents.layout:
            contents = self._hashed
        return RunningState(
            epoch=self.join_epoch.epoch,
            rank=self.join_epoch.rank,
            workers=tuple(peer.worker for peer in self.join_epoch.peers),
            staged_generation=staged,
            layout=contents.layout,
            checksums=contents.checksums,
            steps=self._steps,
            # All ranks have the same; one that sends them is enough.
            expert_checksums=None if self.join_epoch.rank else self._parts.core.payload_checksums,
        )

    def serving(self) -> Serving:
        """Return the Serving message."""
        state = self.state()
        return Serving(
            epoch=state.epoch,
            rank=state.rank,
            generation=state.generation,
            checksums=state.checksums,
            steps=state.steps,
            layout_digest=state.layout.digest(),
            expert_checksums=state.expert_checksums,
        )

    def heartbeat(self, sequence: int) -> Heartbeat:
        """Return a heartbeat with the generations that the balancer reconciles with."""
        contents, staged = used_and_staged(self.held, self.engine)
        return Heartbeat(
            epoch=self.join_epoch.epoch,
            generation=contents.layout.generation,
            layout_digest=contents.layout.digest(),
            staged_generation=staged,
            sequence=sequence,
        )

    async def _scrub(self) -> None:
        """Verify held slots until one is damaged; for ever if that is turned off."""
        if self.scrubber is None:
            await asyncio.Event().wait()
            return
        try:
            await self.scrubber.run()
        except DamagedSlotError as error:
            self._parts.send(replace(self.serving(), checksums=error.checksums))
            raise

    def _step(self) -> None:
        single_threaded()
        use(self._parts.core.device)
        try:
            self.engine.run()
        finally:
            self._parts.profiler.close()
            # The other ranks share its memory; none of them steps in this group now.
            self._experts.close()
            self._group.close()

    def _publish(self, result: StepResult) -> None:
        """Wake the event loop once per step, however many tokens the step made."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive, result)

    def _receive(self, result: StepResult) -> None:
        self._parts.inference.deliver(result)
        if result.switch is not None:
            self._note_switch(result.switch)
        if result.rejected is not None:
            self.stager.reject(result.rejected)

    def _note_switch(self, switch: Switched) -> None:
        self._parts.timings.stall_s.observe(switch.stall_us / 1e6)
        self._parts.spans.switched(switch)
        _log.info(
            "switched to generation %d at step %d in %d us (median step %d us)",
            switch.generation,
            switch.step,
            switch.stall_us,
            switch.median_step_us,
            extra=about(epoch=switch.epoch, rank=switch.rank, generation=switch.generation),
        )
        if self._reporting is not None:
            self._reporting.cancel()  # Its slots are being replaced.
        self._reporting = asyncio.create_task(self._report_switch(switch))

    async def _report_switch(self, switch: Switched) -> None:
        """Report a switch with the checksums of what its slots hold; steps continue meanwhile."""
        before = self._hashed
        try:
            after = await asyncio.to_thread(self.held.hash_changed, before)
        except NotHeldError as error:
            _log.warning("generation %d is not reported: %s", switch.generation, error)
            return
        if after.layout.generation != switch.generation:
            return  # A later switch follows, which reports these slots too.
        self._hashed = after
        self.last_switch = replace(switch, checksums=after.checksums)
        self._parts.send(self.last_switch)


def _expert_parallel(joined: EpochGroup, core: ModelCore, *, phase: Phase) -> ExpertParallel:
    placement = placement_of(joined.join_epoch.layout).to(core.device)
    process_group = joined.group.process_group
    pace = core.pace_s_per_row
    if process_group is None:
        return ExpertParallel.local(core.checkpoint.config, placement, pace_s_per_row=pace)
    return ExpertParallel.distributed(
        placement,
        group=process_group,
        exchange=joined.exchange,
        pace_s_per_row=pace,
        # A pool's workers have one phase.
        order=Order.DECODE if phase is Phase.DECODE else Order.PREFILL,
        nodes=nodes_of(joined.join_epoch),
        sums_on_nodes=core.operations.sums_on_nodes,
    )
