"""Readers of the arguments of one call, which arrive in parts and are passed on as JSON. Pure."""

import json
import re
from dataclasses import dataclass, replace
from typing import Protocol

from equipoise.gateway.stop_text import overlap

MAX_NAME = 1024
"""Characters of a parameter's name in DSML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentsPart:
    """What a reader makes of the text so far."""

    size: int
    """Characters that are read; the rest has to come again, with more text."""

    arguments: str
    """The next part of the arguments, which are a JSON object in all."""

    content: str = ""
    """Text between the arguments that belongs to none."""


class ArgumentsReader(Protocol):
    """Finds the end of a call's arguments. The result does not depend on how the text is cut."""

    is_complete: bool
    """Whether the arguments have ended; then nothing more is read."""

    def read(self, text: str, *, final: bool) -> ArgumentsPart:
        """Read on; `final` if no more text comes."""


class JsonArguments:
    """Arguments that are written as a JSON object, and passed on as they are."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.is_complete = False

    def read(self, text: str, *, final: bool) -> ArgumentsPart:  # noqa: ARG002 - of the protocol
        """All of the text, or the rest of the object."""
        size = self._read(text)
        return ArgumentsPart(size=size, arguments=text[:size])

    def _read(self, text: str) -> int:
        for index, letter in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = letter == "\\"
                self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{}":
                self._depth += 1 if letter == "{" else -1
                if not self._depth:
                    self.is_complete = True
                    return index + 1
        return len(text)


def dsml(name: str) -> str:
    """The part of a tag of DSML, DeepSeek's markup, that follows `<` or `</`; bars are U+FF5C."""
    return f"\uff5cDSML\uff5c{name}"


_PARAMETER, _CLOSE = f"<{dsml('parameter')}", f"</{dsml('parameter')}>"
_HEAD = re.compile(rf'{_PARAMETER} name="([^">]{{1,{MAX_NAME}}})"(?: string="(true|false)")?>')
_HEAD_SO_FAR = re.compile(rf"{_PARAMETER}[^>]{{0,{MAX_NAME + 32}}}\Z")
_ENDS = (f"</{dsml('invoke')}>", f"<{dsml('invoke')}", f"</{dsml('function_calls')}>")
_NEXT = re.compile("|".join((_HEAD.pattern, *_ENDS)))


class DsmlArguments:
    """Arguments in DSML, a tag for each, up to the end of the call.

    `string="true"` marks text, which is passed on as it arrives; other values are JSON, and text if
    they are not. As at SGLang, a model may write one JSON object in place of the tags.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._num_parameters = 0
        self._is_text: bool | None = None
        self._object: JsonArguments | None = None
        self._is_blank = True

    def read(self, text: str, *, final: bool) -> ArgumentsPart:
        """What is certain not to be part of a tag that has not arrived."""
        start, arguments, content = 0, "", ""
        while not self.is_complete:
            part = self._next(text[start:], final=final)
            start += part.size
            arguments += part.arguments
            content += part.content
            if not part.size:
                break
        return ArgumentsPart(size=start, arguments=arguments, content=content)

    def _next(self, text: str, *, final: bool) -> ArgumentsPart:
        if self._is_text is not None:
            return self._value(text, is_text=self._is_text, final=final)
        if self._is_blank and (stripped := text.lstrip()):
            self._is_blank = False
            if stripped.startswith("{"):
                self._object = JsonArguments()
                part = self._object.read(stripped, final=final)
                return replace(part, size=len(text) - len(stripped) + part.size)
        if self._object is not None and not self._object.is_complete:
            return self._object.read(text, final=final)
        return self._between(text, final=final)

    def _between(self, text: str, *, final: bool) -> ArgumentsPart:
        """Up to the next tag, and the head of a parameter."""
        found = _NEXT.search(text)
        if found is None:
            size = len(text) - (0 if final else _held(text))
            return ArgumentsPart(size=size, arguments="", content=text[:size])
        before = text[: found.start()]
        if found[1] is None:
            self.is_complete = True
            end = "" if self._object else "}" if self._num_parameters else "{}"
            return ArgumentsPart(size=len(before), arguments=end, content=before)
        if self._object is not None:
            return ArgumentsPart(size=found.end(), arguments="", content=text[: found.end()])
        self._is_text = found[2] == "true"
        begin = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        name = json.dumps(found[1], ensure_ascii=False)
        quote = '"' if self._is_text else ""
        return ArgumentsPart(size=found.end(), arguments=f"{begin}{name}: {quote}", content=before)

    def _value(self, text: str, *, is_text: bool, final: bool) -> ArgumentsPart:
        end = text.find(_CLOSE)
        if end >= 0:
            self._is_text = None
            value = _quoted(text[:end]) + '"' if is_text else _json_of(text[:end])
            return ArgumentsPart(size=end + len(_CLOSE), arguments=value)
        if not final and not is_text:
            return ArgumentsPart(size=0, arguments="")
        size = len(text) - (0 if final else overlap(text, _CLOSE))
        value = _quoted(text[:size]) if is_text else text
        return ArgumentsPart(size=size, arguments=value)


def _held(text: str) -> int:
    """The size of the end of a text that may be the beginning of a tag."""
    head = _HEAD_SO_FAR.search(text)
    if head is not None:
        return len(text) - head.start()
    return max(overlap(text, tag) for tag in (_PARAMETER, *_ENDS))


def _quoted(text: str) -> str:
    """Text as part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(text: str) -> str:
    """A value that is meant to be JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()
