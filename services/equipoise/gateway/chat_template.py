"""`ChatTemplate`: messages to the text that the model continues, by the model's own template.

The template comes with the checkpoint and can contain code, so it runs in Jinja's sandbox, without
access to anything but its arguments.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from equipoise.gateway.errors import GatewayError, InvalidRequestError

Messages = list[dict[str, Any]]

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_FAULTS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError)


class ChatTemplate:
    """One model's template, in the dialect of Hugging Face's.

    `special` are the model's special tokens by name (bos_token and so on), which templates use.

    Raises:
        GatewayError: the template is not valid Jinja.
    """

    def __init__(self, source: str, *, special: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self._special = special
        try:
            self._template = environment.from_string(source)
            self._variables = meta.find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError as error:
            raise GatewayError(f"the chat template, line {error.lineno}: {error}") from None

    @classmethod
    def of_checkpoint(cls, folder: Path) -> "ChatTemplate | None":
        """Load the template from chat_template.jinja or tokenizer_config.json; None without one.

        Raises:
            GatewayError: a file cannot be read.
        """
        info = tokenizer_info(folder)
        if (source := info.pop("chat_template")) is None:
            return None
        return cls(source, special={name: text for name, text in info.items() if text})

    def render(
        self,
        messages: Messages,
        *,
        field: str = "messages",
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] = _NOTHING,
        adds_prompt: bool = True,
        continues_final: bool = False,
    ) -> str:
        """The text of a conversation.

        It ends with the words that begin the model's answer if `adds_prompt`, and within the last
        message if `continues_final`. `tools` are the functions that the model may call, `field`
        names what the messages came in, and `variables` are the client's own, for the template.

        Raises:
            InvalidRequestError: the template takes no tools, or rejects these messages; its own
                message.
        """
        if tools and "tools" not in self._variables:
            raise InvalidRequestError(
                "the model's chat template does not show tools to the model: serve the model with "
                "a chat_template.jinja that does",
                param="tools",
            )
        own: dict[str, Any] = {
            **self._special,
            "messages": messages,
            "add_generation_prompt": adds_prompt,
            "tools": list(tools) or None,
        }
        for name in variables:
            if name in own:
                raise InvalidRequestError(
                    f"chat_template_kwargs.{name} is set by the gateway: leave it out",
                    param=f"chat_template_kwargs.{name}",
                )
        try:
            text = self._template.render({**variables, **own})
        # Either the template or the messages are at fault, and not the gateway.
        except _FAULTS as error:
            raise InvalidRequestError(
                f"the model's chat template rejects these messages: {error}", param=field
            ) from None
        return _up_to_end_of(messages[-1]["content"] or "", text) if continues_final else text


def tokenizer_info(folder: Path) -> dict[str, str | None]:
    """The model's special tokens and its `chat_template`, which may be in a file of its own.

    None stands for each that the model lacks.

    Raises:
        GatewayError: a file cannot be read.
    """
    path = folder / "tokenizer_config.json"
    config: Any = {}
    try:
        if path.exists():
            config = json.loads(path.read_text(encoding="utf-8"))
        special = {name: _content(config.get(name)) for name in _SPECIAL}
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.exists() else _default(config)
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise GatewayError(f"{path}: cannot be read: {error}") from None
    return {**special, "chat_template": source}


def _up_to_end_of(content: str, text: str) -> str:
    """A conversation without what the template adds after the last message, as transformers cuts.

    Templates may strip a message's white space.
    """
    begin = text.rfind(content.strip())
    if begin < 0:
        raise InvalidRequestError(
            "the model's chat template changes the last message, which then cannot be continued",
            param="continue_final_message",
        )
    whole = begin + len(content.lstrip())
    return (
        text[:whole]
        if text[begin:whole] == content.lstrip()
        else text[: begin + len(content.strip())]
    )


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse up to `{% endgeneration %}`."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def _default(config: dict[str, Any]) -> str | None:
    """The template, or the one named default of several."""
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {one["name"]: one["template"] for one in template}
        template = by_name.get("default")
    if template is not None and not isinstance(template, str):
        raise TypeError("chat_template is not a string")
    return template


def _content(value: Any) -> str | None:
    """A special token's text: the value itself, or in an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(form: str) -> str:
    """The time now in local time, for templates that name the date."""
    return datetime.now().astimezone().strftime(form)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
