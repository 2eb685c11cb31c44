"""The messages of a chat: what of OpenAI's form is supported, as a template takes them. Pure."""

import json
from collections.abc import Collection
from typing import Any

from equipoise.gateway.chat_template import Messages
from equipoise.gateway.errors import InvalidRequestError
from equipoise.gateway.fields import Fields, shown

# Fields of answers' messages, which clients send back.
_EMPTY_IN_MESSAGES = ("annotations", "refusal", "audio", "function_call")
# Notes of litellm and of OpenAI's client about an answer, which they send back with the message.
_NOTES = ("provider_specific_fields", "parsed")
_ROLES = ("system", "developer", "user", "assistant", "tool")


def messages_of(fields: Fields) -> Messages:
    """The conversation in a chat's fields.

    Raises:
        InvalidRequestError: a message is invalid or not supported; names the field.
    """
    value = fields.get("messages")
    if not isinstance(value, list) or not value:
        raise fields.reject("messages", "must be a list of at least one message")
    return [_message(one, path=f"messages[{index}]") for index, one in enumerate(value)]


def _message(value: Any, *, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} must be an object", param=path)
    message = Fields(value, path=f"{path}.")
    role = message.get("role")
    if role not in _ROLES:
        raise message.reject("role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
    # Reasoning comes back with our own answers, and by another name with vLLM's; templates of
    # reasoning models leave it out.
    known = {"role", "content", "name", "reasoning_content", "reasoning", "tool_calls"}
    known |= {*_EMPTY_IN_MESSAGES, *_NOTES}
    message.only(known | {"tool_call_id"} if role == "tool" else known)
    for field in _EMPTY_IN_MESSAGES:
        if message.get(field) not in (None, []):
            raise message.reject(field, "is not supported")
    calls = _calls(message, role=role, path=path)
    # OpenAI's developer is called system in the templates of open models.
    result: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if role == "assistant" and "content" not in message:
        # It called tools, or ended before its reasoning did.
        result["content"] = None if calls else ""
    else:
        result["content"] = content_of(message)
    if calls:
        result["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        if name in message:
            result[name] = string_of(message, name)
    if role == "tool" and "tool_call_id" not in message:
        raise message.reject("tool_call_id", "must name the call that the message answers")
    return result


def _calls(message: Fields, *, role: str, path: str) -> list[dict[str, Any]]:
    """The calls that an assistant's message made, as templates take them."""
    value = [] if message.get("tool_calls") is None else message.get("tool_calls")
    if not isinstance(value, list) or (value and role != "assistant"):
        raise message.reject("tool_calls", "must be a list of calls, in an assistant's message")
    return [_call(one, path=f"{path}.tool_calls[{index}]") for index, one in enumerate(value)]


def _call(value: Any, *, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} must be an object", param=path)
    call = Fields(value, path=f"{path}.")
    # Clients that add up a stream's parts leave their index.
    call.only({"id", "type", "function", "index"})
    if call.get("type") != "function" or not isinstance(call.get("function"), dict):
        raise call.reject("type", "must be function, with a function")
    function = Fields(call.get("function"), path=f"{path}.function.")
    function.only({"name", "arguments", "parsed_arguments"})
    arguments = {"name": string_of(function, "name"), "arguments": arguments_of(function)}
    return {"id": string_of(call, "id"), "type": "function", "function": arguments}


class _Arguments(dict[str, Any]):
    """Arguments for templates of both kinds.

    Transformers' convention is a mapping, which templates write as JSON. Others, DeepSeek's own
    among them, append a string: they get the text as it came.
    """

    def __init__(self, text: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def arguments_of(function: Fields) -> dict[str, Any]:
    """A call's `arguments`, as templates take them.

    Raises:
        InvalidRequestError: they are not the text of a JSON object.
    """
    text = string_of(function, "arguments") or "{}"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise function.reject("arguments", "must be the text of a JSON object")
    return _Arguments(text, values)


def string_of(fields: Fields, name: str) -> str:
    """A field that must be a string.

    Raises:
        InvalidRequestError: it is not.
    """
    value = fields.get(name)
    if not isinstance(value, str):
        raise fields.reject(name, "must be a string")
    return value


def content_of(
    message: Fields, name: str = "content", *, kinds: Collection[str] = ("text",)
) -> str:
    """A message's text, which may be in parts of these kinds.

    Raises:
        InvalidRequestError: it is missing, or has parts of another kind.
    """
    value = message.get(name)
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise message.reject(name, "must be a string or a list of text parts")
    texts = []
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") in [*kinds]
        text = part["text"] if is_text and "text" in part else part
        if not isinstance(text, str):
            raise message.reject(name, f"must have parts of type {' or '.join(kinds)} only")
        texts.append(text)
    return "".join(texts)
