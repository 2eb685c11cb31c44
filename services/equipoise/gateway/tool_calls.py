"""`ToolCallSplit`: separates tool calls from a model's text as it arrives. Pure.

Models write calls between markers of their own. A call's name is known before its arguments, which
are passed on as they arrive. The result does not depend on how the text is cut.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from equipoise.gateway.stop_text import overlap
from equipoise.gateway.tool_formats import CallFormat

MAX_HEAD = 4096
"""Characters of a call before its arguments; a longer one is passed on in one piece, if at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """The next part of a call."""

    index: int
    """The call's number within the choice, from 0."""

    name: str | None = None
    """The function; set on a call's first part."""

    arguments: str = ""
    """Text of the arguments, which are a JSON object unless the model fails to write one."""


def merged(parts: Iterable[CallDelta]) -> tuple[CallDelta, ...]:
    """One part for each call, of all its parts."""
    calls: dict[int, CallDelta] = {}
    for part in parts:
        call = calls.get(part.index)
        calls[part.index] = (
            part if call is None else replace(call, arguments=call.arguments + part.arguments)
        )
    return tuple(calls.values())


class _State(Enum):
    CONTENT = auto()
    """Outside of calls."""

    HEAD = auto()
    """After `begin`, before the arguments."""

    ARGUMENTS = auto()
    """Within the arguments."""

    CLOSE = auto()
    """After the arguments."""

    ENDED = auto()
    """After the last call that may be made."""


class ToolCallSplit:
    """Splits a text into content and calls.

    A call that cannot be read is content as the model wrote it. Content within a call follows it.
    White space beside calls is dropped. The text ends with call number `max_calls`, if set. With
    `function` the text is nothing but the arguments of one call of that function.
    """

    def __init__(
        self, form: CallFormat, *, max_calls: int | None = None, function: str | None = None
    ) -> None:
        self._form = form
        self._max_calls = max_calls
        self._markers = (form.begin, form.end, *form.structure)
        self._state = _State.CONTENT
        self._held = ""
        self._space = ""
        self._within_call = ""
        self._is_after_call = False
        self._num_calls = 0
        self._content: list[str] = []
        self._parts: list[CallDelta] = []
        self._arguments = form.arguments()
        self._read: dict[_State, Callable[[bool], bool]] = {
            _State.CONTENT: self._read_content,
            _State.HEAD: self._read_head,
            _State.ARGUMENTS: self._read_arguments,
            _State.CLOSE: self._read_close,
            _State.ENDED: self._read_nothing,
        }
        self._function = function

    @property
    def special(self) -> frozenset[str]:
        """The text of all tokens that may be special, but must be read."""
        return self._form.special

    @property
    def ended(self) -> bool:
        """Whether the text has ended, whatever follows."""
        return self._state is _State.ENDED

    @property
    def has_called(self) -> bool:
        """Whether there are calls, all with complete arguments."""
        return self._num_calls > 0 and self._state is not _State.ARGUMENTS

    def read(self, text: str, *, final: bool) -> tuple[str, tuple[CallDelta, ...]]:
        """The content and the parts of calls, one for each call, that the next text completes."""
        self._held += text
        if self._function is not None and text:
            self._begin_call(self._function)
            self._function = None
        while self._read[self._state](final):
            pass
        if final:
            self._content.append(self._space)
            self._space = ""
        content, calls = "".join(self._content), merged(self._parts)
        self._content, self._parts = [], []
        return content, calls

    # These read held text as one state does; true if there is more to read at once.

    def _read_content(self, final: bool) -> bool:
        text = self._held
        found = [(at, one) for one in self._markers if (at := text.find(one)) >= 0]
        if not found:
            size = 0 if final else max(overlap(text, one) for one in self._markers)
            self._say(text[: len(text) - size])
            self._held = text[len(text) - size :]
            return False
        start, marker = min(found)
        self._say(text[:start])
        self._held = text[start + len(marker) :]
        if marker == self._form.begin:
            self._state = _State.HEAD
        return True

    def _read_head(self, final: bool) -> bool:
        form, text = self._form, self._held
        end = text.find(form.end)
        # A head after the end of this call is another call's.
        head = form.head.match(text, 0, min(MAX_HEAD, end if end >= 0 else len(text)))
        if head is not None:
            self._begin_call(head["name"])
            self._held = text[head.end() :]
            return True
        if end < 0 and not final:
            return False
        size = end + len(form.end) if end >= 0 else len(text)
        self._state = _State.CONTENT
        self._held = text[size:]
        call = _call_of(text[:end]) if form.is_object and end >= 0 else None
        if call is None:
            self._say(form.begin + text[:size])
        else:
            self._begin_call(call.name or "")
            self._say_arguments(call.arguments)
            self._end_call(_State.CONTENT)
        return True

    def _read_arguments(self, final: bool) -> bool:
        part = self._arguments.read(self._held, final=final)
        self._say_arguments(part.arguments)
        self._within_call += part.content
        self._held = self._held[part.size :]
        if self._arguments.is_complete:
            self._end_call(_State.CLOSE)
        if self._arguments.is_complete or final:
            self._say(self._within_call)
            self._within_call = self._space = ""
        return self._arguments.is_complete

    def _read_close(self, final: bool) -> bool:
        rest, close = self._held.lstrip(), self._form.close
        if rest.startswith(close):
            self._held = rest[len(close) :]
        elif close.startswith(rest):
            if not final:
                return False
            self._held = ""
        self._state = _State.CONTENT
        return True

    def _read_nothing(self, _final: bool) -> bool:
        self._held = ""
        return False

    def _say(self, text: str) -> None:
        """Pass content on, without white space after a call. Other white space waits for more."""
        text = self._space + text
        if self._is_after_call:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._content.append(kept)
            self._is_after_call = False

    def _begin_call(self, name: str) -> None:
        self._space = ""
        self._parts.append(CallDelta(index=self._num_calls, name=name))
        self._num_calls += 1
        self._arguments = self._form.arguments()
        self._state = _State.ARGUMENTS

    def _say_arguments(self, text: str) -> None:
        if text:
            self._parts.append(CallDelta(index=self._num_calls - 1, arguments=text))

    def _end_call(self, state: _State) -> None:
        is_last = self._num_calls == self._max_calls
        self._state = _State.ENDED if is_last else state
        self._space = ""
        self._is_after_call = True


def _call_of(text: str) -> CallDelta | None:
    """A call that is written as a JSON object; None if it is not one."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
        return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return CallDelta(index=0, name=name, arguments=json.dumps(arguments, ensure_ascii=False))
