"""`Scheduler`: which tokens of which requests run in the next step. Pure: no torch, clock, threads.

Continuous batching with chunked prefill: every request that generates runs its newest token in
every step, with drafts behind it if there are any, and what is left of the token budget goes to
those that read: prompts, and requests that were paused. Admission and reading are first come, first
served, so nothing starves.

A request that is admitted holds blocks of the latent cache for what it has run. When blocks run
out, the youngest one is paused: it gives its blocks back, stands first in line, and later reads
what it had again, its own tokens included. The oldest is never paused, so all come to their end.
"""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from equipoise.worker.blocks import BlockPool, found_blocks
from equipoise.worker.errors import QueueFullError
from equipoise.worker.sequence import Emission, FinishReason, Request, Sequence, StepPlan
from equipoise_model.sampling_params import SampledToken


@dataclass(slots=True, kw_only=True)
class SchedulerCounts:
    """What was done since this worker started; all only grow.

    `processed` are tokens that were run, of prompts and generated, drafts that failed left out.
    `found` of the `sought` tokens of admitted requests were in the cache already. `accepted` of the
    `drafted` tokens came true. `paused` counts each time that a request was.
    """

    processed: int = 0
    generated: int = 0
    sought: int = 0
    found: int = 0
    drafted: int = 0
    accepted: int = 0
    paused: int = 0


class Scheduler:
    """Requests of one worker, waiting and active; it outlives the epochs that serve them.

    What a plan left undone when a group broke is planned again: the same tokens at the same
    positions overwrite whatever the broken step left in the cache.

    At most `max_requests` are active, `max_queued` more wait in line, and `max_step_tokens` tokens
    run in a step, which must cover the newest token and `num_drafts` drafts of every request. While
    more than `max_drafting` are active (never, unless given), there are no drafts.
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
    ) -> None:
        self._max_drafting = max_requests if max_drafting is None else max_drafting
        assert max_requests >= 1
        assert max_step_tokens >= max_requests
        assert max_step_tokens >= min(max_requests, self._max_drafting) * (1 + num_drafts)
        self.blocks = blocks
        self.counts = SchedulerCounts()
        self._max_requests = max_requests
        self._max_queued = max_queued
        self._max_step_tokens = max_step_tokens
        self._num_drafts = num_drafts
        self._queue: deque[Sequence] = deque()
        # In the order of arrival: who is paused is the last, and becomes the first in line.
        self._active: dict[int, Sequence] = {}
        self._suspect_blocks: list[int] = []

    @property
    def num_active(self) -> int:
        """Requests that are being generated."""
        return len(self._active)

    @property
    def num_queued(self) -> int:
        """Requests in line."""
        return len(self._queue)

    @property
    def is_drafting(self) -> bool:
        """Whether tokens are guessed; not if so many requests are active that it costs time."""
        return self._num_drafts > 0 and len(self._active) <= self._max_drafting

    def submit(self, request: Request) -> None:
        """Take a request in line; the cache has room for it when it is alone.

        Raises:
            QueueFullError: as many as may be are active, and the line is full.
        """
        assert request.prompt
        assert request.max_tokens >= 1
        assert request.num_replayed < len(request.prompt)
        longest = len(request.prompt) + request.max_tokens
        assert self.blocks.blocks_for(longest) <= self.blocks.num_blocks
        # Requests that the next plan will admit do not stand in line.
        num_free = self._max_requests - len(self._active)
        if len(self._queue) >= self._max_queued + num_free:
            raise QueueFullError(
                f"{len(self._active)} requests are being served and {len(self._queue)} wait, "
                f"which is this worker's bound: try again later or ask another worker"
            )
        self._queue.append(Sequence(request=request))

    def cancel(self, key: int) -> bool:
        """Forget a request and free its blocks; False when it is not known (any more)."""
        if key in self._active:
            self._active.pop(key).pause()
            return True
        for waiting in self._queue:
            if waiting.request.key == key:
                self._queue.remove(waiting)
                return True
        return False

    def plan(self) -> StepPlan:
        """Admit and pause whom blocks allow or force, and choose the tokens of the next step.

        Changes nothing but that: a plan that is not committed is planned again.
        """
        self._admit()
        wanted = self._wanted()
        self._provide(wanted)
        return StepPlan(
            chunks=tuple(
                self._active[key].chunk(num_tokens=num_tokens, num_ahead=self._num_drafts)
                for key, num_tokens in wanted.items()
                if key in self._active
            ),
            drafts=self.is_drafting,
        )

    def commit(
        self,
        plan: StepPlan,
        sampled: Tokens[SampledToken],
        drafts: Mapping[int, tuple[int, ...]] | None = None,
    ) -> list[Emission]:
        """Record that a plan has run, and what is guessed to follow.

        `sampled` has the tokens of the sampling chunks, in order, also those behind drafts that
        failed; `drafts` are by request. Requests that were cancelled while the step ran are passed
        over.
        """
        tokens = iter(sampled)
        emissions = []
        for chunk in plan.chunks:
            standing = chunk.accepted([next(tokens) for _ in chunk.sampling])
            num_accepted = max(0, len(standing) - 1)
            self.counts.processed += len(chunk.known) + num_accepted
            self.counts.drafted += len(chunk.drafts)
            self.counts.accepted += num_accepted
            sequence = self._active.get(chunk.key)
            if sequence is None:
                continue
            told = sequence.take(chunk, standing)
            emissions += told
            if told and told[-1].finish is not None:
                if told[-1].finish is FinishReason.FAILED:
                    self._suspect_blocks += sequence.forget_blocks()
                self._active.pop(chunk.key).pause()
            elif drafts is not None:
                sequence.drafts = drafts.get(chunk.key, ())[: self._num_drafts]
        self.counts.generated += sum(not one.sampled.fault for one in emissions)
        return emissions

    def take_suspect_blocks(self) -> list[int]:
        """Blocks that requests left whose rows failed; clear them before the next step."""
        blocks, self._suspect_blocks = self._suspect_blocks, []
        return blocks

    def clear(self) -> list[int]:
        """Forget every request, active and waiting, and return their keys."""
        keys = [*self._active, *(waiting.request.key for waiting in self._queue)]
        for sequence in self._active.values():
            sequence.pause()
        self._active.clear()
        self._queue.clear()
        return keys

    def _admit(self) -> None:
        """Take from the line, first come, first served, who will find blocks for all it has."""
        while self._queue and len(self._active) < self._max_requests:
            waiting = self._queue[0]
            found = [block for _, block in found_blocks(self.blocks, waiting.tokens)]
            missing = self.blocks.blocks_for(len(waiting.tokens)) - len(found)
            missing += self.blocks.count_idle(found)
            if self._active and missing > self.blocks.num_available - self._num_promised():
                return
            self._active[waiting.request.key] = self._queue.popleft()
            self.counts.sought += len(waiting.tokens)
            self.counts.found += waiting.begin(self.blocks)

    def _num_promised(self) -> int:
        """Blocks that the active ones will take for what they have, and one more for each."""
        return sum(
            self.blocks.blocks_for(len(one.tokens)) + 1 - len(one.blocks)
            for one in self._active.values()
        )

    def _wanted(self) -> dict[int, int]:
        """Tokens that each active request would run, drafts among them, in the order of arrival."""
        num_tokens = {}
        budget = self._max_step_tokens
        most_drafts = self._num_drafts if self.is_drafting else 0
        for key, sequence in self._active.items():
            if sequence.is_generating:
                num_drafts = min(len(sequence.drafts), sequence.num_left - 1, most_drafts)
                num_tokens[key] = 1 + num_drafts
                budget -= num_tokens[key]
        for key, sequence in self._active.items():
            if not sequence.is_generating and budget > 0:
                num_tokens[key] = min(budget, sequence.num_pending)
                budget -= num_tokens[key]
        return {key: num_tokens[key] for key in self._active if key in num_tokens}

    def _provide(self, wanted: Mapping[int, int]) -> None:
        """Give blocks to all that will run, the oldest first, and pause the youngest for them."""
        for key, num_tokens in wanted.items():
            sequence = self._active.get(key)
            while sequence is not None and not sequence.grow(num_tokens):
                _, youngest = self._active.popitem()
                youngest.pause()
                self._queue.appendleft(youngest)
                self.counts.paused += 1
                sequence = self._active.get(key)
