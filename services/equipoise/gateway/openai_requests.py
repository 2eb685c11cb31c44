"""`RequestParser`: parses and checks request bodies. Pure; decides what is rejected.

Both of OpenAI's forms become one `CompletionRequest`. A field that would change the answer and is
not supported is rejected by name: no client must believe that it took effect.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from equipoise.gateway.chat_template import ChatTemplate
from equipoise.gateway.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    NoRankError,
    UnknownModelError,
)
from equipoise.gateway.fields import Fields, is_whole, shown
from equipoise.gateway.openai_messages import messages_of
from equipoise.gateway.settings import GatewaySettings
from equipoise.gateway.tokenizer import Tokenizer
from equipoise.wire.inference import Sampling

DEFAULT_MAX_TOKENS = 16
"""Tokens of a completion without `max_tokens`, as at OpenAI."""

MAX_STOPS = 256
"""Stop strings of a request; OpenAI takes 4."""

MAX_CHOICES = 16
"""Choices for one prompt; each is a request of its own to the ranks."""

MAX_LOGPROBS = 20
"""Maximum `top_logprobs`: OpenAI's limit for chats, and the ranks'."""

MIN_TEMPERATURE = 0.01
"""A lower temperature other than 0 is raised to this, as vLLM does."""

_EITHER = frozenset(
    {
        *("model", "max_tokens", "stop", "stream", "stream_options", "n", "logprobs", "seed"),
        *("temperature", "top_p", "presence_penalty", "frequency_penalty"),
        # Not OpenAI's, but common among servers of open models.
        *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos"),
        "return_token_ids",
        # These do not affect the answer.
        *("user", "metadata", "safety_identifier", "prompt_cache_key"),
    }
)
_OF_COMPLETIONS = _EITHER | {"prompt", "echo"}
_OF_CHATS = _EITHER | {"messages", "max_completion_tokens", "top_logprobs"}

# Fields that are not supported, with the values that change nothing and so are accepted.
_COMPLETIONS_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
}
_CHATS_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}

_NOTHING: Mapping[str, tuple[Any, ...]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A checked request for text."""

    prompt: tuple[int, ...]
    """Token ids."""

    max_tokens: int
    """Maximum number of tokens to generate, per choice."""

    num_choices: int
    """Answers to the one prompt."""

    sampling: Sampling
    """How tokens are chosen; choice i uses `seed + i`."""

    echo: str
    """Text to put before each answer."""

    stops: tuple[str, ...]
    """Strings that end a choice."""

    stop_tokens: frozenset[int]
    """Tokens that end a choice."""

    stream: bool
    """Whether to send server-sent events."""

    include_usage: bool
    """Whether a stream ends with token counts."""

    return_token_ids: bool
    """Whether choices have their token ids."""


class RequestParser:
    """Parses requests for one model.

    `context_length` is the most tokens of prompt and output together; 0 if unknown.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        context_length: Callable[[], int],
    ) -> None:
        self._context_length = context_length
        self._settings = settings
        self._model = settings.model_name
        self._tokenizer = tokenizer
        self._template = template

    def completion(self, body: bytes) -> CompletionRequest:
        """Parse the body of `POST /v1/completions`.

        Raises:
            InvalidRequestError: it cannot be served; names the field and what is allowed.
            UnknownModelError: it is for another model.
        """
        fields = Fields.of_body(body)
        self._check(fields, known=_OF_COMPLETIONS, unsupported=_COMPLETIONS_UNSUPPORTED)
        prompt = self._prompt(fields)
        most, default = self._settings.max_tokens, DEFAULT_MAX_TOKENS
        logprobs = None
        if "logprobs" in fields:
            logprobs = fields.whole("logprobs", least=0, most=MAX_LOGPROBS, default=0)
        echo = fields.flag("echo")
        if echo and logprobs is not None:
            raise fields.reject("echo", "is not supported with logprobs: prompts have no logprobs")
        return self._request(
            fields,
            prompt=prompt,
            max_tokens=fields.whole("max_tokens", least=1, most=most, default=min(default, most)),
            logprobs=logprobs,
            echo=self._tokenizer.decode(prompt) if echo else "",
        )

    def chat(self, body: bytes) -> CompletionRequest:
        """Parse the body of `POST /v1/chat/completions`.

        Raises:
            InvalidRequestError: it cannot be served; names the field and what is allowed.
            UnknownModelError: it is for another model.
        """
        fields = Fields.of_body(body)
        self._check(fields, known=_OF_CHATS, unsupported=_CHATS_UNSUPPORTED)
        prompt = self._chat_prompt(fields)
        logprobs = None
        if fields.flag("logprobs"):
            logprobs = fields.whole("top_logprobs", least=0, most=MAX_LOGPROBS, default=0)
        elif "top_logprobs" in fields:
            raise fields.reject("top_logprobs", "needs logprobs: true")
        return self._request(
            fields,
            prompt=prompt,
            max_tokens=self._chat_tokens(fields, num_prompt=len(prompt)),
            logprobs=logprobs,
        )

    def tokenized(self, body: bytes) -> dict[str, Any]:
        """Answer `POST /tokenize`: the tokens of a prompt or of messages.

        Raises:
            InvalidRequestError: the body is invalid; names the field.
        """
        fields = Fields.of_body(body)
        self._check(fields, known=frozenset({"model", "prompt", "messages", "add_special_tokens"}))
        begins = "add_special_tokens" not in fields or fields.flag("add_special_tokens")
        if "messages" in fields:
            tokens = self._chat_prompt(fields)
        elif isinstance(text := fields.get("prompt"), str):
            tokens = self._encoded(fields, "prompt", text, begins=begins)
        else:
            raise fields.reject("prompt", "must be a string, unless there are messages")
        return {
            "count": len(tokens),
            "max_model_len": self._context_length() or None,
            "tokens": list(tokens),
        }

    def detokenized(self, body: bytes) -> dict[str, Any]:
        """Answer `POST /detokenize`: the text of tokens.

        Raises:
            InvalidRequestError: the body is invalid; names the field.
        """
        fields = Fields.of_body(body)
        self._check(fields, known=frozenset({"model", "tokens"}))
        tokens = _tokens(fields, "tokens", self._tokenizer.vocab_size)
        return {"prompt": self._tokenizer.decode(tokens)}

    def _chat_prompt(self, fields: Fields) -> tuple[int, ...]:
        if self._template is None:
            raise InvalidRequestError(
                f"{self._model} has no chat template: its checkpoint folder has neither "
                f"chat_template.jinja nor one in tokenizer_config.json; use /v1/completions"
            )
        text = self._template.render(messages_of(fields))
        return self._encoded(fields, "messages", text, begins=False)

    def _check(
        self,
        fields: Fields,
        *,
        known: frozenset[str],
        unsupported: Mapping[str, tuple[Any, ...]] = _NOTHING,
    ) -> None:
        fields.only({*known, *unsupported})
        for name, allowed in unsupported.items():
            if name in fields and fields.get(name) not in allowed:
                raise fields.reject(name, f"{shown(fields.get(name))} is not supported")
        wanted = fields.get("model")
        if wanted is not None and wanted != self._model:
            raise UnknownModelError(
                f"the model {shown(wanted)} is not served here; use {self._model}", param="model"
            )

    def _request(
        self,
        fields: Fields,
        *,
        prompt: tuple[int, ...],
        max_tokens: int,
        logprobs: int | None,
        echo: str = "",
    ) -> CompletionRequest:
        self._check_context(num_prompt=len(prompt), max_tokens=max_tokens)
        stream = fields.flag("stream")
        stop_tokens = frozenset(_tokens(fields, "stop_token_ids", self._tokenizer.vocab_size))
        if not fields.flag("ignore_eos"):
            stop_tokens |= self._tokenizer.end_tokens
        return CompletionRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            num_choices=fields.whole("n", least=1, most=MAX_CHOICES, default=1),
            sampling=_sampling(fields, logprobs=logprobs),
            echo=echo,
            stops=_stops(fields),
            stop_tokens=stop_tokens,
            stream=stream,
            include_usage=_include_usage(fields, stream=stream),
            return_token_ids=fields.flag("return_token_ids"),
        )

    def _prompt(self, fields: Fields) -> tuple[int, ...]:
        value = fields.get("prompt")
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
            (value,) = value
        if isinstance(value, str):
            return self._encoded(fields, "prompt", value, begins=True)
        if not isinstance(value, list) or not all(is_whole(token) for token in value):
            raise fields.reject(
                "prompt", "must be a string or a list of token ids (one prompt per request)"
            )
        self._check_length(fields, "prompt", len(value))
        return _tokens(Fields({"prompt": value}), "prompt", self._tokenizer.vocab_size)

    def _encoded(self, fields: Fields, name: str, text: str, *, begins: bool) -> tuple[int, ...]:
        try:
            tokens = self._tokenizer.encode(text, begins=begins)
        except UnicodeEncodeError:
            raise fields.reject(name, "contains an unpaired surrogate") from None
        self._check_length(fields, name, len(tokens))
        return tokens

    def _check_length(self, fields: Fields, name: str, num_tokens: int) -> None:
        most = self._settings.max_prompt_tokens
        if not num_tokens:
            raise fields.reject(name, f"must have 1 to {most} tokens, not 0")
        if num_tokens > most:
            raise ContextLengthExceededError(
                f"{name} must have 1 to {most} tokens, not {num_tokens}", param=name
            )

    def _check_context(self, *, num_prompt: int, max_tokens: int) -> None:
        most, total = self._context_length(), num_prompt + max_tokens
        if 0 < most < total:
            raise ContextLengthExceededError(
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} add up to {total} tokens, "
                f"more than the context of {most}: shorten the prompt, or ask for fewer tokens"
            )

    def _chat_tokens(self, fields: Fields, *, num_prompt: int) -> int:
        """The answer's limit, by either name, or what the context leaves."""
        names = [name for name in ("max_tokens", "max_completion_tokens") if name in fields]
        most = self._settings.max_tokens
        if len(names) == 2:
            raise fields.reject(
                "max_tokens", "and max_completion_tokens are the same setting: send one"
            )
        if names:
            return fields.whole(names[0], least=1, most=most, default=most)
        context_length = self._context_length()
        if not context_length:
            raise NoRankError(
                "no rank has reported its context length: try again later, or send max_tokens"
            )
        return max(1, min(most, context_length - num_prompt))


def _sampling(fields: Fields, *, logprobs: int | None) -> Sampling:
    number: Callable[..., float] = fields.number
    if "top_p" in fields and fields.get("top_p") == 0:
        raise fields.reject("top_p", "must be above 0: send temperature: 0 for greedy tokens")
    seed = fields.whole("seed", least=-(2**63), most=2**64 - 1, default=secrets.randbits(63))
    temperature = number("temperature", least=0, most=2, default=1)
    return Sampling(
        temperature=max(temperature, MIN_TEMPERATURE) if temperature else 0.0,
        top_p=number("top_p", least=0, most=1, default=1),
        # Some clients send -1 for all tokens.
        top_k=max(0, fields.whole("top_k", least=-1, most=2**31, default=0)),
        min_p=number("min_p", least=0, most=1, default=0),
        repetition_penalty=number("repetition_penalty", least=0.01, most=100, default=1),
        presence_penalty=number("presence_penalty", least=-2, most=2, default=0),
        frequency_penalty=number("frequency_penalty", least=-2, most=2, default=0),
        seed=seed % 2**64,
        logprobs=logprobs,
    )


def _tokens(fields: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    value = [] if fields.get(name) is None else fields.get(name)
    if not isinstance(value, list):
        raise fields.reject(name, "must be a list of token ids")
    for token in value:
        if not is_whole(token) or not 0 <= token < vocab_size:
            raise fields.reject(name, f"must have tokens 0 to {vocab_size - 1}, not {shown(token)}")
    return tuple(value)


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    is_list = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not is_list or not all(isinstance(stop, str) and stop for stop in stops):
        raise fields.reject("stop", f"must be a string or up to {MAX_STOPS} strings, not empty")
    return tuple(stops)


def _include_usage(fields: Fields, *, stream: bool) -> bool:
    value = fields.get("stream_options")
    if value is None:
        return False
    if not isinstance(value, dict):
        raise fields.reject("stream_options", "must be an object")
    options = Fields(value, path="stream_options.")
    options.only({"include_usage", "include_obfuscation"})
    if not stream:
        raise fields.reject("stream_options", "needs stream: true")
    return options.flag("include_usage")
