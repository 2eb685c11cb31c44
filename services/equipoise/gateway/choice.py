"""`ChoiceDecoder`: one choice's text as its tokens arrive, and the tokens that the text is made of.

Decides when text may be sent: never half a character, never part of a stop string, and no token's
logprob before its text. Knows nothing of HTTP or of OpenAI's objects.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace

from equipoise.gateway.reasoning import ReasoningSplit
from equipoise.gateway.stop_text import StopText
from equipoise.gateway.tokenizer import TokenDecoder, Tokenizer
from equipoise.gateway.tool_calls import CallDelta, ToolCallSplit, merged
from equipoise.wire.inference_messages import (
    FinishReason,
    GeneratedTokens,
    PromptReport,
    TokenLogprob,
)

MAX_OPEN_CHOICES = 32
"""Choices of one request that ranks work on at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """A token of a text."""

    token: int
    """Token id."""

    offset: int
    """Where in the choice's text it begins, characters."""

    logprob: TokenLogprob | None
    """How likely it was; None for the first token of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """A prompt that is repeated before the choice."""

    tokens: tuple[int, ...]
    """Token ids."""

    with_logprobs: bool
    """Whether to show its tokens' logprobs."""

    is_all: bool
    """Whether no generated token is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """The next part of a choice."""

    text: str
    """Text that is safe to send."""

    tokens: tuple[int, ...]
    """The generated tokens, up to the one that ended the choice."""

    logprob: float
    """The sum of the tokens' logprobs; 0 if none were requested."""

    shown: tuple[TokenText, ...]
    """If logprobs were requested, the tokens whose text is sent up to here and was not before."""

    finish: FinishReason | None
    """Set on the last part."""

    reasoning: str = ""
    """Reasoning that is safe to send, if it is kept apart from the text."""

    calls: tuple[CallDelta, ...] = ()
    """Parts of calls of tools that are safe to send, one for each call."""

    ends_with_calls: bool = False
    """Set on the last part if the model has called tools, and completed its calls."""

    is_first: bool = False
    """Set on the first part."""

    prompt: PromptReport | None = None
    """On the first part, what the rank found out about the prompt."""

    num_handed_over: int | None = None
    """On the first part after a handover, as in `GeneratedTokens`."""


class ChoiceDecoder:
    """Decodes one choice, which ends with its first stop string after `min_tokens` tokens.

    Special tokens have text if `with_special`. `reasoning` separates the model's reasoning, and
    `tools` separates calls from the rest.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: tuple[str, ...],
        stop_tokens: frozenset[int],
        min_tokens: int = 0,
        with_special: bool = False,
        echo: Echo | None = None,
        reasoning: ReasoningSplit | None = None,
        tools: ToolCallSplit | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._decoder = tokenizer.decoder(
            with_special=with_special, keeping=tools.special if tools else frozenset()
        )
        self._prompt_decoder = tokenizer.decoder(with_special=with_special)
        self._stop = StopText(stops)
        self._stop_tokens = stop_tokens
        self._num_unstoppable = min_tokens
        self._echo = echo
        self._is_first = True
        self._num_decoded = 0
        self._num_shown = 0
        self._waiting: deque[TokenText] = deque()

    @property
    def stopped(self) -> bool:
        """Whether a stop string, or the last call that may be made, has ended the choice."""
        return self._stop.stopped or (self._tools is not None and self._tools.ended)

    def read(self, generated: GeneratedTokens) -> ChoiceDelta:
        """The part that these tokens complete; those after the end of the choice do not count."""
        deltas = []
        for one in _one_by_one(generated):
            deltas.append(self._read(one))
            if deltas[-1].finish is not None:
                break
        return joined(deltas)

    def _read(self, generated: GeneratedTokens) -> ChoiceDelta:
        """The part that at most one token completes."""
        is_first, self._is_first = self._is_first, False
        text = self._echoed(generated.prompt) if is_first and self._echo else ""
        if self._echo and self._echo.is_all:
            generated = replace(generated, tokens=(), logprobs=(), finish=FinishReason.LENGTH)
        final = generated.finish is not None
        if self._num_unstoppable:
            self._num_unstoppable -= len(generated.tokens)
            text += self._decode(generated)
        else:
            text += self._stop.read(self._decode(generated), final=final)
        self._num_shown += len(text)
        is_end = final or self._stop.stopped
        reasoning = ""
        calls: tuple[CallDelta, ...] = ()
        if self._reasoning is not None:
            reasoning, text = self._reasoning.read(text, final=is_end)
        if self._tools is not None:
            text, calls = self._tools.read(text, final=is_end)
        finish = FinishReason.STOP if self.stopped else generated.finish
        return ChoiceDelta(
            text=text,
            reasoning=reasoning,
            calls=calls,
            ends_with_calls=finish is FinishReason.STOP
            and self._tools is not None
            and self._tools.has_called,
            tokens=generated.tokens,
            logprob=sum(one.value for one in generated.logprobs),
            shown=self._shown(all_remaining=final and not self._stop.stopped),
            finish=finish,
            is_first=is_first,
            prompt=generated.prompt if is_first else None,
            num_handed_over=generated.num_handed_over,
        )

    def _echoed(self, report: PromptReport | None) -> str:
        """The prompt's text, and its tokens to be shown."""
        assert self._echo is not None
        tokens = self._echo.tokens
        if not self._echo.with_logprobs or report is None:
            text = self._prompt_decoder.read(tokens, final=True)
        else:
            text = self._noted(self._prompt_decoder, tokens, (None, *report.logprobs))
            text += self._prompt_decoder.read((), final=True)
        self._num_decoded = len(text)
        return text

    def _decode(self, generated: GeneratedTokens) -> str:
        """The text that a token completes. A stop token is not part of the text."""
        tokens, logprobs = generated.tokens, generated.logprobs
        if tokens and tokens[-1] in self._stop_tokens:
            tokens, logprobs = (), ()
        final = generated.finish is not None
        if not logprobs:
            text = self._decoder.read(tokens, final=final)
        else:
            text = self._noted(self._decoder, tokens, logprobs)
            text += self._decoder.read((), final=final)
        self._num_decoded += len(text)
        return text

    def _noted(
        self,
        decoder: TokenDecoder,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob | None],
    ) -> str:
        """The text that tokens complete; they wait to be shown with it."""
        text = ""
        for token, logprob in zip(tokens, logprobs, strict=True):
            offset = self._num_decoded + len(text)
            self._waiting.append(TokenText(token=token, offset=offset, logprob=logprob))
            text += decoder.read((token,), final=False)
        return text

    def _shown(self, *, all_remaining: bool) -> tuple[TokenText, ...]:
        shown = []
        while self._waiting and (all_remaining or self._waiting[0].offset < self._num_shown):
            shown.append(self._waiting.popleft())
        return tuple(shown)


def joined(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """Consecutive deltas of a choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    handed_over = (one.num_handed_over for one in deltas if one.num_handed_over is not None)
    return ChoiceDelta(
        text="".join(one.text for one in deltas),
        reasoning="".join(one.reasoning for one in deltas),
        calls=merged(call for one in deltas for call in one.calls),
        ends_with_calls=deltas[-1].ends_with_calls,
        tokens=tuple(token for one in deltas for token in one.tokens),
        logprob=sum(one.logprob for one in deltas),
        shown=tuple(token for one in deltas for token in one.shown),
        finish=deltas[-1].finish,
        is_first=deltas[0].is_first,
        prompt=deltas[0].prompt,
        num_handed_over=next(handed_over, None),
    )


def _one_by_one(generated: GeneratedTokens) -> Iterator[GeneratedTokens]:
    """The same, a token at a time: how many come together depends on drafts and other requests."""
    last = len(generated.tokens) - 1
    if last < 1:
        yield generated
        return
    for index in range(last + 1):
        yield GeneratedTokens(
            tokens=generated.tokens[index : index + 1],
            finish=generated.finish if index == last else None,
            logprobs=generated.logprobs[index : index + 1],
            prompt=None if index else generated.prompt,
            num_handed_over=None if index else generated.num_handed_over,
        )


_Open = tuple[int, ChoiceDecoder, AsyncGenerator[GeneratedTokens, None]]


async def merged_deltas(
    choices: Sequence[tuple[ChoiceDecoder, AsyncGenerator[GeneratedTokens, None]]],
    *,
    max_open: int = MAX_OPEN_CHOICES,
) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
    """Yield the index and delta of all choices as they arrive, each choice up to its finish.

    At most `max_open` are read at a time. Reads at most one delta per choice ahead of the caller.
    Closing it ends all choices.
    """
    waiting = deque(enumerate(choices))
    pending: dict[asyncio.Future[GeneratedTokens], _Open] = {}
    try:
        while pending or waiting:
            while waiting and len(pending) < max_open:
                index, (decoder, parts) = waiting.popleft()
                pending[asyncio.ensure_future(anext(parts))] = (index, decoder, parts)
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, decoder, parts = pending.pop(task)
                delta = decoder.read(task.result())
                if delta.finish is None:
                    pending[asyncio.ensure_future(anext(parts))] = (index, decoder, parts)
                else:
                    # A stop string ends the choice before its rank does.
                    await parts.aclose()
                yield index, delta
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for _, parts in choices:
            await parts.aclose()
