"""`Scheduler`: which tokens of which requests run in the next step. Pure: no torch, clock, threads.

Continuous batching with chunked prefill: every request that generates runs one token in every
step, and what is left of the token budget goes to prompts, oldest first. A request holds a row of
the latent cache from its first chunk to its last token; others wait in line. Admission and prefill
are first come, first served, so nothing starves.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from equipoise.worker.errors import QueueFullError
from equipoise_model.sampling_params import SampledToken, SamplingParams, SamplingRow

GREEDY = SamplingParams(temperature=0)


class FinishReason(Enum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: at least one prompt token, at least one token to generate.

    `key` is unique on this worker. Generation ends after `max_tokens`, or with the first of
    `stop_tokens`, which is part of the output. The last `num_replayed` tokens of the prompt are
    output that another rank made: penalties count them as such.
    """

    key: int
    prompt: tuple[int, ...]
    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    sampling: SamplingParams = GREEDY
    num_replayed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive tokens of one request: `tokens[i]` stands at `start + i` in cache row `row`.

    If the last of them is the newest token known, its logits give the next, by `sampling`.
    """

    key: int
    row: int
    start: int
    tokens: tuple[int, ...]
    sampling: SamplingRow | None

    @property
    def samples(self) -> bool:
        """Whether this chunk gives a token."""
        return self.sampling is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The tokens of one step on this rank; may be empty."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens over all chunks."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """One generated token; `finish` is set on the last of its request."""

    key: int
    sampled: SampledToken
    finish: FinishReason | None

    @property
    def token(self) -> int:
        """The token itself."""
        return self.sampled.token


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """A request that holds a cache row: its tokens so far, and how many have run."""

    request: Request
    row: int
    tokens: list[int] = field(default_factory=list)
    num_run: int = 0

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_run


class Scheduler:
    """Requests of one worker, waiting and active; it outlives the epochs that serve them.

    What a plan left undone when a group broke is planned again: the same tokens at the same
    positions overwrite whatever the broken step left in the cache.

    `max_requests` cache rows, `max_queued` places in line beyond them, `max_step_tokens` tokens a
    step; the budget must cover a token for every row.
    """

    def __init__(self, *, max_requests: int, max_queued: int, max_step_tokens: int) -> None:
        assert max_step_tokens >= max_requests >= 1
        self._max_queued = max_queued
        self._max_step_tokens = max_step_tokens
        self._free_rows = list(range(max_requests))
        self._queue: deque[Request] = deque()
        self._active: dict[int, _Sequence] = {}
        self._num_processed = 0
        self._num_generated = 0

    @property
    def num_active(self) -> int:
        """Requests that hold a cache row."""
        return len(self._active)

    @property
    def row_use(self) -> float:
        """Rows of the cache that requests hold, of all: 0 to 1."""
        return len(self._active) / (len(self._active) + len(self._free_rows))

    @property
    def num_processed(self) -> int:
        """Tokens that were run, of prompts and generated, since this worker started."""
        return self._num_processed

    @property
    def num_generated(self) -> int:
        """Tokens that were generated since this worker started."""
        return self._num_generated

    @property
    def num_queued(self) -> int:
        """Requests in line."""
        return len(self._queue)

    def submit(self, request: Request) -> None:
        """Take a request in line.

        Raises:
            QueueFullError: all rows are taken and the line is full.
        """
        assert request.prompt
        assert request.max_tokens >= 1
        assert request.num_replayed < len(request.prompt)
        # Requests that the next plan will admit do not stand in line.
        if len(self._queue) >= self._max_queued + len(self._free_rows):
            raise QueueFullError(
                f"{len(self._active)} requests are being served and {len(self._queue)} wait, "
                f"which is this worker's bound: try again later or ask another worker"
            )
        self._queue.append(request)

    def cancel(self, key: int) -> bool:
        """Forget a request and free its row; False when it is not known (any more)."""
        if key in self._active:
            self._free_rows.append(self._active.pop(key).row)
            return True
        for request in self._queue:
            if request.key == key:
                self._queue.remove(request)
                return True
        return False

    def plan(self) -> StepPlan:
        """Admit whom rows allow, and choose the tokens of the next step.

        Changes nothing but admission: a plan that is not committed is planned again.
        """
        while self._queue and self._free_rows:
            request = self._queue.popleft()
            self._active[request.key] = _Sequence(
                request=request, row=self._free_rows.pop(), tokens=list(request.prompt)
            )
        generating = [one for one in self._active.values() if one.num_generated > 0]
        prompting = [one for one in self._active.values() if one.num_generated == 0]
        chunks = [_chunk(sequence, num_tokens=1) for sequence in generating]
        budget = self._max_step_tokens - len(chunks)
        for sequence in prompting:
            num_tokens = min(budget, sequence.num_pending)
            if num_tokens == 0:
                break
            chunks.append(_chunk(sequence, num_tokens=num_tokens))
            budget -= num_tokens
        return StepPlan(chunks=tuple(chunks))

    def commit(self, plan: StepPlan, sampled: Sequence[SampledToken]) -> list[Emission]:
        """Record that a plan has run; `sampled` has a token for each sampling chunk, in order.

        Requests that were cancelled while the step ran are passed over.
        """
        tokens = iter(sampled)
        emissions = []
        for chunk in plan.chunks:
            token = next(tokens) if chunk.samples else None
            sequence = self._active.get(chunk.key)
            if sequence is None:
                continue
            sequence.num_run += len(chunk.tokens)
            if token is not None:
                emissions.append(self._extend(sequence, token))
        self._num_processed += plan.num_tokens
        self._num_generated += len(emissions)
        return emissions

    def clear(self) -> list[int]:
        """Forget every request, active and waiting, and return their keys."""
        keys = [*self._active, *(request.key for request in self._queue)]
        self._free_rows.extend(sequence.row for sequence in self._active.values())
        self._active.clear()
        self._queue.clear()
        return keys

    def _extend(self, sequence: _Sequence, sampled: SampledToken) -> Emission:
        sequence.tokens.append(sampled.token)
        request = sequence.request
        finish = None
        if sampled.token in request.stop_tokens:
            finish = FinishReason.STOP
        elif sequence.num_generated == request.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            self._free_rows.append(self._active.pop(request.key).row)
        return Emission(key=request.key, sampled=sampled, finish=finish)


def _chunk(sequence: _Sequence, *, num_tokens: int) -> Chunk:
    start = sequence.num_run
    tokens = tuple(sequence.tokens[start : start + num_tokens])
    samples = start + num_tokens == len(sequence.tokens)
    return Chunk(
        key=sequence.request.key,
        row=sequence.row,
        start=start,
        tokens=tokens,
        sampling=_sampling_row(sequence) if samples else None,
    )


def _sampling_row(sequence: _Sequence) -> SamplingRow:
    request = sequence.request
    num_prompt = len(request.prompt) - request.num_replayed
    return SamplingRow(
        params=request.sampling,
        prompt=sequence.tokens[:num_prompt],
        output=sequence.tokens[num_prompt:],
    )
