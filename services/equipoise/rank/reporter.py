"""`Reporter`: sends this rank's load counters to the balancer at an interval.

Counters are cumulative, so a lost report needs no retry.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from equipoise.planning.counters import LoadReport
from equipoise.planning.phase import Phase
from equipoise.rank.engine import EngineProgress, SwitchingEngine
from equipoise.rank.waits import Waits
from equipoise.wire.balancer_messages import JoinEpoch
from equipoise.wire.messages import Report

FINAL_REPORTS = 3
"""How often a generation's final counters are sent after a switch, or after they still changed."""


class Reporter:
    """Sends the reports of one rank of an epoch; used from the event loop only."""

    def __init__(
        self,
        join_epoch: JoinEpoch,
        *,
        engine: SwitchingEngine,
        boot_id: str,
        phase: Phase,
        send: Callable[[Report], object],
        waits: Waits,
    ) -> None:
        self._epoch = join_epoch.epoch
        self._rank = join_epoch.rank
        self._interval_s = join_epoch.report_interval_s
        self._engine = engine
        self._boot_id = boot_id
        self._phase = phase
        self._send = send
        self._waits = waits
        # By ended generation: its assignments, and how often they are still to be sent.
        self._finals: dict[int, tuple[int, int]] = {}

    async def run(self) -> None:
        """Send reports at every interval until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            self.send_now()

    def send_now(self) -> None:
        """Send the reports that are due at the next interval."""
        for report in self.build(self._engine.progress()):
            self._send(report)

    def build(self, progress: EngineProgress) -> list[Report]:
        """Return the current generation's report, then the final ones of ended generations.

        A window may close between them. All tell the rank's steps, so the first one must have what
        was counted in these; the others rarely have anything new. They stop after `FINAL_REPORTS`:
        a restarted balancer no longer knows these layouts and would reject the reports forever.
        Engines add up their last counts after the switch.
        """
        current, *ended = progress.loads
        known, self._finals = self._finals, {}
        finals = []
        for load in ended:
            before, left = known.get(load.generation, (-1, 0))
            assignments = int(load.slot_load_LS.sum())
            if assignments != before:
                left = FINAL_REPORTS
            if left:
                finals.append(load)
            self._finals[load.generation] = (assignments, max(0, left - 1))
        stats = replace(progress.stats, timeouts=self._waits.all())
        return [
            Report(
                load=LoadReport(
                    boot_id=self._boot_id,
                    epoch=self._epoch,
                    rank=self._rank,
                    generation=load.generation,
                    # Of all steps: prompt and generated tokens share them, so their loads are one.
                    phase=self._phase,
                    assignments=load.slot_load_LS.astype(np.uint64),
                ),
                stats=stats,
            )
            for load in (current, *finals)
        ]
