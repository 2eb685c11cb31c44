"""`RequestParser`: parses and checks request bodies. Pure; decides what is rejected.

All of OpenAI's forms become one `CompletionRequest`. A field that would change the answer and is
not supported is rejected by name: no client must believe that it took effect.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from equipoise.gateway.completion_request import CompletionRequest
from equipoise.gateway.errors import ContextLengthExceededError, NoRankError, UnknownModelError
from equipoise.gateway.fields import Fields, shown
from equipoise.gateway.prompts import CHAT_PROMPT_FIELDS, PromptReader, begins_texts
from equipoise.gateway.reasoning import REASONING_END, ReasoningParser
from equipoise.gateway.responses_form import REPEATED_FIELDS
from equipoise.gateway.responses_input import messages_of_input, text_format_of
from equipoise.gateway.sampling_fields import (
    SamplingDefaults,
    check_num_logprobs,
    logit_bias_of,
    num_logprobs_of,
    prompt_logprobs_of,
    sampling_of,
    stops_of,
    tokens_of,
)
from equipoise.gateway.settings import GatewaySettings
from equipoise.gateway.structured_fields import GRAMMAR_FIELDS, check_end, grammar_of
from equipoise.gateway.tokenizer import Tokenizer
from equipoise.gateway.tool_fields import TOOL_FIELDS, ToolUse, tool_use_of, tools_of
from equipoise.wire.inference_messages import MAX_LISTED_TOKENS, MAX_LOGPROBS, Grammar

DEFAULT_MAX_TOKENS = 16
"""Tokens of a completion without `max_tokens`, as at OpenAI."""

MAX_CHOICES = 16
"""Choices for one prompt; each is a request of its own to the ranks."""

MAX_ALL_CHOICES = 1024
"""Choices for all prompts of a request together."""

_EITHER = frozenset(
    {
        *("model", "max_tokens", "stop", "stream", "stream_options", "n", "logprobs", "seed"),
        *("temperature", "top_p", "presence_penalty", "frequency_penalty"),
        # Not OpenAI's, but common among servers of open models.
        *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos"),
        *("return_token_ids", "logit_bias", "min_tokens", "skip_special_tokens", "prompt_logprobs"),
        # These do not affect the answer.
        *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *GRAMMAR_FIELDS,
    }
)
_OF_COMPLETIONS = _EITHER | {"prompt", "add_special_tokens", "echo", "best_of"}
_OF_CHATS = _EITHER | CHAT_PROMPT_FIELDS | TOOL_FIELDS | {"max_completion_tokens", "top_logprobs"}
_OF_RESPONSES = (
    _EITHER
    - {"max_tokens", "n", "logprobs", "prompt_logprobs", "return_token_ids", *GRAMMAR_FIELDS}
    | REPEATED_FIELDS
    | {"input", "chat_template_kwargs"}
)

# Fields that are not supported, with the values that change nothing and so are accepted.
_COMPLETIONS_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
}
_CHATS_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}

_RESPONSES_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # Nothing is kept, so there is nothing to continue.
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "include": ([],),
    "max_tool_calls": (),
    "prompt": (),
    "reasoning": ({}, {"effort": None, "summary": None}),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}

_REMEDIES = {
    "functions": "send tools",
    "function_call": "send tool_choice",
    "previous_response_id": "send the earlier output as part of input",
    "conversation": "send the earlier items as part of input",
    "store": "responses are not kept here",
    "reasoning_effort": "send chat_template_kwargs, if the template has a setting for it",
    "background": "wait for the response, or stream it",
    "truncation": "shorten the input",
}

_NOTHING: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
_NO_TOOLS = ToolUse()


class RequestParser:
    """Parses requests for one model.

    `context_length` is the most tokens of prompt and output together; 0 if unknown.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        tokenizer: Tokenizer,
        prompts: PromptReader,
        defaults: SamplingDefaults,
        context_length: Callable[[], int],
    ) -> None:
        self._context_length = context_length
        self._settings = settings
        self._model = settings.model_name
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._defaults = defaults

    def completion(self, body: bytes) -> CompletionRequest:
        """Parse the body of `POST /v1/completions`.

        Raises:
            InvalidRequestError: it cannot be served; names the field and what is allowed.
            UnknownModelError: it is for another model.
        """
        fields = Fields.of_body(body)
        self._check(fields, known=_OF_COMPLETIONS, unsupported=_COMPLETIONS_UNSUPPORTED)
        most, default = self._settings.max_tokens, DEFAULT_MAX_TOKENS
        echo = fields.flag("echo")
        return self._request(
            fields,
            prompts=self._prompts.completion(fields),
            max_tokens=fields.whole(
                "max_tokens", least=0 if echo else 1, most=most, default=min(default, most)
            ),
            logprobs=num_logprobs_of(fields, "logprobs"),
            echo=echo,
        )

    def chat(self, body: bytes) -> CompletionRequest:
        """Parse the body of `POST /v1/chat/completions`.

        Raises:
            InvalidRequestError: it cannot be served; names the field and what is allowed.
            UnknownModelError: it is for another model.
        """
        fields = Fields.of_body(body)
        self._check(fields, known=_OF_CHATS, unsupported=_CHATS_UNSUPPORTED)
        tools = tool_use_of(fields, parser=self._settings.tool_call_parser)
        prompt = self._prompts.chat(fields, tools=tools.tools)
        logprobs = None
        if fields.flag("logprobs"):
            logprobs = fields.whole("top_logprobs", least=0, most=MAX_LOGPROBS, default=0)
        elif "top_logprobs" in fields:
            raise fields.reject("top_logprobs", "needs logprobs: true")
        return self._request(
            fields,
            prompts=(prompt,),
            splits_reasoning=self._begins_with_reasoning(prompt),
            tools=tools,
            max_tokens=self._chat_tokens(fields, num_prompt=len(prompt)),
            logprobs=logprobs,
        )

    def response(self, body: bytes) -> CompletionRequest:
        """Parse the body of `POST /v1/responses`.

        Raises:
            InvalidRequestError: it cannot be served; names the field and what is allowed.
            UnknownModelError: it is for another model.
        """
        fields = Fields.of_body(body)
        self._check(fields, known=_OF_RESPONSES, unsupported=_RESPONSES_UNSUPPORTED)
        tools = tool_use_of(fields, parser=self._settings.tool_call_parser, is_flat=True)
        messages = messages_of_input(fields)
        prompt = self._prompts.conversation(fields, "input", messages, tools=tools.tools)
        limits = ("max_output_tokens",)
        request = self._request(
            fields,
            prompts=(prompt,),
            splits_reasoning=self._begins_with_reasoning(prompt),
            grammar=text_format_of(fields),
            tools=tools,
            max_tokens=self._chat_tokens(fields, num_prompt=len(prompt), names=limits),
            logprobs=None,
        )
        repeated = {name: fields.get(name) for name in REPEATED_FIELDS if name in fields}
        return replace(request, repeated=repeated)

    def tokenized(self, body: bytes) -> dict[str, Any]:
        """Answer `POST /tokenize`: the tokens of a prompt or of messages.

        Raises:
            InvalidRequestError: the body is invalid; names the field.
        """
        fields = Fields.of_body(body)
        known = CHAT_PROMPT_FIELDS | {"model", "prompt", "tools", "add_special_tokens"}
        self._check(fields, known=known)
        begins = begins_texts(fields)
        if "messages" in fields:
            tokens = self._prompts.chat(fields, tools=tools_of(fields))
        elif isinstance(text := fields.get("prompt"), str):
            tokens = self._prompts.encoded(fields, "prompt", text, begins=begins)
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
        tokens = tokens_of(fields, "tokens", vocab_size=self._tokenizer.vocab_size)
        return {"prompt": self._tokenizer.decode(tokens)}

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
                remedy = f": {_REMEDIES[name]}" if name in _REMEDIES else ""
                raise fields.reject(name, f"{shown(fields.get(name))} is not supported{remedy}")
        wanted = fields.get("model")
        if wanted is not None and wanted != self._model:
            raise UnknownModelError(
                f"the model {shown(wanted)} is not served here; use {self._model}", param="model"
            )

    def _request(
        self,
        fields: Fields,
        *,
        prompts: tuple[tuple[int, ...], ...],
        max_tokens: int,
        logprobs: int | None,
        echo: bool = False,
        splits_reasoning: bool = False,
        tools: ToolUse = _NO_TOOLS,
        grammar: Grammar | None = None,
    ) -> CompletionRequest:
        vocab_size = self._tokenizer.vocab_size
        self._check_context(num_prompt=max(map(len, prompts)), max_tokens=max_tokens)
        stream = fields.flag("stream")
        num_best = fields.whole("n", least=1, most=MAX_CHOICES, default=1)
        num_choices = fields.whole("best_of", least=num_best, most=MAX_CHOICES, default=num_best)
        if len(prompts) * num_choices > MAX_ALL_CHOICES:
            raise fields.reject(
                "best_of" if num_choices > num_best else "n",
                f"times {len(prompts)} prompts is more than {MAX_ALL_CHOICES} choices",
            )
        if stream and num_choices > num_best:
            raise fields.reject("best_of", "must equal n in a stream: the best are known last")
        prompt_logprobs, shows_prompt_logprobs = prompt_logprobs_of(
            fields, stream=stream, echoed=logprobs if echo else None
        )
        check_num_logprobs(
            fields,
            num_scored=sum(map(len, prompts)) * num_choices,
            prompt_logprobs=prompt_logprobs,
            num_generated=0 if stream else len(prompts) * num_choices * max_tokens,
            logprobs=logprobs,
        )
        # The best choices are found by the logprobs of their tokens.
        sampled_logprobs = 0 if logprobs is None and num_choices > num_best else logprobs
        stop_tokens = frozenset(tokens_of(fields, "stop_token_ids", vocab_size=vocab_size))
        if not fields.flag("ignore_eos"):
            stop_tokens |= self._tokenizer.end_tokens
        if len(stop_tokens) > MAX_LISTED_TOKENS:
            raise fields.reject(
                "stop_token_ids", f"must be at most {MAX_LISTED_TOKENS} with the end tokens"
            )
        min_tokens = fields.whole("min_tokens", least=0, most=max_tokens, default=0)
        if min_tokens and len(stop_tokens) == vocab_size:
            raise fields.reject("min_tokens", "cannot be reached: every token is a stop token")
        grammar = grammar or grammar_of(fields)
        if grammar is not None and tools.form is not None:
            raise fields.reject(
                "tools", "cannot be called in an output that must match a grammar: send one of both"
            )
        grammar = grammar or tools.grammar
        if grammar is not None:
            check_end(fields, has_end=bool(self._tokenizer.end_tokens), min_tokens=min_tokens)
            # As at vLLM, reasoning need not match.
            grammar = replace(grammar, after=REASONING_END) if splits_reasoning else grammar
        include_usage, continuous_usage = _usage_options(fields, stream=stream)
        return CompletionRequest(
            prompts=prompts,
            max_tokens=max_tokens,
            num_choices=num_choices,
            num_best=num_best,
            sampling=sampling_of(fields, logprobs=sampled_logprobs, defaults=self._defaults),
            has_seed="seed" in fields,
            show_logprobs=logprobs is not None,
            logit_bias=logit_bias_of(fields, vocab_size=vocab_size),
            grammar=grammar,
            min_tokens=min_tokens,
            prompt_logprobs=prompt_logprobs,
            show_prompt_logprobs=shows_prompt_logprobs,
            echo=echo,
            stops=stops_of(fields),
            stop_tokens=stop_tokens,
            stream=stream,
            include_usage=include_usage,
            continuous_usage=continuous_usage,
            return_token_ids=fields.flag("return_token_ids"),
            with_special="skip_special_tokens" in fields and not fields.flag("skip_special_tokens"),
            splits_reasoning=splits_reasoning,
            tools=tools,
        )

    def _begins_with_reasoning(self, prompt: tuple[int, ...]) -> bool:
        """Whether a chat's output does; templates may put the end of none into the prompt."""
        if self._settings.reasoning_parser is ReasoningParser.NONE:
            return False
        end = self._tokenizer.decode(prompt[-2 * len(REASONING_END) :])
        return not end.rstrip().endswith(REASONING_END)

    def _check_context(self, *, num_prompt: int, max_tokens: int) -> None:
        most, total = self._context_length(), num_prompt + max_tokens
        if 0 < most < total:
            raise ContextLengthExceededError(
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} add up to {total} tokens, "
                f"more than the context of {most}: shorten the prompt, or ask for fewer tokens"
            )

    def _chat_tokens(
        self,
        fields: Fields,
        *,
        num_prompt: int,
        names: tuple[str, ...] = ("max_tokens", "max_completion_tokens"),
    ) -> int:
        """The answer's limit, by one of several names, or what the context leaves."""
        found = [name for name in names if name in fields]
        most = self._settings.max_tokens
        if len(found) == 2:
            raise fields.reject(
                "max_tokens", "and max_completion_tokens are the same setting: send one"
            )
        if found:
            return fields.whole(found[0], least=1, most=most, default=most)
        context_length = self._context_length()
        if not context_length:
            raise NoRankError(
                f"no rank has reported its context length: try again later, or send {names[0]}"
            )
        return max(1, min(most, context_length - num_prompt))


def _usage_options(fields: Fields, *, stream: bool) -> tuple[bool, bool]:
    """Whether a stream ends with token counts, and whether its other events have them."""
    value = fields.get("stream_options")
    if value is None:
        return False, False
    if not isinstance(value, dict):
        raise fields.reject("stream_options", "must be an object")
    options = Fields(value, path="stream_options.")
    options.only({"include_usage", "continuous_usage_stats", "include_obfuscation"})
    if not stream:
        raise fields.reject("stream_options", "needs stream: true")
    include_usage = options.flag("include_usage")
    return include_usage, options.flag("continuous_usage_stats") and include_usage
