"""`array_items`: the items of a large JSON document's array, one by one, in bounded memory.

The standard library's decoder parses each item; only the text around them is scanned here. ijson
was tried and not used: it builds a path for every level of nesting, so 100 KB of brackets exhaust
the memory, and it rejects NaN, which profilers write.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from equipoise.formats.errors import FormatError

MAX_VALUE_CHARS = 2**22
"""Length of the longest single item, or value beside the array, that is read."""

_CHUNK_CHARS = 2**18
_SPACE = re.compile(r"[ \t\r\n]*")
_MAY_CONTINUE = {"", *"+-.0123456789eE"}
_DECODER = json.JSONDecoder()


def array_items(file: TextIO, *, key: str) -> Iterator[Any]:
    """Yield the items of the document, if it is an array, or of its array `key`.

    The whole document is checked: what follows the last item must be valid too.

    Raises:
        FormatError: the document is cut short, is not JSON, has no such array, or has a value that
            is too long.
        OSError: the file cannot be read.
    """
    text = _Text(file)
    if text.peek() == "[":
        yield from text.items()
    elif text.peek() == "{":
        yield from _member_items(text, key)
    elif text.peek():
        raise FormatError("it is not JSON: it begins with neither { nor [")
    else:
        raise FormatError("it is empty")
    if text.peek():
        raise FormatError("it has text after the end of its JSON document")


def _member_items(text: "_Text", key: str) -> Iterator[Any]:
    found = False
    for _ in text.members("{", "}"):
        name = text.value("a key")
        text.take(":")
        if name == key:
            if text.peek() != "[":
                raise FormatError(f"{key} is not an array")
            found = True
            yield from text.items()
        else:
            text.value(f"the value of {str(name)[:40]!r}")
    if not found:
        raise FormatError(f"it has no array {key!r}")


class _Text:
    """The document's text from the current position on, a chunk at a time."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self._ended = False

    def peek(self) -> str:
        """Return the next character that is not white space; "" at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._fill()

    def take(self, expected: str) -> str:
        """Consume the next character, which must be one of `expected`, and return it."""
        found = self.peek()
        if not found:
            raise FormatError("it is cut short: the JSON document has no end")
        if found not in expected:
            raise FormatError(f"it is not JSON: {found!r} where {' or '.join(expected)} belongs")
        self._at += 1
        return found

    def members(self, opening: str, closing: str) -> Iterator[int]:
        """Yield the number of each member, whose text the caller consumes."""
        self.take(opening)
        if self.peek() == closing:
            self.take(closing)
            return
        number = 0
        while True:
            yield number
            number += 1
            if self.take("," + closing) == closing:
                return

    def items(self) -> Iterator[Any]:
        """Yield the items of the array that starts here."""
        for number in self.members("[", "]"):
            yield self.value(f"event {number}")

    def value(self, what: str) -> Any:
        """Parse the value that starts here; `what` names it in errors."""
        self.peek()
        while True:
            problem = "the JSON document has no end"
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except RecursionError:
                raise FormatError(f"{what} is nested too deeply") from None
            except ValueError as error:
                problem = getattr(error, "msg", str(error))
            else:
                # A number at the end of a chunk may have more digits in the next one.
                if self._ended or self._text[end : end + 1] not in _MAY_CONTINUE:
                    self._at = end
                    return value
            length = len(self._text) - self._at
            if length > MAX_VALUE_CHARS:
                raise FormatError(
                    f"{what} is not JSON or longer than {MAX_VALUE_CHARS:,} characters: {problem}"
                )
            if self._ended:
                raise FormatError(f"it is cut short or not JSON in {what}: {problem}")
            self._fill()

    def _fill(self) -> None:
        """Read at least as much as is left, so that a long value is parsed few times."""
        left = self._text[self._at :]
        chunk = self._file.read(max(_CHUNK_CHARS, len(left)))
        self._ended = not chunk
        self._text, self._at = left + chunk, 0
