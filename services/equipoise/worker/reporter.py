"""`Reporter`: tells the balancer, at an interval, what this rank's slots received.

Counters are cumulative, so nothing is kept, repeated or made up for when a report is lost.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from equipoise.planning.counters import LoadReport, Phase
from equipoise.wire.messages import Report
from equipoise.worker.engine import Engine, Progress
from equipoise.worker.waits import Waits

FINAL_REPORTS = 3
"""How often the final counters of a generation are told; then only those of the one that runs."""


class Reporter:
    """Sends reports of one rank of an epoch; used from the event loop only."""

    def __init__(
        self,
        *,
        engine: Engine,
        boot_id: str,
        epoch: int,
        rank: int,
        interval_s: float,
        send: Callable[[Report], None],
        waits: Waits | None = None,
    ) -> None:
        self._engine = engine
        self._boot_id = boot_id
        self._epoch = epoch
        self._rank = rank
        self._interval_s = interval_s
        self._send = send
        self._waits = waits or Waits()
        self._generation = 0
        self._finals_left = 0

    async def run(self) -> None:
        """Report at every interval until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            self.report()

    def report(self) -> None:
        """Report now."""
        for report in self.reports(self._engine.progress()):
            self._send(report)

    def reports(self, progress: Progress) -> list[Report]:
        """Reports of the generation before, which are final, and of this one, in this order.

        The final ones end after a few, because a balancer that starts anew knows that generation's
        layout no more and would refuse them for ever.
        """
        now, *before = progress.loads
        if now.generation != self._generation:
            self._generation, self._finals_left = now.generation, FINAL_REPORTS
        finals = before if self._finals_left > 0 else []
        self._finals_left -= 1
        stats = replace(progress.stats, bounds=self._waits.all())
        return [
            Report(
                load=LoadReport(
                    boot_id=self._boot_id,
                    epoch=self._epoch,
                    rank=self._rank,
                    generation=load.generation,
                    # Prompts and generated tokens share steps here, so their loads are one.
                    phase=Phase.MIXED,
                    assignments=load.rows_LS.astype(np.uint64),
                ),
                stats=stats,
            )
            for load in (*finals, now)
        ]
