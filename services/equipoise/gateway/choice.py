"""`Choice`: one answer's text as its tokens come, and the tokens that the text is made of.

Owns when a piece may be shown: never half a character, never part of a stop string, and no token's
probability before its text. Knows nothing of HTTP or of OpenAI's objects.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from equipoise.gateway.attempt import Finish, Logprob, Made
from equipoise.gateway.stop_text import StopText
from equipoise.gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """A token of a text, with its probability; `offset` is where in the text it begins."""

    token: int
    offset: int
    logprob: Logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What follows of an answer. `finish` is set on the last.

    `tokens` are all that were made, also those that a stop string cuts off; `spelled`, if
    probabilities are asked for, those whose text has been shown up to here and not before.
    """

    text: str
    tokens: tuple[int, ...]
    spelled: tuple[TokenText, ...]
    finish: Finish | None


class Choice:
    """One answer; it is over with its first stop string."""

    def __init__(
        self, tokenizer: Tokenizer, *, stops: tuple[str, ...], stop_tokens: frozenset[int]
    ) -> None:
        self._spelling = tokenizer.spelling()
        self._stop = StopText(stops)
        self._stop_tokens = stop_tokens
        self._num_spelled = 0
        self._num_shown = 0
        self._waiting: deque[TokenText] = deque()

    def read(self, made: Made) -> Piece:
        """What these tokens let be shown."""
        final = made.finish is not None
        text = self._stop.read(self._spell(made), final=final)
        self._num_shown += len(text)
        finish = Finish.STOP if self._stop.stopped else made.finish
        return Piece(
            text=text,
            tokens=made.tokens,
            spelled=self._shown(all_the_rest=final and not self._stop.stopped),
            finish=finish,
        )

    def _spell(self, made: Made) -> str:
        if not made.logprobs:
            return self._spelling.read(made.tokens, final=made.finish is not None)
        text = ""
        for token, logprob in zip(made.tokens, made.logprobs, strict=True):
            if token not in self._stop_tokens:
                offset = self._num_spelled + len(text)
                self._waiting.append(TokenText(token=token, offset=offset, logprob=logprob))
            text += self._spelling.read((token,), final=False)
        text += self._spelling.read((), final=made.finish is not None)
        self._num_spelled += len(text)
        return text

    def _shown(self, *, all_the_rest: bool) -> tuple[TokenText, ...]:
        shown = []
        while self._waiting and (all_the_rest or self._waiting[0].offset < self._num_shown):
            shown.append(self._waiting.popleft())
        return tuple(shown)


async def pieces(
    choices: Sequence[tuple[Choice, AsyncGenerator[Made, None]]],
) -> AsyncGenerator[tuple[int, Piece], None]:
    """Pieces of all choices with their numbers, as they come; each choice up to its finish.

    Nothing is read ahead of whoever reads here by more than one piece a choice. Closing ends all.
    """
    coming = {
        asyncio.ensure_future(anext(parts)): (index, choice, parts)
        for index, (choice, parts) in enumerate(choices)
    }
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, choice, parts = coming.pop(task)
                piece = choice.read(task.result())
                if piece.finish is None:
                    coming[asyncio.ensure_future(anext(parts))] = (index, choice, parts)
                yield index, piece
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for _, parts in choices:
            await parts.aclose()
