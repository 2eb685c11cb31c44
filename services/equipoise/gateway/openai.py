"""OpenAI's form of requests, answers and errors. Pure; decides what is served and what is refused.

A field that would change the answer, and that the ranks cannot honour, is refused with its name:
a client must not believe that it was heeded.
"""

import json
from dataclasses import dataclass
from typing import Any

from equipoise.gateway.attempt import Finish
from equipoise.gateway.errors import InvalidRequestError, RequestError, UnknownModelError
from equipoise.gateway.tokenizer import ByteTokenizer

DEFAULT_MAX_TOKENS = 16
"""Tokens of a completion that does not say how many: OpenAI's figure."""

MAX_STOPS = 4
"""Stop strings a request may have: OpenAI's figure."""

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # Field → the values that ask for what is done anyway (greedy, one answer).
    "temperature": (0, None),
    "n": (1, None),
    "best_of": (1, None),
    "echo": (False, None),
    "logprobs": (None,),
    "suffix": (None, ""),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": (None, {}),
}
_IGNORED = frozenset({"user", "seed", "top_p"})  # They change nothing where tokens are greedy.
_KNOWN = frozenset(
    {
        *("model", "prompt", "max_tokens", "stop", "stream", "stream_options"),
        *("ignore_eos", "return_token_ids"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request may ask for at most."""

    max_prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A completion to be made. `stops` are strings; `include_usage` is about streams only."""

    prompt: tuple[int, ...]
    max_tokens: int
    stops: tuple[str, ...]
    stop_tokens: frozenset[int]
    stream: bool
    include_usage: bool
    return_token_ids: bool


def parse_completion(
    body: bytes, *, model: str, tokenizer: ByteTokenizer, limits: Limits
) -> CompletionRequest:
    """Read the body of `POST /v1/completions`.

    Two fields are not OpenAI's, but usual: `ignore_eos` and `return_token_ids`.

    Raises:
        InvalidRequestError: it cannot be served; names the field and what is allowed.
        UnknownModelError: it is for another model.
    """
    asked = _object(body)
    for name in asked.keys() - _KNOWN - _IGNORED - _UNSUPPORTED.keys():
        raise InvalidRequestError(f"there is no field {_shown(name)}", param=name)
    for name, allowed in _UNSUPPORTED.items():
        if name in asked and asked[name] not in allowed:
            raise InvalidRequestError(
                f"{name} {_shown(asked[name])} is not supported: tokens are greedy and a request "
                f"has one answer; leave it out or send {json.dumps(allowed[0])}",
                param=name,
            )
    wanted = asked.get("model", model)
    if wanted != model:
        raise UnknownModelError(
            f"the model {_shown(wanted)} is not served here, {model} is", param="model"
        )
    stream = _flag(asked, "stream")
    ends = tokenizer.end_token is not None and not _flag(asked, "ignore_eos")
    return CompletionRequest(
        prompt=_prompt(asked.get("prompt"), tokenizer, limits),
        max_tokens=_max_tokens(asked.get("max_tokens"), limits),
        stops=_stops(asked.get("stop")),
        stop_tokens=frozenset({tokenizer.end_token} if ends else ()),  # type: ignore[arg-type]
        stream=stream,
        include_usage=_include_usage(asked.get("stream_options"), stream=stream),
        return_token_ids=_flag(asked, "return_token_ids"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionForm:
    """What all objects of one answer have in common. `created_s` is unix time."""

    completion_id: str
    model: str
    created_s: int
    prompt: tuple[int, ...]
    return_token_ids: bool

    def part(
        self, text: str, *, tokens: tuple[int, ...], finish: Finish | None, **more: Any
    ) -> dict[str, Any]:
        """A piece of the answer, or all of it; `more` are further fields of the object."""
        choice: dict[str, Any] = {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": finish,
        }
        if self.return_token_ids:
            choice["token_ids"] = tokens
        return self._object([choice], **more)

    def usage_part(self, num_completion_tokens: int) -> dict[str, Any]:
        """The last object of a stream whose client asked for usage."""
        return self._object([], usage=self.usage(num_completion_tokens))

    def usage(self, num_completion_tokens: int) -> dict[str, int]:
        """Tokens counted; all that the model made, also those a stop string cut off."""
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": num_completion_tokens,
            "total_tokens": len(self.prompt) + num_completion_tokens,
        }

    def _object(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.completion_id,
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
            **more,
        }


def models(model: str, *, created_s: int) -> dict[str, Any]:
    """The answer of `GET /v1/models`."""
    entry = {"id": model, "object": "model", "created": created_s, "owned_by": "equipoise"}
    return {"object": "list", "data": [entry]}


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


def _object(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequestError("the body is not JSON") from None
    if not isinstance(document, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return document


def _prompt(value: Any, tokenizer: ByteTokenizer, limits: Limits) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        (value,) = value
    if isinstance(value, str):
        try:
            tokens = tokenizer.encode(value)
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "prompt has half of a surrogate pair, which is no character", param="prompt"
            ) from None
    elif isinstance(value, list) and all(_is_whole(token) for token in value):
        tokens = tuple(value)
    else:
        raise InvalidRequestError(
            "prompt must be a string or a list of token ids (one prompt a request)", param="prompt"
        )
    if not 1 <= len(tokens) <= limits.max_prompt_tokens:
        raise InvalidRequestError(
            f"prompt must have 1 to {limits.max_prompt_tokens} tokens, not {len(tokens)}",
            param="prompt",
        )
    for token in tokens:
        if not 0 <= token < tokenizer.vocab_size:
            raise InvalidRequestError(
                f"prompt: tokens are 0 to {tokenizer.vocab_size - 1}, not {_shown(token)}",
                param="prompt",
            )
    return tokens


def _max_tokens(value: Any, limits: Limits) -> int:
    if value is None:
        return min(DEFAULT_MAX_TOKENS, limits.max_tokens)
    if not _is_whole(value) or not 1 <= value <= limits.max_tokens:
        raise InvalidRequestError(
            f"max_tokens must be a whole number from 1 to {limits.max_tokens}, not {_shown(value)}",
            param="max_tokens",
        )
    return int(value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str) and stop for stop in stops)
    ):
        raise InvalidRequestError(
            f"stop must be a string or up to {MAX_STOPS} of them, none of them empty", param="stop"
        )
    return tuple(stops)


def _include_usage(value: Any, *, stream: bool) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict) or value.keys() - {"include_usage"}:
        raise InvalidRequestError(
            "stream_options may have include_usage only", param="stream_options"
        )
    if not stream:
        raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
    return _flag(value, "include_usage")


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be true or false, not {_shown(value)}", param=name)
    return bool(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """A client's value, short enough for a message."""
    words = json.dumps(value)
    return words if len(words) <= 60 else words[:59] + "…"
