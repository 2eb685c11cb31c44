"""`PromptReader`: the prompts of a request as tokens, from text, token ids or messages."""

from collections.abc import Sequence
from typing import Any

from equipoise.gateway.chat_template import ChatTemplate, Messages
from equipoise.gateway.errors import ContextLengthExceededError, InvalidRequestError
from equipoise.gateway.fields import Fields, is_whole
from equipoise.gateway.openai_messages import messages_of
from equipoise.gateway.sampling_fields import tokens_of
from equipoise.gateway.settings import GatewaySettings
from equipoise.gateway.tokenizer import Tokenizer

MAX_PROMPTS = 1024
"""Prompts of one request."""

CHAT_PROMPT_FIELDS = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
)
"""The fields that `PromptReader.chat` reads."""


class PromptReader:
    """Reads the prompts of requests for one model."""

    def __init__(
        self, settings: GatewaySettings, *, tokenizer: Tokenizer, template: ChatTemplate | None
    ) -> None:
        self._model = settings.model_name
        self._most = settings.max_prompt_tokens
        self._tokenizer = tokenizer
        self._template = template

    def completion(self, fields: Fields) -> tuple[tuple[int, ...], ...]:
        """The prompts in `prompt`: one or a list, each a string or token ids.

        Strings begin with the tokens that begin every text, unless `add_special_tokens` is false.

        Raises:
            InvalidRequestError: it is invalid, or has too many prompts or tokens.
        """
        value, begins = fields.get("prompt"), begins_texts(fields)
        is_batch = isinstance(value, list) and value and isinstance(value[0], str | list)
        if not is_batch:
            return (self._prompt(fields, "prompt", value, begins=begins),)
        if len(value) > MAX_PROMPTS:
            raise fields.reject("prompt", f"must have at most {MAX_PROMPTS} prompts")
        return tuple(
            self._prompt(fields, f"prompt[{index}]", one, begins=begins)
            for index, one in enumerate(value)
        )

    def chat(self, fields: Fields, *, tools: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        """The prompt that the model's chat template makes of messages, with these tools.

        Raises:
            InvalidRequestError: a field is invalid, or the model has no template.
        """
        continues = fields.flag("continue_final_message")
        generates = "add_generation_prompt" not in fields or fields.flag("add_generation_prompt")
        if continues and "add_generation_prompt" in fields and generates:
            raise fields.reject(
                "continue_final_message", "and add_generation_prompt cannot both be true"
            )
        return self.conversation(
            fields,
            "messages",
            messages_of(fields),
            tools=tools,
            continues_final=continues,
            adds_prompt=generates and not continues,
        )

    def conversation(
        self,
        fields: Fields,
        name: str,
        messages: Messages,
        *,
        tools: Sequence[dict[str, Any]],
        continues_final: bool = False,
        adds_prompt: bool = True,
    ) -> tuple[int, ...]:
        """The prompt that the model's chat template makes of messages in the field `name`.

        Raises:
            InvalidRequestError: the template rejects them, or the model has no template.
        """
        if self._template is None:
            raise InvalidRequestError(
                f"{self._model} has no chat template: its checkpoint folder has neither "
                f"chat_template.jinja nor one in tokenizer_config.json; use /v1/completions"
            )
        text = self._template.render(
            messages,
            field=name,
            tools=tools,
            variables=_variables(fields),
            continues_final=continues_final,
            adds_prompt=adds_prompt,
        )
        return self.encoded(fields, name, text, begins=False)

    def encoded(self, fields: Fields, name: str, text: str, *, begins: bool) -> tuple[int, ...]:
        """The tokens of a field's text, with those that begin every text if `begins`.

        Raises:
            InvalidRequestError: it cannot be encoded, or has too many tokens.
        """
        try:
            tokens = self._tokenizer.encode(text, begins=begins)
        except UnicodeEncodeError:
            raise fields.reject(name, "contains an unpaired surrogate") from None
        self._check_length(fields, name, len(tokens))
        return tokens

    def _prompt(self, fields: Fields, name: str, value: Any, *, begins: bool) -> tuple[int, ...]:
        if isinstance(value, str):
            return self.encoded(fields, name, value, begins=begins)
        if not isinstance(value, list) or not all(is_whole(token) for token in value):
            raise fields.reject(name, "must be a string or a list of token ids")
        self._check_length(fields, name, len(value))
        return tokens_of(Fields({name: value}), name, vocab_size=self._tokenizer.vocab_size)

    def _check_length(self, fields: Fields, name: str, num_tokens: int) -> None:
        most = self._most
        if not num_tokens:
            raise fields.reject(name, f"must have 1 to {most} tokens, not 0")
        if num_tokens > most:
            raise ContextLengthExceededError(
                f"{name} must have 1 to {most} tokens, not {num_tokens}", param=name
            )


def begins_texts(fields: Fields) -> bool:
    """Whether to put the tokens that begin every text before a string."""
    return "add_special_tokens" not in fields or fields.flag("add_special_tokens")


def _variables(fields: Fields) -> dict[str, Any]:
    """What the client passes to the template."""
    value = fields.get("chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fields.reject("chat_template_kwargs", "must be an object")
    return value
