"""`Scheduler`: which tokens of which requests run in the next step. Pure: no torch, clock, threads.

Continuous batching with chunked prefill: every generating request runs its newest token in every
step, followed by its drafts. The rest of the token budget prefills prompts and preempted requests.
Admission and prefill are first come, first served, so nothing starves. A request whose latents are
fetched from another pool is queued meanwhile: it takes blocks for them as soon as those ahead of it
leave room, and others may be admitted before it until all have arrived.

An admitted request holds blocks of the latent cache for the tokens it has run. When blocks run out,
the youngest request is preempted: it releases its blocks, moves to the front of the queue, and
later runs its prompt and output again. The oldest is never preempted, so every request finishes.
Blocks of pulls give way first, and those held for other pools last.

A step writes to the blocks of its plan until it is committed or planned again. A request cancelled
meanwhile keeps its blocks that long, or a pull could fill a block that the step then overwrites.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from itertools import dropwhile, islice, takewhile

from equipoise.worker.blocks import BlockPool, found_blocks
from equipoise.worker.errors import QueueFullError
from equipoise.worker.latents.holds import HoldLedger
from equipoise.worker.latents.pulls import Pull, Pulls
from equipoise.worker.sequence import Emission, PrefillWork, Request, Sequence, StepPlan
from equipoise_model.sampling_params import MAX_SCORED_ROWS, SampledToken


@dataclass(slots=True, kw_only=True)
class SchedulerCounts:
    """Counts since this worker started."""

    processed: int = 0
    """Tokens run, of prompts and outputs, without rejected drafts."""

    generated: int = 0
    """Tokens generated."""

    sought: int = 0
    """Tokens of admitted requests, looked up in the prefix cache."""

    found: int = 0
    """Those of them that were cached."""

    drafted: int = 0
    """Draft tokens run."""

    accepted: int = 0
    """Those of them that were right."""

    preempted: int = 0
    """Times a request was preempted."""

    prefilled_own: int = 0
    """Tokens of admitted requests that no other pool has prefilled, without cached ones."""

    prefilled_tail: int = 0
    """Tokens of handed-over requests behind their last full block."""

    prefilled_missing: int = 0
    """Tokens in full blocks of handed-over requests that were not fetched."""

    handed_over: int = 0
    """Admitted requests that another pool had prefilled."""

    handed_over_tokens: int = 0
    """Tokens in their full blocks."""


class Scheduler:
    """Requests of one worker, queued and active, across epochs.

    If a group fails before a plan is committed, the same tokens are planned again, drafts included:
    at the same positions they overwrite whatever the broken step left in the cache.

    At most `max_requests` are active and `max_queued` more wait. A step runs at most
    `max_step_tokens` tokens, which must cover the newest token and `num_drafts` drafts of every
    request. While more than `max_drafting` requests are active (default: no limit), nothing is
    drafted.
    """

    def __init__(
        self,
        *,
        blocks: BlockPool,
        max_requests: int,
        max_queued: int,
        max_step_tokens: int,
        num_drafts: int = 0,
        max_drafting: int | None = None,
        hold_s: float = 30.0,
    ) -> None:
        self._max_drafting = max_requests if max_drafting is None else max_drafting
        assert max_requests >= 1
        assert max_step_tokens >= max_requests
        assert max_step_tokens >= min(max_requests, self._max_drafting) * (1 + num_drafts)
        self.blocks = blocks
        self.counts = SchedulerCounts()
        self.holds = HoldLedger(blocks, hold_s=hold_s)
        """Blocks of finished requests, held for ranks of another pool."""
        self.pulls = Pulls(blocks)
        """Blocks of requests whose latents are fetched from another pool."""
        self.max_requests = max_requests
        self._max_queued = max_queued
        self._max_step_tokens = max_step_tokens
        self._num_drafts = num_drafts
        self._queue: deque[Sequence] = deque()
        # In the order of arrival: the last one is preempted first, and is requeued at the front.
        self._active: dict[int, Sequence] = {}
        # Numbers of drafts in the plan that may be running, by request, and its requests that were
        # cancelled since.
        self._in_step: dict[int, int] = {}
        self._cancelled: dict[int, Sequence] = {}

    @property
    def num_active(self) -> int:
        """Active requests."""
        return len(self._active)

    @property
    def num_queued(self) -> int:
        """Queued requests."""
        return len(self._queue)

    def prefill_work(self) -> PrefillWork:
        """What is left to prefill of all prompts, active and queued."""
        works = [
            one.prefill_work(
                block_tokens=self.blocks.block_tokens,
                num_pulled=self.pulls.num_blocks(one.request.key),
            )
            for one in (*self._active.values(), *self._queue)
        ]
        return PrefillWork(
            tokens=sum(one.tokens for one in works), pairs=sum(one.pairs for one in works)
        )

    @property
    def is_drafting(self) -> bool:
        """Whether to draft tokens; not when drafting for all active requests would cost time."""
        return self._num_drafts > 0 and len(self._active) <= self._max_drafting

    def submit(self, request: Request) -> None:
        """Queue a request, which must fit in the cache when it is alone.

        Raises:
            QueueFullError: the queue is full.
        """
        assert request.prompt
        assert request.max_tokens >= 1
        assert request.num_replayed < len(request.prompt)
        longest = len(request.prompt) + request.max_tokens
        assert self.blocks.blocks_for(longest) <= self.blocks.num_blocks
        self.check_room()
        self._queue.append(Sequence(request=request, is_fetching=request.is_handed_over))

    def check_room(self) -> None:
        """Raise QueueFullError if the queue is full."""
        # Requests that the next plan will admit do not count as queued.
        num_free = self.max_requests - len(self._active)
        if len(self._queue) >= self._max_queued + num_free:
            raise QueueFullError(
                f"{len(self._active)} requests are active and {len(self._queue)} queued, which is "
                f"this worker's limit: try again later or use another worker"
            )

    def cancel(self, key: int) -> bool:
        """Remove a request and free its blocks, after its step; False if it is unknown."""
        self.pulls.end(key)
        if key in self._active:
            sequence = self._active.pop(key)
            if key in self._in_step:
                self._cancelled[key] = sequence
            else:
                sequence.preempt()
            return True
        waiting = self._queued(key)
        if waiting is None:
            return False
        self._queue.remove(waiting)
        return True

    def is_waiting(self, key: int) -> bool:
        """Whether a request is queued, or its prompt has not run yet."""
        if key in self._active:
            return not self._active[key].is_generating
        return self._queued(key) is not None

    def begin_pull(self, key: int) -> Pull | None:
        """Take blocks for the latents of a queued request; None while there is no room for it."""
        waiting = self._queued(key)
        if waiting is None or not self._has_room(waiting):
            return None
        return self.pulls.begin(key, waiting.tokens)

    def end_pull(self, key: int) -> None:
        """No more latents arrive for a request: what is missing is prefilled."""
        self.pulls.stop(key)
        waiting = self._queued(key)
        if waiting is not None:
            waiting.is_fetching = False

    def _queued(self, key: int) -> Sequence | None:
        return next((one for one in self._queue if one.request.key == key), None)

    def plan(self, *, now: float = 0.0) -> StepPlan:
        """Admit and preempt requests as blocks allow, and choose the tokens of the next step.

        A plan that is not committed is planned again. Holds that are over at `now` end.
        """
        broken = self._in_step
        self._end_step()
        self.holds.expire(now)
        self._admit()
        wanted = self._wanted(broken)
        self._provide(wanted)
        chunks = tuple(
            self._active[key].chunk(num_tokens=num_tokens, num_ahead=self._num_drafts)
            for key, num_tokens in wanted.items()
            if key in self._active
        )
        self._in_step = {chunk.key: len(chunk.drafts) for chunk in chunks}
        return StepPlan(chunks=chunks, drafts=self.is_drafting)

    def commit(
        self,
        plan: StepPlan,
        sampled: Tokens[SampledToken],
        drafts: Mapping[int, tuple[int, ...]] | None = None,
        *,
        scores: Tokens[SampledToken] = (),
        now: float = 0.0,
    ) -> list[Emission]:
        """Record that a plan has run, and the drafts for the next one.

        `sampled` has the samples of all chunks in order, including those after rejected drafts;
        `scores` those of the prompts' scored tokens. `drafts` are by request. Requests that were
        cancelled during the step are skipped.
        """
        tokens, scored = iter(sampled), iter(scores)
        emissions = []
        for chunk in plan.chunks:
            of_prompt = [next(scored) for _ in chunk.scored]
            accepted = chunk.accepted([next(tokens) for _ in chunk.sampling])
            num_accepted = max(0, len(accepted) - 1)
            self.counts.processed += len(chunk.known) + num_accepted
            self.counts.drafted += len(chunk.drafts)
            self.counts.accepted += num_accepted
            sequence = self._active.get(chunk.key)
            if sequence is None:
                if any(one.fault for one in (*of_prompt, *accepted)):
                    self._cancelled[chunk.key].forget_blocks()
                continue
            emitted = sequence.take(chunk, accepted, of_prompt)
            if emitted and emitted[-1].is_last:
                if emitted[-1].sampled.fault:
                    sequence.forget_blocks()
                elif sequence.request.hold_latents:
                    emitted[-1] = self._hold(sequence, emitted[-1], now=now)
                self._active.pop(chunk.key).preempt()
            elif drafts is not None:
                sequence.drafts = drafts.get(chunk.key, ())[: self._num_drafts]
            emissions += emitted
        self._end_step()
        self.counts.generated += sum(not one.sampled.fault for one in emissions)
        return emissions

    def _end_step(self) -> None:
        """Nothing writes to the cache any more until the next plan runs."""
        self._in_step = {}
        while self._cancelled:
            self._cancelled.popitem()[1].preempt()

    def forget_latents(self) -> None:
        """Use no latents any more, here or in another pool: they may be wrong.

        Active requests run all their tokens again; no step of theirs may be running.
        """
        while self._active:
            _, youngest = self._active.popitem()
            youngest.preempt()
            self._queue.appendleft(youngest)
        self.blocks.forget_all()
        while self.holds.give_way():
            pass

    def _hold(self, sequence: Sequence, last: Emission, *, now: float) -> Emission:
        """Hold the full blocks of a request that has finished; returns its last token with that."""
        assert sequence.table is not None
        blocks = sequence.table.give_published()
        if not blocks:
            return last
        num_tokens = len(blocks) * self.blocks.block_tokens
        return replace(last, hold=self.holds.take(blocks, now=now), num_held_tokens=num_tokens)

    def _admit(self) -> None:
        """Activate queued requests in order while there are blocks for all their tokens."""
        while len(self._active) < self.max_requests:
            waiting = next((one for one in self._queue if not one.is_fetching), None)
            if waiting is None:
                return
            if not self._has_room(waiting):
                # Without active requests only holds, which end, and pulls can be in the way.
                behind = {one.request.key for one in self._after(waiting)}
                if not self._active and self.pulls.give_way(behind):
                    continue
                return
            key, is_first = waiting.request.key, waiting.num_cached is None
            self._queue.remove(waiting)
            self._active[key] = waiting
            num_found = waiting.begin(self.blocks)
            self._note_admitted(waiting, num_found=num_found, is_first=is_first)
            self.pulls.end(key)

    def _after(self, waiting: Sequence) -> Iterator[Sequence]:
        """Queued requests that arrived after one of them."""
        return islice(dropwhile(lambda one: one is not waiting, self._queue), 1, None)

    def _has_room(self, waiting: Sequence) -> bool:
        """Whether there are blocks for a queued request beside those ahead of it."""
        found = [
            block for _, block in found_blocks(self.blocks, waiting.keys_found_by(self.blocks))
        ]
        missing = self.blocks.blocks_for(len(waiting.tokens)) - len(found)
        missing += self.blocks.count_idle(found)
        for ahead in takewhile(lambda one: one is not waiting, self._queue):
            missing += self._num_needed(ahead) - self.pulls.num_blocks(ahead.request.key)
        return missing <= self.blocks.num_available - self._num_promised()

    def _note_admitted(self, admitted: Sequence, *, num_found: int, is_first: bool) -> None:
        num_tokens, size = len(admitted.tokens), self.blocks.block_tokens
        self.counts.sought += num_tokens
        self.counts.found += num_found
        if not is_first:
            return  # It resumes.
        if not admitted.request.is_handed_over:
            self.counts.prefilled_own += num_tokens - num_found
            return
        num_full = (num_tokens - 1) // size * size
        self.counts.handed_over += 1
        self.counts.handed_over_tokens += num_full
        self.counts.prefilled_tail += num_tokens - num_full
        self.counts.prefilled_missing += num_full - num_found

    def _num_promised(self) -> int:
        """Blocks that active requests still need for their tokens, and one more for each."""
        return sum(self._num_needed(one) - len(one.blocks) for one in self._active.values())

    def _num_needed(self, sequence: Sequence) -> int:
        """Blocks for a request's tokens, and one more for those that follow."""
        return self.blocks.blocks_for(len(sequence.tokens)) + 1

    def _wanted(self, broken: Mapping[int, int]) -> dict[int, int]:
        """Tokens that each active request would run, including drafts, in order of arrival.

        Those in a `broken` step have as many drafts as there: it may have left NaN in their place.
        That may leave no budget for requests that resume.
        """
        num_tokens = {}
        budget = self._max_step_tokens
        for key, sequence in self._active.items():
            if sequence.is_generating and budget:
                most = broken.get(key, self._num_drafts if self.is_drafting else 0)
                num_drafts = min(len(sequence.drafts), sequence.num_left - 1, most)
                num_tokens[key] = 1 + num_drafts
                budget -= num_tokens[key]
        score_budget = MAX_SCORED_ROWS
        for key, sequence in self._active.items():
            if not sequence.is_generating:
                most = min(budget, score_budget) if sequence.num_unscored else budget
                if most > 0:
                    num_tokens[key] = min(most, sequence.num_pending)
                    budget -= num_tokens[key]
                    score_budget -= num_tokens[key] if sequence.num_unscored else 0
        return {key: num_tokens[key] for key in self._active if key in num_tokens}

    def _provide(self, wanted: Mapping[int, int]) -> None:
        """Provide blocks for running requests, oldest first; preempt the youngest if needed."""
        for key, num_tokens in wanted.items():
            sequence = self._active.get(key)
            while sequence is not None and not sequence.grow(num_tokens):
                if self.pulls.give_way():
                    continue
                if len(self._active) == 1 and self.holds.give_way():
                    continue
                _, youngest = self._active.popitem()
                youngest.preempt()
                self._queue.appendleft(youngest)
                self.counts.preempted += 1
                sequence = self._active.get(key)
