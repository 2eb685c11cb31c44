"""OpenAI's response objects: of completions, of chats, and of errors. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from equipoise.gateway.choice import ChoiceDelta
from equipoise.gateway.errors import RequestError
from equipoise.gateway.tokenizer import Tokenizer

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

    with_logprobs: bool
    """Whether the client asked for logprobs."""

    with_token_ids: bool
    """Whether the client asked for token ids."""

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
        choice = {"index": index, **more, "finish_reason": delta.finish}
        if self.with_token_ids:
            choice["token_ids"] = list(delta.tokens)
        return choice


class CompletionForm:
    """The objects of `/v1/completions`."""

    prefix = "cmpl"

    def opening(self, *_: object) -> None:
        """The event before a choice's first delta: none."""
        return

    def whole(
        self, context: ResponseContext, deltas: Mapping[int, ChoiceDelta], **more: Any
    ) -> dict[str, Any]:
        """All choices at once, or some deltas of a stream: the form is the same."""
        choices = [
            context.choice(index, delta, text=delta.text, logprobs=self._logprobs(context, delta))
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
            "token_logprobs": [_finite(one.logprob.value) for one in delta.shown],
            # As at OpenAI, the token itself is among them, even if it is not one of the likeliest.
            "top_logprobs": [
                {
                    name(token): _finite(value)
                    for token, value in ((one.token, one.logprob.value), *one.logprob.top)
                }
                for one in delta.shown
            ],
            "text_offset": [one.offset for one in delta.shown],
        }


class ChatForm:
    """The objects of `/v1/chat/completions`."""

    prefix = "chatcmpl"

    def opening(self, context: ResponseContext, index: int) -> dict[str, Any]:
        """The event before a choice's first delta: its role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return context.object("chat.completion.chunk", [choice])

    def part(
        self, context: ResponseContext, deltas: Mapping[int, ChoiceDelta], **more: Any
    ) -> dict[str, Any]:
        """Some deltas of a stream."""
        choices = [
            context.choice(
                index,
                delta,
                delta={"content": delta.text} if delta.text else {},
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
                message={"role": "assistant", "content": delta.text, "refusal": None},
                logprobs=_chat_logprobs(context, delta),
            )
            for index, delta in deltas.items()
        ]
        return context.object("chat.completion", choices, **more)


def usage(*, num_prompt: int, num_generated: int) -> dict[str, int]:
    """Token counts: the prompt once, and all generated tokens, including those that a stop cut."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }


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
    ]
    return {"content": content, "refusal": None}


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
