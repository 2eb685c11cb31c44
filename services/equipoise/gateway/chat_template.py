"""`ChatTemplate`: messages to the text that the model goes on with, by the model's own template.

The template comes with the checkpoint and is code of a kind, so it runs in Jinja's sandbox: it
reads what it is given, and reaches nothing else.
"""

import json
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from equipoise.gateway.errors import GatewayError, InvalidRequestError

Messages = list[dict[str, str]]


class ChatTemplate:
    """One model's template, in the dialect that Hugging Face's are written in.

    `special` are the model's special tokens by name (bos_token and so on), which templates use.

    Raises:
        GatewayError: the template is no Jinja.
    """

    def __init__(self, source: str, *, special: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        self._special = special
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise GatewayError(f"the chat template, line {error.lineno}: {error}") from None

    @classmethod
    def of_checkpoint(cls, folder: Path) -> "ChatTemplate | None":
        """The template of a checkpoint's chat_template.jinja or tokenizer_config.json, if any.

        Raises:
            GatewayError: there is one that cannot be read.
        """
        path = folder / "tokenizer_config.json"
        config: Any = {}
        try:
            if path.exists():
                config = json.loads(path.read_text(encoding="utf-8"))
            path = folder / "chat_template.jinja"
            source = path.read_text(encoding="utf-8") if path.exists() else _default(config)
        except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise GatewayError(f"{path}: this cannot be read: {error}") from None
        if source is None:
            return None
        named = {name: _content(value) for name, value in config.items() if name in _SPECIAL}
        return cls(source, special={name: text for name, text in named.items() if text})

    def render(self, messages: Messages) -> str:
        """The text of a conversation, up to where the model's answer begins.

        Raises:
            InvalidRequestError: the template refuses such messages; its own words.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._special
            )
        # What a template does to a client's messages is a template's fault or a client's.
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None


_SPECIAL = frozenset({"bos_token", "eos_token", "unk_token", "pad_token"})


def _default(config: dict[str, Any]) -> str | None:
    """The template itself, or that of several which is called default."""
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {one["name"]: one["template"] for one in template}
        template = by_name.get("default")
    if template is not None and not isinstance(template, str):
        raise TypeError("chat_template is no text")
    return template


def _content(value: Any) -> str | None:
    """A special token is a text, or an object with one."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON for models, not for HTML as Jinja's own filter makes it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
