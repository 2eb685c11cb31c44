"""`Demand`: how much a pool's ranks have to do, by the minute, and how many ranks that takes."""

from collections import deque

from equipoise.planning.layout import Layout
from equipoise.planning.phase import Phase
from equipoise.planning.ratio import MAX_MINUTES, RanksAdvice, RankUse, Use, advise, use_between
from equipoise.wire.messages import RankStats, Report

MINUTE_S = 60.0


class Demand:
    """Use of a prefill or decode pool's ranks in one epoch; all experts need `least_ranks`."""

    def __init__(self, *, least_ranks: int, now: float) -> None:
        self._least_ranks = least_ranks
        self._latest: dict[int, RankUse] = {}
        self._minutes: deque[Use] = deque(maxlen=MAX_MINUTES)
        self._open, self._opened_s = Use(), now
        self.advice: RanksAdvice | None = None
        """How many ranks the pool should have; None before the first minute and in mixed pools."""

    def accept(self, report: Report, layout: Layout, *, now: float) -> None:
        """Count a rank's report; advise again when a minute is over.

        Ranks that do not report their request slots and their cache are not counted.
        """
        load, stats = report.load, report.stats
        if load.phase is Phase.MIXED or not (stats.max_requests and stats.cache_tokens):
            return
        use = _use(stats, boot_id=load.boot_id, now=now)
        before = self._latest.get(load.rank)
        self._latest[load.rank] = use
        if before is not None:
            self._open = self._open.plus(use_between(before, use))
        if now < self._opened_s + MINUTE_S or not self._open.rank_s:
            return
        self._minutes.append(self._open)
        self._open, self._opened_s = Use(), now
        self.advice = advise(
            tuple(self._minutes),
            phase=load.phase,
            num_ranks=layout.num_ranks,
            least_ranks=self._least_ranks,
            before=0 if self.advice is None else self.advice.ranks,
        )


def _use(stats: RankStats, *, boot_id: str, now: float) -> RankUse:
    return RankUse(
        time_s=now,
        boot_id=boot_id,
        processed=stats.tokens_processed,
        cached=stats.prefix_tokens_found,
        pending=stats.pending_prompt_tokens,
        slots=(stats.active_requests + stats.queued_requests) / stats.max_requests,
        cache=stats.cache_tokens_used / stats.cache_tokens,
    )
