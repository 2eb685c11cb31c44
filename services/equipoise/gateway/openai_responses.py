"""OpenAI's response objects: of completions, of chats, and of errors. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from equipoise.gateway.choice import ChoiceDelta
from equipoise.gateway.completion_request import CompletionRequest
from equipoise.gateway.errors import RequestError
from equipoise.gateway.tokenizer import Tokenizer
from equipoise.gateway.tool_calls import CallDelta
from equipoise.wire.inference_messages import TokenLogprob

_ID_LENGTH = 32

_MIN_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI's own server sends this for impossible tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseContext:
    """What all objects of one response have in common."""

    response_id: str
    """Its `id`."""

    model: str
    """Name of the model."""

    created_s: int
    """Unix time."""

    tokenizer: Tokenizer
    """Names tokens in logprobs."""

    request: CompletionRequest
    """What the client asked for."""

    @property
    def with_logprobs(self) -> bool:
        """Whether the client asked for logprobs."""
        return self.request.show_logprobs

    def prompt_of(self, index: int) -> tuple[int, ...]:
        """The prompt of a choice that the client gets."""
        return self.request.prompts[index // self.request.num_best]

    def prompt_fields(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        """What a choice's first delta has about the prompt, in vLLM's form."""
        fields: dict[str, Any] = {}
        if self.request.return_token_ids:
            fields["prompt_token_ids"] = list(self.prompt_of(index))
        if self.request.show_prompt_logprobs and delta.prompt is not None:
            tokens = self.prompt_of(index)[1:]
            logprobs = zip(tokens, delta.prompt.logprobs, strict=True)
            fields["prompt_logprobs"] = [
                None,
                *(_prompt_logprob(self.tokenizer, token, one) for token, one in logprobs),
            ]
        return fields

    def call_id(self, index: int, call: CallDelta) -> str:
        """The `id` of a choice's call, which no other call has."""
        return f"call_{self.unique}_{index}_{call.index}"

    @property
    def unique(self) -> str:
        """The part of the `id` that no other response has."""
        return self.response_id[-_ID_LENGTH:]

    def object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An object of this response."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
            **more,
        }

    def choice(self, index: int, delta: ChoiceDelta, /, **more: Any) -> dict[str, Any]:
        """A choice with what both forms share, and `more`."""
        finish = "tool_calls" if delta.ends_with_calls else delta.finish
        choice = {"index": index, **more, "finish_reason": finish}
        if self.request.return_token_ids:
            choice["token_ids"] = list(delta.tokens)
        return choice


class CompletionForm:
    """The objects of `/v1/completions`."""

    prefix = "cmpl-"

    def opening(self, *_: object) -> None:
        """The event before a choice's first delta: none."""
        return

    def whole(
        self, context: ResponseContext, deltas: Mapping[int, ChoiceDelta], **more: Any
    ) -> dict[str, Any]:
        """All choices at once, or some deltas of a stream: the form is the same."""
        choices = [
            {
                **context.choice(
                    index, delta, text=delta.text, logprobs=self._logprobs(context, delta)
                ),
                **(context.prompt_fields(index, delta) if delta.is_first else {}),
            }
            for index, delta in deltas.items()
        ]
        return context.object("text_completion", choices, **more)

    part = whole

    def _logprobs(self, context: ResponseContext, delta: ChoiceDelta) -> dict[str, Any] | None:
        if not context.with_logprobs:
            return None
        name = partial(_token_name, context.tokenizer)
        return {
            "tokens": [name(one.token) for one in delta.shown],
            "token_logprobs": [
                None if one.logprob is None else _finite(one.logprob.value) for one in delta.shown
            ],
            # As at OpenAI, the token itself is among them, even if it is not one of the likeliest.
            "top_logprobs": [
                None
                if one.logprob is None
                else {
                    name(token): _finite(value)
                    for token, value in ((one.token, one.logprob.value), *one.logprob.top)
                }
                for one in delta.shown
            ],
            "text_offset": [one.offset for one in delta.shown],
        }


class ChatForm:
    """The objects of `/v1/chat/completions`."""

    prefix = "chatcmpl-"

    def opening(self, context: ResponseContext, index: int) -> dict[str, Any]:
        """The event before a choice's first delta: its role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        more = {}
        if context.request.return_token_ids:
            more["prompt_token_ids"] = list(context.prompt_of(index))
        return context.object("chat.completion.chunk", [choice], **more)

    def part(
        self, context: ResponseContext, deltas: Mapping[int, ChoiceDelta], **more: Any
    ) -> dict[str, Any]:
        """Some deltas of a stream."""
        choices = [
            context.choice(
                index,
                delta,
                delta=_chat_delta(context, index, delta),
                logprobs=_chat_logprobs(context, delta),
            )
            for index, delta in deltas.items()
        ]
        return context.object("chat.completion.chunk", choices, **more)

    def whole(
        self, context: ResponseContext, deltas: Mapping[int, ChoiceDelta], **more: Any
    ) -> dict[str, Any]:
        """All choices at once."""
        choices = [
            context.choice(
                index,
                delta,
                message=_chat_message(context, index, delta),
                logprobs=_chat_logprobs(context, delta),
            )
            for index, delta in deltas.items()
        ]
        more |= context.prompt_fields(0, deltas[0])
        return context.object("chat.completion", choices, **more)


def usage(
    *,
    num_prompt: int,
    num_generated: int,
    num_cached: int | None = None,
    num_handed_over: int | None = None,
) -> dict[str, Any]:
    """Token counts: each prompt once, and all generated tokens, up to the one that ended a choice.

    `num_cached` are those of the prompts that ranks had in their caches, `num_handed_over` those
    whose latents a decode rank got from a prefill rank; None leaves them out.
    """
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }
    if num_cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": num_cached}
        if num_handed_over is not None:
            counts["prompt_tokens_details"]["handed_over_tokens"] = num_handed_over
    return counts


def model_object(model: str, *, created_s: int, context_length: int) -> dict[str, Any]:
    """A model as `/v1/models` lists it. The context length is vLLM's addition; 0 if unknown."""
    return {
        "id": model,
        "object": "model",
        "created": created_s,
        "owned_by": "equipoise",
        "max_model_len": context_length or None,
    }


def error_object(error: RequestError) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {
        "error": {
            "message": str(error),
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def _chat_delta(context: ResponseContext, index: int, delta: ChoiceDelta) -> dict[str, Any]:
    fields: dict[str, Any] = {"reasoning_content": delta.reasoning, "content": delta.text}
    fields["tool_calls"] = [
        {"index": call.index, **_chat_call(context, index, call)}
        if call.name is not None
        else {"index": call.index, "function": {"arguments": call.arguments}}
        for call in delta.calls
    ]
    return {name: value for name, value in fields.items() if value}


def _chat_message(context: ResponseContext, index: int, delta: ChoiceDelta) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
    if context.request.splits_reasoning:
        message["reasoning_content"] = delta.reasoning or None
        message["content"] = delta.text or None
    if delta.calls:
        message["content"] = delta.text or None
        message["tool_calls"] = [_chat_call(context, index, call) for call in delta.calls]
    return message


def _chat_call(context: ResponseContext, index: int, call: CallDelta) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": context.call_id(index, call), "type": "function", "function": function}


def _chat_logprobs(context: ResponseContext, delta: ChoiceDelta) -> dict[str, Any] | None:
    if not context.with_logprobs:
        return None
    name = partial(_token_name, context.tokenizer)

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": name(token),
            "logprob": _finite(logprob),
            "bytes": list(context.tokenizer.bytes_of[token]),
        }

    content = [
        {
            **entry(one.token, one.logprob.value),
            "top_logprobs": [entry(token, value) for token, value in one.logprob.top],
        }
        for one in delta.shown
        if one.logprob is not None
    ]
    return {"content": content, "refusal": None}


def _prompt_logprob(
    tokenizer: Tokenizer, token: int, logprob: TokenLogprob
) -> dict[str, dict[str, Any]]:
    """A prompt's token and the most likely ones at its place, by token id, as vLLM names them.

    The rank of a token that is not among the most likely is not known.
    """
    ranks = {one: rank for rank, (one, _) in enumerate(logprob.top, start=1)}
    return {
        str(one): {
            "logprob": _finite(value),
            "rank": ranks.get(one),
            "decoded_token": _token_name(tokenizer, one),
        }
        for one, value in ((token, logprob.value), *logprob.top)
    }


def _token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; one that is not whole characters is named by its bytes, as at OpenAI."""
    data = tokenizer.bytes_of[token]
    if not data:
        return f"<token {token}>"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
