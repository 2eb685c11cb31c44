"""`tool_use_of`: which tools an answer may or must call, and how its calls are read. Pure.

A call that must be made is written as plain JSON, which a grammar guarantees. Calls that the model
makes of its own accord are in the model's format.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from equipoise.gateway.errors import InvalidRequestError
from equipoise.gateway.fields import Fields, shown
from equipoise.gateway.tool_calls import ToolCallSplit
from equipoise.gateway.tool_formats import FORMATS, PLAIN_JSON, CallFormat, ToolCallParser
from equipoise.wire.inference_messages import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
"""The fields that `tool_use_of` reads."""

MAX_TOOLS = 128
"""Tools of a request, as at OpenAI."""

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How an answer uses tools."""

    tools: tuple[dict[str, Any], ...] = ()
    """The tools that the model is shown, in the form of chats."""

    form: CallFormat | None = None
    """How its calls are written; None if it makes none."""

    function: str | None = None
    """The one function that it must call; its output is that call's arguments."""

    grammar: Grammar | None = None
    """What the output must match; None if the model may choose not to call."""

    max_calls: int | None = None
    """Calls after which an answer ends; None for any number."""

    def split(self) -> ToolCallSplit | None:
        """A new reader of one answer's calls; None if it makes none."""
        if self.form is None:
            return None
        return ToolCallSplit(self.form, max_calls=self.max_calls, function=self.function)


def tool_use_of(fields: Fields, *, parser: ToolCallParser, is_flat: bool = False) -> ToolUse:
    """The tools of a request. A tool `is_flat` in the form of `/v1/responses`.

    Raises:
        InvalidRequestError: a field is invalid, or `parser` cannot read the calls.
    """
    tools = tools_of(fields, is_flat=is_flat)
    choice: Any = _choice(fields, is_flat=is_flat) if "tool_choice" in fields else "auto"
    is_parallel = "parallel_tool_calls" not in fields or fields.flag("parallel_tool_calls")
    max_calls = None if is_parallel else 1
    if choice == "none" or (choice == "auto" and not tools):
        return ToolUse()
    if choice == "auto":
        if parser is ToolCallParser.NONE:
            known = " or ".join(sorted(FORMATS))
            raise fields.reject(
                "tools",
                f"need a gateway with --tool-call-parser ({known}), unless tool_choice is none, "
                "required or names a function",
            )
        return ToolUse(tools=tools, form=FORMATS[parser], max_calls=max_calls)
    if not tools:
        raise fields.reject("tool_choice", "needs tools")
    if choice == "required":
        grammar = _grammar(fields, _calls_schema(tools, max_calls=max_calls))
        return ToolUse(tools=tools, form=PLAIN_JSON, grammar=grammar, max_calls=max_calls)
    function, names = choice["name"], [tool["function"]["name"] for tool in tools]
    if function not in names:
        raise fields.reject("tool_choice", f"is {shown(function)}, which is not among the tools")
    tool = tools[names.index(function)]
    return ToolUse(
        tools=tools,
        form=PLAIN_JSON,
        function=function,
        grammar=_grammar(fields, _schema(tool)),
        max_calls=1,
    )


def tools_of(fields: Fields, *, is_flat: bool = False) -> tuple[dict[str, Any], ...]:
    """The functions in `tools`, in the form of chats.

    Raises:
        InvalidRequestError: one is invalid; names it.
    """
    value = [] if fields.get("tools") is None else fields.get("tools")
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise fields.reject("tools", f"must be a list of at most {MAX_TOOLS} tools")
    tools = [_tool(one, path=f"tools[{at}]", is_flat=is_flat) for at, one in enumerate(value)]
    seen = set()
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in seen:
            raise InvalidRequestError(
                f"tools[{index}] has the name {name} of another tool", param=f"tools[{index}]"
            )
        seen.add(name)
    return tuple(tools)


def _tool(value: Any, *, path: str, is_flat: bool) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} must be an object", param=path)
    tool = Fields(value, path=f"{path}.")
    if tool.get("type") != "function":
        raise tool.reject("type", f"must be function, not {shown(tool.get('type'))}")
    function = tool
    if not is_flat:
        tool.only({"type", "function"})
        inner = tool.get("function")
        if not isinstance(inner, dict):
            raise tool.reject("function", "must be an object")
        function = Fields(inner, path=f"{path}.function.")
    own = {"name", "description", "parameters", "strict"}
    function.only(own | {"type"} if is_flat else own)
    function.flag("strict")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise function.reject("name", "must have 1 to 64 letters, digits, '_', '-' or '.'")
    if "description" in function and not isinstance(function.get("description"), str):
        raise function.reject("description", "must be a string")
    parameters = function.get("parameters") if "parameters" in function else {}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise function.reject("parameters", "must be a JSON schema of an object")
    shown_fields = ("name", "description", "parameters")
    return {
        "type": "function",
        "function": {key: function.get(key) for key in shown_fields if key in function},
    }


def _choice(fields: Fields, *, is_flat: bool) -> Any:
    """`none`, `auto`, `required`, or an object with the `name` of a function."""
    value = fields.get("tool_choice")
    if value in ("none", "auto", "required"):
        return value
    named = value
    if isinstance(value, dict) and not is_flat:
        named = value.get("function") if set(value) == {"type", "function"} else None
        named = {"type": "function", **named} if isinstance(named, dict) else None
    is_named = isinstance(named, dict) and set(named) == {"type", "name"}
    if not is_named or {**value}.get("type") != "function" or not isinstance(named["name"], str):
        raise fields.reject(
            "tool_choice", f"must be none, auto, required or name a function, not {shown(value)}"
        )
    return named


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; without parameters it takes none, as at OpenAI."""
    parameters = tool["function"].get("parameters")
    return {"type": "object", **parameters} if parameters else _NO_PARAMETERS


def _calls_schema(tools: tuple[dict[str, Any], ...], *, max_calls: int | None) -> dict[str, Any]:
    """The schema of an array of calls."""
    calls, definitions = [], {}
    for tool in tools:
        name = tool["function"]["name"]
        definitions[name] = _moved(_schema(tool), f"#/$defs/{name}")
        call = {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}}
        calls.append(
            {
                "type": "object",
                "properties": call,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    most = {} if max_calls is None else {"maxItems": max_calls}
    items = {"anyOf": calls}
    return {"type": "array", "minItems": 1, **most, "items": items, "$defs": definitions}


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to itself hold where `root` is its place."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, root)
        for key, value in schema.items()
    }


def _grammar(fields: Fields, schema: dict[str, Any]) -> Grammar:
    text = json.dumps(schema)
    if len(text) > MAX_GRAMMAR_BYTES:
        raise fields.reject(
            "tools", f"have parameters of more than {MAX_GRAMMAR_BYTES} bytes; send fewer"
        )
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)
