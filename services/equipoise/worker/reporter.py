"""`Reporter`: tells the balancer, at an interval, what this rank's slots received.

Counters are cumulative, so nothing is kept, repeated or made up for when a report is lost.
"""

import asyncio
from collections.abc import Callable

import numpy as np

from equipoise.planning.load import LoadReport, Phase
from equipoise.wire.messages import Report
from equipoise.worker.engine import Engine, Progress


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
    ) -> None:
        self._engine = engine
        self._boot_id = boot_id
        self._epoch = epoch
        self._rank = rank
        self._interval_s = interval_s
        self._send = send

    async def run(self) -> None:
        """Report at every interval until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            for report in self.reports(self._engine.progress()):
                self._send(report)

    def reports(self, progress: Progress) -> list[Report]:
        """Reports of the generation before, which are final, and of this one, in this order."""
        return [
            Report(
                load=LoadReport(
                    boot_id=self._boot_id,
                    epoch=self._epoch,
                    rank=self._rank,
                    generation=load.generation,
                    # Prompts and generated tokens share steps here, so their loads are one.
                    phase=Phase.MIXED,
                    tokens=load.rows_LS.astype(np.uint64),
                ),
                stats=progress.stats,
            )
            for load in reversed(progress.loads)
        ]
