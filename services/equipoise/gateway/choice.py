"""`ChoiceDecoder`: one choice's text as its tokens arrive, and the tokens that the text is made of.

Decides when text may be sent: never half a character, never part of a stop string, and no token's
logprob before its text. Knows nothing of HTTP or of OpenAI's objects.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from equipoise.gateway.stop_text import StopText
from equipoise.gateway.tokenizer import Tokenizer
from equipoise.wire.inference import FinishReason, GeneratedTokens, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """A token of a text."""

    token: int
    """Token id."""

    offset: int
    """Where in the choice's text it begins, characters."""

    logprob: TokenLogprob
    """How likely it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """The next part of a choice."""

    text: str
    """Text that is safe to send."""

    tokens: tuple[int, ...]
    """All generated tokens, including those that a stop string cuts off."""

    shown: tuple[TokenText, ...]
    """If logprobs were requested, the tokens whose text is sent up to here and was not before."""

    finish: FinishReason | None
    """Set on the last part."""


class ChoiceDecoder:
    """Decodes one choice, which ends with its first stop string."""

    def __init__(
        self, tokenizer: Tokenizer, *, stops: tuple[str, ...], stop_tokens: frozenset[int]
    ) -> None:
        self._decoder = tokenizer.decoder()
        self._stop = StopText(stops)
        self._stop_tokens = stop_tokens
        self._num_decoded = 0
        self._num_shown = 0
        self._waiting: deque[TokenText] = deque()

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the choice."""
        return self._stop.stopped

    def read(self, generated: GeneratedTokens) -> ChoiceDelta:
        """The part that these tokens complete."""
        final = generated.finish is not None
        text = self._stop.read(self._decode(generated), final=final)
        self._num_shown += len(text)
        finish = FinishReason.STOP if self._stop.stopped else generated.finish
        return ChoiceDelta(
            text=text,
            tokens=generated.tokens,
            shown=self._shown(all_remaining=final and not self._stop.stopped),
            finish=finish,
        )

    def _decode(self, generated: GeneratedTokens) -> str:
        final = generated.finish is not None
        if not generated.logprobs:
            return self._decoder.read(generated.tokens, final=final)
        text = ""
        for token, logprob in zip(generated.tokens, generated.logprobs, strict=True):
            if token not in self._stop_tokens:
                offset = self._num_decoded + len(text)
                self._waiting.append(TokenText(token=token, offset=offset, logprob=logprob))
            text += self._decoder.read((token,), final=False)
        text += self._decoder.read((), final=final)
        self._num_decoded += len(text)
        return text

    def _shown(self, *, all_remaining: bool) -> tuple[TokenText, ...]:
        shown = []
        while self._waiting and (all_remaining or self._waiting[0].offset < self._num_shown):
            shown.append(self._waiting.popleft())
        return tuple(shown)


async def merged_deltas(
    choices: Sequence[tuple[ChoiceDecoder, AsyncGenerator[GeneratedTokens, None]]],
) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
    """Yield the index and delta of all choices as they arrive, each choice up to its finish.

    Reads at most one delta per choice ahead of the caller. Closing it ends all choices.
    """
    pending = {
        asyncio.ensure_future(anext(parts)): (index, decoder, parts)
        for index, (decoder, parts) in enumerate(choices)
    }
    try:
        while pending:
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
