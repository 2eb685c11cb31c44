"""OpenAI's objects that answers are told in: of completions, of chats, and of errors. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.gateway.attempt import Finish
from equipoise.gateway.choice import TokenText
from equipoise.gateway.errors import RequestError
from equipoise.gateway.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity; this is what OpenAI's own server says of what cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What is told of one choice at a time: a piece of it in a stream, or all of it.

    `spelled` is None where no probabilities are asked for, `token_ids` where no ids are.
    """

    index: int
    text: str
    finish: Finish | None
    spelled: Sequence[TokenText] | None
    token_ids: Sequence[int] | None

    def choice(self, **more: Any) -> dict[str, Any]:
        """What the choices of both forms have in common, and what else."""
        made = {"index": self.index, **more, "finish_reason": self.finish}
        if self.token_ids is not None:
            made["token_ids"] = list(self.token_ids)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What all objects of one answer have in common. `created_s` is unix time."""

    answer_id: str
    model: str
    created_s: int
    tokenizer: Tokenizer

    def object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An object of this answer."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
            **more,
        }


class CompletionForm:
    """How `/v1/completions` tells an answer."""

    prefix = "cmpl"

    def opening(self, *_: object) -> None:
        """What goes before a choice's first piece in a stream: nothing."""
        return

    def whole(self, answer: Answer, told: Sequence[Told], **more: Any) -> dict[str, Any]:
        """All choices at once, or pieces of some in a stream: completions make no difference."""
        return answer.object("text_completion", [self._choice(answer, t) for t in told], **more)

    part = whole

    def _choice(self, answer: Answer, told: Told) -> dict[str, Any]:
        spelled, logprobs = told.spelled, None
        if spelled is not None:
            name = _Namer(answer.tokenizer)
            logprobs = {
                "tokens": [name(one.token) for one in spelled],
                "token_logprobs": [_finite(one.logprob.value) for one in spelled],
                "top_logprobs": [
                    {name(token): _finite(value) for token, value in one.logprob.top}
                    for one in spelled
                ],
                "text_offset": [one.offset for one in spelled],
            }
        return told.choice(text=told.text, logprobs=logprobs)


class ChatForm:
    """How `/v1/chat/completions` tells an answer."""

    prefix = "chatcmpl"

    def opening(self, answer: Answer, index: int) -> dict[str, Any]:
        """A stream's choice begins with who speaks."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return answer.object("chat.completion.chunk", [choice])

    def part(self, answer: Answer, told: Sequence[Told], **more: Any) -> dict[str, Any]:
        """Pieces of choices in a stream."""
        choices = [
            t.choice(
                delta={"content": t.text} if t.text else {}, logprobs=_chat_logprobs(answer, t)
            )
            for t in told
        ]
        return answer.object("chat.completion.chunk", choices, **more)

    def whole(self, answer: Answer, told: Sequence[Told], **more: Any) -> dict[str, Any]:
        """All choices at once."""
        choices = [
            t.choice(
                message={"role": "assistant", "content": t.text, "refusal": None},
                logprobs=_chat_logprobs(answer, t),
            )
            for t in told
        ]
        return answer.object("chat.completion", choices, **more)


def usage(*, num_prompt: int, num_made: int) -> dict[str, int]:
    """Tokens counted: the prompt once, and all that the model made, also what a stop cut off."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_made,
        "total_tokens": num_prompt + num_made,
    }


def model_object(model: str, *, created_s: int) -> dict[str, Any]:
    """A model as `/v1/models` tells it."""
    return {"id": model, "object": "model", "created": created_s, "owned_by": "equipoise"}


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


def _chat_logprobs(answer: Answer, told: Told) -> dict[str, Any] | None:
    if told.spelled is None:
        return None
    name = _Namer(answer.tokenizer)

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": name(token),
            "logprob": _finite(logprob),
            "bytes": list(answer.tokenizer.bytes_of[token]),
        }

    content = [
        {
            **entry(one.token, one.logprob.value),
            "top_logprobs": [entry(token, value) for token, value in one.logprob.top],
        }
        for one in told.spelled
    ]
    return {"content": content, "refusal": None}


class _Namer:
    """Tokens as texts; one that is no whole character is told by its bytes, as OpenAI does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.bytes_of

    def __call__(self, token: int) -> str:
        data = self._bytes_of[token]
        if not data:
            return f"<token {token}>"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
