"""`Sequence`: a request with its tokens so far, and how many of them are in the cache.

Also the input and output of a step: `Request`, `Chunk`, `Emission`. Pure: no torch, clock, threads.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Self

from equipoise.wire.block_keys import ROOT, BlockKey, key_after
from equipoise.wire.inference_messages import FinishReason
from equipoise.worker.blocks import BlockPool, BlockTable
from equipoise.worker.grammars import Constraint
from equipoise_model.sampling_params import (
    SampledToken,
    SamplingParams,
    SamplingRow,
    TokenCounts,
)

GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request to the engine."""

    key: int
    """Unique on this worker."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""

    max_tokens: int
    """Maximum number of tokens to generate, at least one."""

    stop_tokens: frozenset[int] = frozenset()
    """The first of these ends the request and is part of the output."""

    sampling: SamplingParams = GREEDY
    """How tokens are chosen."""

    num_replayed: int = 0
    """How many tokens at the prompt's end are output of another rank; penalties count them so."""

    prompt_logprobs: int | None = None
    """How many of the most likely tokens to report with each token of the prompt, which is then
    scored: all but the first and replayed ones. None to not score it."""

    min_tokens: int = 0
    """Stop tokens are not sampled before the output, replayed tokens included, is this long."""

    hold_latents: bool = False
    """Whether to hold its full blocks when it has finished."""

    is_handed_over: bool = False
    """Whether another pool prefilled it: what was not fetched of its full blocks is missing."""

    constraint: Constraint | None = None
    """Which tokens the output may have, after the replayed ones; None for any."""

    @property
    def num_scored(self) -> int:
        """Tokens of the prompt to score."""
        return 0 if self.prompt_logprobs is None else len(self.prompt) - self.num_replayed - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive tokens of one request that run in a step."""

    key: int
    """The request's."""

    blocks: tuple[int, ...]
    """Cache blocks of the sequence, position 0 first."""

    start: int
    """Position of the first token."""

    known: tuple[int, ...]
    """Tokens of the prompt or of the output."""

    drafts: tuple[int, ...] = ()
    """Guesses at the tokens that follow; only after the request's last known token."""

    upcoming: tuple[int, ...] = ()
    """Known tokens after the chunk, as many as drafting needs."""

    sampling: tuple[SamplingRow, ...] = ()
    """How to sample after the request's last known token, and after each draft as if it were right;
    empty if the chunk ends before that token."""

    scored: tuple[int, ...] = ()
    """Tokens of the prompt to score, each by the row before it."""

    score_from: int = 0
    """The row of this chunk that scores the first of them."""

    num_top: int = 0
    """How many of the most likely tokens to report with each."""

    constraint: Constraint | None = None
    """The request's."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that run, drafts last."""
        return self.known + self.drafts

    def accepted(self, sampled: Tokens[SampledToken]) -> list[SampledToken]:
        """The valid samples: the first, and one more for each draft that was right.

        Every token is what it would be without drafts, whether sampled or greedy, because a draft
        counts only if it is the token sampled before it. Where a grammar's mask behind a draft took
        too much, no token could be sampled: the next step samples there without a draft.
        """
        assert len(sampled) == len(self.sampling)
        accepted = list(sampled[:1])
        for draft, following in zip(self.drafts, sampled[1:], strict=True):
            if accepted[-1].fault or accepted[-1].token != draft:
                break
            if following.fault and self.constraint is not None:
                break
            accepted.append(following)
        return accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The tokens of one step on this rank; may be empty."""

    chunks: tuple[Chunk, ...]
    """At most one for each request."""

    drafts: bool = True
    """Whether to draft the tokens that follow."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks, including drafts."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWork:
    """Tokens that have not run yet, and their attention."""

    tokens: int
    """Their number."""

    pairs: int
    """Pairs of one of them and an earlier position, which attention computes."""

    @classmethod
    def of(cls, num_tokens: int, *, start: int) -> Self:
        """Consecutive tokens of a sequence; the first is at position `start`."""
        return cls(tokens=num_tokens, pairs=num_tokens * start + num_tokens**2 // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """What running a prompt showed."""

    num_cached: int
    """Tokens that were cached when the request began."""

    scores: tuple[SampledToken, ...]
    """The scored tokens in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """One generated token, or the failure of its request: `sampled.fault`."""

    key: int
    """The request's."""

    sampled: SampledToken
    """The token."""

    finish: FinishReason | None
    """Set on the last token of the request."""

    prompt: PromptResult | None = None
    """Set on the first token that this worker generates for the request."""

    hold: int = 0
    """Number of the hold of its blocks; 0 for none."""

    num_held_tokens: int = 0
    """Tokens in those blocks."""

    @property
    def token(self) -> int:
        """The token itself."""
        return self.sampled.token

    @property
    def is_last(self) -> bool:
        """Whether the request has finished or failed."""
        return self.finish is not None or bool(self.sampled.fault)


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request's progress."""

    request: Request
    """The request."""

    tokens: list[int] = field(init=False)
    """Prompt and output so far."""

    drafts: tuple[int, ...] = ()
    """Guesses at the tokens that follow."""

    num_run: int = 0
    """Tokens whose latents are in the cache."""

    num_sound: int = 0
    """Those from which a token was generated or that were found: their latents are finite."""

    table: BlockTable | None = None
    """Its blocks while it is active."""

    scores: list[SampledToken] = field(default_factory=list)
    """The prompt's tokens that have been scored."""

    num_cached: int | None = None
    """Tokens that were cached when it first became active."""

    is_fetching: bool = False
    """Whether its latents are still to be fetched from another pool; then it is not admitted."""

    _block_keys: list[BlockKey] = field(init=False, repr=False, default_factory=list)

    _counts: TokenCounts | None = field(init=False, repr=False, default=None)
    """Of `tokens`, if penalties need them."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        sampling, num_prompt = self.request.sampling, self._num_prompt
        if sampling.penalizes:
            prompt = self.tokens[:num_prompt] if sampling.repetition_penalty != 1 else ()
            self._counts = TokenCounts(prompt, self.tokens[num_prompt:])

    @property
    def _num_prompt(self) -> int:
        """Tokens of the prompt without replayed ones."""
        return len(self.request.prompt) - self.request.num_replayed

    @property
    def num_pending(self) -> int:
        """Known tokens that have not run yet."""
        return len(self.tokens) - self.num_run

    @property
    def is_generating(self) -> bool:
        """Whether only the newest generated token has to run for the next one."""
        return self.num_pending == 1 and len(self.tokens) > len(self.request.prompt)

    def prefill_work(self, *, block_tokens: int, num_pulled: int) -> PrefillWork:
        """What has to run before the next token is generated, unless it generates already.

        Of a request that waits, nothing is known to be cached but the `num_pulled` blocks of its
        pull; while latents are fetched from another pool, all its full blocks will be.
        """
        if self.is_generating and self.table is not None:
            return PrefillWork(tokens=0, pairs=0)
        num_full = (len(self.tokens) - 1) // block_tokens
        start = self.num_run + block_tokens * (num_full if self.is_fetching else num_pulled)
        return PrefillWork.of(len(self.tokens) - start, start=start)

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_tokens + len(self.request.prompt) - len(self.tokens)

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt that are still to be scored."""
        return self.request.num_scored - len(self.scores)

    def keys_found_by(self, pool: BlockPool) -> Iterator[BlockKey]:
        """Yield the keys of full blocks that may be taken from the cache, without the last token.

        Rows that score have to run. Each key is computed once: a prompt may wait for many steps.
        """
        num_tokens = len(self.scores) + 1 if self.num_unscored else len(self.tokens)
        keys, size = self._block_keys, pool.block_tokens
        for index, start in enumerate(range(0, num_tokens - size, size)):
            if index == len(keys):
                part = self.tokens[start : start + size]
                keys.append(key_after(keys[-1] if keys else ROOT, part))
            yield keys[index]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks held, position 0 first."""
        return self.table.blocks if self.table is not None else ()

    def begin(self, pool: BlockPool) -> int:
        """Become active with the cached blocks; returns how many tokens those have."""
        self.table = BlockTable(pool, self.keys_found_by(pool))
        self.num_run = self.num_sound = self.table.num_found_tokens
        if self.num_cached is None:
            self.num_cached = self.num_run
        return self.num_run

    def preempt(self) -> None:
        """Release all blocks; tokens that are no longer cached must run again."""
        assert self.table is not None
        self.table.release(num_sound=self.num_sound)
        self.table, self.num_run, self.num_sound, self.drafts = None, 0, 0, ()

    def forget_blocks(self) -> None:
        """Uncache all blocks, because a token could not be generated from them."""
        assert self.table is not None
        self.table.forget()

    def grow(self, num_tokens: int) -> bool:
        """Hold blocks for this many tokens after those that ran. False if there are too few."""
        assert self.table is not None
        return self.table.grow(self.num_run + num_tokens)

    def chunk(self, *, num_tokens: int, num_ahead: int) -> Chunk:
        """The next tokens to run, known ones before drafts, with `num_ahead` upcoming ones.

        The sequence must hold blocks for them.
        """
        start, known = self.num_run, min(num_tokens, self.num_pending)
        end = start + known
        drafts = self.drafts[: num_tokens - known]
        samples = end == len(self.tokens)
        # The row of a position scores the token after it.
        score_from = max(start, len(self.scores))
        score_end = min(end, self.request.num_scored)
        return Chunk(
            key=self.request.key,
            blocks=self.blocks,
            start=start,
            known=tuple(self.tokens[start:end]),
            drafts=drafts,
            upcoming=tuple(self.tokens[end : end + num_ahead]),
            sampling=tuple(self._sampling_rows(drafts)) if samples else (),
            scored=tuple(self.tokens[score_from + 1 : score_end + 1]),
            score_from=score_from - start,
            num_top=self.request.prompt_logprobs or 0,
            constraint=self.request.constraint,
        )

    def _sampling_rows(self, drafts: tuple[int, ...]) -> list[SamplingRow]:
        """How to sample after the last known token and after each draft."""
        num_banned = self.request.min_tokens - (len(self.tokens) - self._num_prompt)
        banned = tuple(sorted(self.request.stop_tokens)) if num_banned > 0 else ()
        return [
            SamplingRow(
                params=self.request.sampling,
                position=len(self.tokens) + n,
                counts=self._counts,
                drafts=drafts[:n],
                banned=banned if n < num_banned else (),
            )
            for n in range(len(drafts) + 1)
        ]

    def take(
        self, chunk: Chunk, accepted: Tokens[SampledToken], scores: Tokens[SampledToken] = ()
    ) -> list[Emission]:
        """Record that a chunk has run, with its accepted samples and its scores.

        Stops at the request's end.
        """
        assert self.table is not None
        self.drafts = ()
        self.num_run += len(chunk.known) + max(0, len(accepted) - 1)
        self.scores += scores
        faulty = [one for one in scores if one.fault]
        emissions: list[Emission] = []
        for sampled in (*faulty, *accepted):
            if sampled.fault:
                return [*emissions, Emission(key=self.request.key, sampled=sampled, finish=None)]
            result = self._prompt_result()
            self.tokens.append(sampled.token)
            if self._counts is not None:
                self._counts.add(sampled.token)
            finish = self._finish(sampled.token)
            emissions.append(
                Emission(key=self.request.key, sampled=sampled, finish=finish, prompt=result)
            )
            if finish is not None:
                break
            if self.request.constraint is not None:
                self.request.constraint.accept([sampled.token])
        self.table.publish(self.tokens, num_run=min(self.num_run, len(self.tokens)))
        if accepted:
            self.num_sound = self.num_run
        return emissions

    def _prompt_result(self) -> PromptResult | None:
        """What running the prompt showed, before the first generated token."""
        if len(self.tokens) > len(self.request.prompt):
            return None
        return PromptResult(num_cached=self.num_cached or 0, scores=tuple(self.scores))

    def _finish(self, token: int) -> FinishReason | None:
        if token in self.request.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_left == 0 else None
