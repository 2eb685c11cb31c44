"""`CompletionEndpoint`: `/v1/completions` and `/v1/chat/completions`, whole and as streams."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from equipoise.gateway.choice import ChoiceDelta, joined
from equipoise.gateway.client import HttpClient
from equipoise.gateway.completion_request import CompletionRequest
from equipoise.gateway.generation import GenerationEndpoint
from equipoise.gateway.open_requests import OpenRequests
from equipoise.gateway.openai_responses import ChatForm, CompletionForm, ResponseContext, usage
from equipoise.gateway.relay import Relay
from equipoise.gateway.settings import GatewaySettings
from equipoise.gateway.tokenizer import Tokenizer


class CompletionEndpoint(GenerationEndpoint):
    """An ASGI application; `form` builds the response objects."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        relay: Relay,
        tokenizer: Tokenizer,
        open_requests: OpenRequests,
        parse: Callable[[bytes], CompletionRequest],
        form: CompletionForm | ChatForm,
    ) -> None:
        super().__init__(
            settings,
            relay=relay,
            tokenizer=tokenizer,
            open_requests=open_requests,
            parse=parse,
            prefix=form.prefix,
        )
        self._form = form

    async def _whole(
        self, request: CompletionRequest, context: ResponseContext, client: HttpClient
    ) -> None:
        parts: list[list[ChoiceDelta]] = [[] for _ in range(request.num_all_choices)]
        async with aclosing(self._deltas(request, context)) as deltas:
            async for index, delta in deltas:
                parts[index].append(delta)
                if delta.finish is not None:
                    # A delta for each token takes far more room than the text.
                    parts[index] = [joined(parts[index])]
        wholes = [whole for (whole,) in parts]
        first_choices = wholes[:: request.num_choices]
        chosen = _best(wholes, num_best=request.num_best, of=request.num_choices)
        counts = usage(
            num_prompt=sum(map(len, request.prompts)),
            num_generated=sum(len(one.tokens) for one in wholes),
            num_cached=sum(map(_num_cached, first_choices)),
            num_handed_over=_sum_known(one.num_handed_over for one in first_choices),
        )
        await client.send_json(self._form.whole(context, dict(enumerate(chosen)), usage=counts))

    async def _stream(
        self, request: CompletionRequest, context: ResponseContext, client: HttpClient
    ) -> None:
        num_generated = [0] * request.num_all_choices
        num_cached = 0
        handed_over: list[int | None] = []

        def more(index: int) -> dict[str, Any]:
            """The usage of an event, which vLLM's continuous usage counts for the choice alone."""
            if not request.continuous_usage:
                return {"usage": None} if request.include_usage else {}
            num_prompt = len(request.prompts[index // request.num_choices])
            return {"usage": usage(num_prompt=num_prompt, num_generated=num_generated[index])}

        async with aclosing(self._deltas(request, context)) as deltas:
            async for index, delta in deltas:
                if index % request.num_choices == 0:  # A prompt counts once.
                    num_cached += _num_cached(delta) if delta.is_first else 0
                    handed_over.append(delta.num_handed_over)
                if delta.is_first and (opening := self._form.opening(context, index)):
                    await client.send_event({**opening, **more(index)})
                num_generated[index] += len(delta.tokens)
                if _shows(delta) or request.return_token_ids:
                    await client.send_event(self._form.part(context, {index: delta}, **more(index)))
        if request.include_usage:
            counts = usage(
                num_prompt=sum(map(len, request.prompts)),
                num_generated=sum(num_generated),
                num_cached=num_cached,
                num_handed_over=_sum_known(handed_over),
            )
            await client.send_event(self._form.part(context, {}, usage=counts))
        await client.send_event("[DONE]", is_last=True)


def _shows(delta: ChoiceDelta) -> bool:
    return bool(delta.text or delta.reasoning or delta.calls or delta.shown or delta.finish)


def _num_cached(first: ChoiceDelta) -> int:
    """Tokens of a choice's prompt that its rank had in its cache."""
    return 0 if first.prompt is None else first.prompt.num_cached


def _sum_known(numbers: Iterable[int | None]) -> int | None:
    """The sum of those that are known; None if none is."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _best(choices: Sequence[ChoiceDelta], *, num_best: int, of: int) -> list[ChoiceDelta]:
    """The `num_best` choices of each `of` consecutive ones, best first unless that is all.

    As at OpenAI, the best are those of the highest mean logprob of a token.
    """
    if num_best == of:
        return list(choices)

    def mean(choice: ChoiceDelta) -> float:
        return choice.logprob / max(1, len(choice.tokens))

    groups = (choices[first : first + of] for first in range(0, len(choices), of))
    return [one for group in groups for one in sorted(group, key=mean, reverse=True)[:num_best]]
