"""The input of `/v1/responses`: what of OpenAI's form is supported, as templates take it. Pure."""

from typing import Any

from equipoise.gateway.chat_template import Messages
from equipoise.gateway.errors import InvalidRequestError
from equipoise.gateway.fields import Fields, shown
from equipoise.gateway.openai_messages import arguments_of, content_of, string_of
from equipoise.gateway.structured_fields import json_schema_of, shape_of
from equipoise.wire.inference_messages import Grammar

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text")

# Items of our own answers, which clients send back, have these too.
_OF_ANY_ITEM = frozenset({"type", "id", "status"})


def messages_of_input(fields: Fields) -> Messages:
    """The conversation in `instructions` and `input`.

    Raises:
        InvalidRequestError: an item is invalid or not supported; names the field.
    """
    messages: Messages = []
    if "instructions" in fields:
        messages.append({"role": "system", "content": string_of(fields, "instructions")})
    value = fields.get("input")
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise fields.reject("input", "must be a string or a list of at least one item")
    for index, item in enumerate(value):
        _add(messages, item, path=f"input[{index}]")
    return messages


def _add(messages: Messages, value: Any, *, path: str) -> None:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} must be an object", param=path)
    item = Fields(value, path=f"{path}.")
    kind = item.get("type") if "type" in item else "message"
    if kind == "message":
        messages.append(_message(item))
    elif kind == "function_call":
        call = _call(item)
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        item.only(_OF_ANY_ITEM | {"call_id", "output"})
        output = content_of(item, "output", kinds=_TEXT_PARTS)
        call_id = string_of(item, "call_id")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    elif kind == "reasoning":
        # It comes back with our own answers; templates of reasoning models leave it out.
        item.only(_OF_ANY_ITEM | {"summary", "content"})
    else:
        raise item.reject(
            "type",
            f"must be message, function_call, function_call_output or reasoning, not {shown(kind)}",
        )


def _message(item: Fields) -> dict[str, Any]:
    item.only(_OF_ANY_ITEM | {"role", "content"})
    role = item.get("role")
    if role not in _ROLES:
        raise item.reject("role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
    content = content_of(item, "content", kinds=_TEXT_PARTS)
    return {"role": "system" if role == "developer" else role, "content": content}


def _call(item: Fields) -> dict[str, Any]:
    item.only(_OF_ANY_ITEM | {"call_id", "name", "arguments"})
    function = {"name": string_of(item, "name"), "arguments": arguments_of(item)}
    return {"id": string_of(item, "call_id"), "type": "function", "function": function}


def text_format_of(fields: Fields) -> Grammar | None:
    """What `text.format` says that the answer must match; None if it is free.

    Raises:
        InvalidRequestError: `text` is invalid.
    """
    value = fields.get("text")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fields.reject("text", "must be an object")
    text = Fields(value, path="text.")
    text.only({"format", "verbosity"})
    if "verbosity" in text and text.get("verbosity") != "medium":
        raise text.reject("verbosity", f"{shown(text.get('verbosity'))} is not supported")
    if "format" not in text:
        return None
    if not isinstance(text.get("format"), dict):
        raise text.reject("format", "must be an object")
    options = Fields(text.get("format"), path="text.format.")
    if options.get("type") == "json_schema":
        options.only({"type", "name", "description", "schema", "strict"})
        return json_schema_of(options, "schema")
    return shape_of(options)
