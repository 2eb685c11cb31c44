"""The messages of a chat: what of OpenAI's form is supported, as a template takes them. Pure."""

from typing import Any

from equipoise.gateway.chat_template import Messages
from equipoise.gateway.errors import InvalidRequestError
from equipoise.gateway.fields import Fields, shown

# Fields of answers' messages, which clients send back.
_EMPTY_IN_MESSAGES = ("tool_calls", "annotations", "refusal", "audio", "function_call")
_ROLES = ("system", "developer", "user", "assistant")


def messages_of(fields: Fields) -> Messages:
    """The conversation in a chat's fields.

    Raises:
        InvalidRequestError: a message is invalid or not supported; names the field.
    """
    value = fields.get("messages")
    if not isinstance(value, list) or not value:
        raise fields.reject("messages", "must be a list of at least one message")
    return [_message(one, path=f"messages[{index}]") for index, one in enumerate(value)]


def _message(value: Any, *, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} must be an object", param=path)
    message = Fields(value, path=f"{path}.")
    # Reasoning comes back with our own answers; templates of reasoning models leave it out.
    message.only({"role", "content", "name", "reasoning_content", *_EMPTY_IN_MESSAGES})
    for field in _EMPTY_IN_MESSAGES:
        if message.get(field) not in (None, []):
            raise message.reject(field, "is not supported")
    role = message.get("role")
    if role not in _ROLES:
        raise message.reject("role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
    # OpenAI's developer is called system in the templates of open models.
    result = {"role": "system" if role == "developer" else role, "content": _content(message)}
    name = message.get("name")
    if isinstance(name, str):
        result["name"] = name
    elif name is not None:
        raise message.reject("name", "must be a string")
    return result


def _content(message: Fields) -> str:
    """A message's text, which may be in parts."""
    value = message.get("content")
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise message.reject("content", "must be a string or a list of text parts")
    texts = []
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        text = part["text"] if is_text and "text" in part else part
        if not isinstance(text, str):
            raise message.reject("content", "must have parts of type text only")
        texts.append(text)
    return "".join(texts)
