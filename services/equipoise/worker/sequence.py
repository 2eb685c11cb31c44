"""`Sequence`: a request with its tokens so far, and how many of them are in the cache.

Also what goes in and out of a step: `Request`, `Chunk`, `Emission`. Pure: no torch, clock, threads.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum

from equipoise.worker.blocks import BlockPool, BlockTable
from equipoise_model.sampling_params import SampledToken, SamplingParams, SamplingRow

GREEDY = SamplingParams(temperature=0)


class FinishReason(Enum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    FAILED = "failed"
    """No token could be chosen: `SampledToken.fault` says why."""


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
    """Consecutive tokens of one request: `tokens[i]` stands at `start + i`, kept in `blocks`.

    If the last known token of the request is among them, its logits give the next, by the first of
    `sampling`. Behind it there may be `drafts`, guesses at what follows; each one's logits are
    sampled too, by the next of `sampling`, as if it were right. `upcoming` are known tokens behind
    the chunk, as many as drafting wants to know.
    """

    key: int
    blocks: tuple[int, ...]
    start: int
    known: tuple[int, ...]
    drafts: tuple[int, ...] = ()
    upcoming: tuple[int, ...] = ()
    sampling: tuple[SamplingRow, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that run, drafts last."""
        return self.known + self.drafts

    @property
    def samples(self) -> bool:
        """Whether this chunk gives tokens."""
        return bool(self.sampling)

    def accepted(self, sampled: Tokens[SampledToken]) -> list[SampledToken]:
        """What of a chunk's samples stands: the first, and one more for each draft it came true of.

        Every token is what it would be without drafts, whether sampled or greedy, because a draft
        counts only if it is the very token that its predecessor's logits gave.
        """
        assert len(sampled) == len(self.sampling)
        standing = list(sampled[:1])
        for draft, following in zip(self.drafts, sampled[1:], strict=True):
            if standing[-1].fault or standing[-1].token != draft:
                break
            standing.append(following)
        return standing


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The tokens of one step on this rank; may be empty. `drafts`: what follows is guessed."""

    chunks: tuple[Chunk, ...]
    drafts: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens over all chunks, drafts among them."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """One generated token; `finish` is set on the last of its request.

    With `FAILED` there is no token.
    """

    key: int
    sampled: SampledToken
    finish: FinishReason | None

    @property
    def token(self) -> int:
        """The token itself."""
        return self.sampled.token


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request's tokens so far; while it is active, its blocks and how many tokens have run."""

    request: Request
    tokens: list[int] = field(init=False)
    drafts: tuple[int, ...] = ()
    num_run: int = 0
    table: BlockTable | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def num_pending(self) -> int:
        """Known tokens that have not run."""
        return len(self.tokens) - self.num_run

    @property
    def is_generating(self) -> bool:
        """Whether only the newest generated token has to run for the next."""
        return self.num_pending == 1 and len(self.tokens) > len(self.request.prompt)

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_tokens + len(self.request.prompt) - len(self.tokens)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks that are held, that of position 0 first."""
        return self.table.blocks if self.table is not None else ()

    def begin(self, pool: BlockPool) -> int:
        """Become active, with what the cache has of it already; the number of those tokens."""
        self.table = BlockTable(pool, self.tokens)
        self.num_run = self.table.num_found_tokens
        return self.num_run

    def pause(self) -> None:
        """Give all blocks back; what was run must be run again, if it is not found."""
        assert self.table is not None
        self.table.release()
        self.table, self.num_run, self.drafts = None, 0, ()

    def forget_blocks(self) -> list[int]:
        """The blocks that no other sequence holds; no later one finds them."""
        assert self.table is not None
        return self.table.forget()

    def grow(self, num_tokens: int) -> bool:
        """Hold blocks for so many tokens more than have run; False when there are not enough."""
        assert self.table is not None
        return self.table.grow(self.num_run + num_tokens)

    def chunk(self, *, num_tokens: int, num_ahead: int) -> Chunk:
        """The next tokens to run, drafts after the known ones; `num_ahead` are told behind them.

        Blocks for them are there.
        """
        start, known = self.num_run, min(num_tokens, self.num_pending)
        end = start + known
        drafts = self.drafts[: num_tokens - known]
        samples = end == len(self.tokens)
        return Chunk(
            key=self.request.key,
            blocks=self.blocks,
            start=start,
            known=tuple(self.tokens[start:end]),
            drafts=drafts,
            upcoming=tuple(self.tokens[end : end + num_ahead]),
            sampling=tuple(self._sampling_rows(drafts)) if samples else (),
        )

    def _sampling_rows(self, drafts: tuple[int, ...]) -> list[SamplingRow]:
        """For the last known token and each draft behind it, what is sampled there."""
        num_prompt = len(self.request.prompt) - self.request.num_replayed
        prompt, output = self.tokens[:num_prompt], self.tokens[num_prompt:]
        return [
            SamplingRow(params=self.request.sampling, prompt=prompt, output=[*output, *drafts[:n]])
            for n in range(len(drafts) + 1)
        ]

    def take(self, chunk: Chunk, standing: Tokens[SampledToken]) -> list[Emission]:
        """Record that a chunk has run and which of its samples stand; ends with the request's."""
        assert self.table is not None
        self.drafts = ()
        self.num_run += len(chunk.known) + max(0, len(standing) - 1)
        emissions: list[Emission] = []
        for sampled in standing:
            if sampled.fault:
                failed = FinishReason.FAILED
                return [*emissions, Emission(key=self.request.key, sampled=sampled, finish=failed)]
            self.tokens.append(sampled.token)
            finish = self._finish(sampled.token)
            emissions.append(Emission(key=self.request.key, sampled=sampled, finish=finish))
            if finish is not None:
                break
        self.table.publish(self.tokens, num_run=min(self.num_run, len(self.tokens)))
        return emissions

    def _finish(self, token: int) -> FinishReason | None:
        if token in self.request.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_left == 0 else None
