"""How models write calls of tools: `CallFormat`, and those that are supported. Pure."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from equipoise.gateway.tool_arguments import (
    ArgumentsReader,
    DsmlArguments,
    JsonArguments,
    dsml,
)


class ToolCallParser(StrEnum):
    """How a model writes calls of tools, by the names of vLLM's parsers."""

    NONE = "none"
    """Not at all."""

    DEEPSEEK_V3 = "deepseek_v3"
    """As DeepSeek-V3 and R1 do, between markers, with the arguments in a block of JSON."""

    DEEPSEEK_V31 = "deepseek_v31"
    """As DeepSeek-V3.1 does, between the same markers, with nothing but name and arguments."""

    DEEPSEEK_V32 = "deepseek_v32"
    """As DeepSeek-V3.2 does, in DSML, its markup with a tag for each argument."""

    HERMES = "hermes"
    """As Hermes and Qwen do, a JSON object between <tool_call> and </tool_call>."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How calls are written: `begin`, what `head` matches, the arguments, `close`."""

    begin: str
    """Text that begins a call."""

    head: re.Pattern[str]
    """What stands between that and the arguments, with the function's `name`."""

    close: str
    """What follows the arguments, after white space; may be empty."""

    end: str
    """Text that ends a call."""

    structure: tuple[str, ...] = ()
    """Other text around calls; like `end`, it is dropped wherever it stands outside of calls."""

    other_special: tuple[str, ...] = ()
    """Special tokens within calls."""

    arguments: Callable[[], ArgumentsReader] = JsonArguments
    """A new reader of a call's arguments."""

    is_object: bool = False
    """Whether a call is a JSON object, whose fields may come in any order."""

    @property
    def special(self) -> frozenset[str]:
        """The text of all tokens that may be special, but must be read."""
        return frozenset({self.begin, self.end, *self.structure, *self.other_special})


def _token(name: str) -> str:
    """A token of DeepSeek's, which has U+FF5C for bars."""
    return f"<\uff5ctool▁{name}\uff5c>"


def _deepseek(head: str, *, close: str) -> CallFormat:
    """A format with DeepSeek's markers."""
    return CallFormat(
        begin=_token("call▁begin"),
        head=re.compile(head),
        close=close,
        end=_token("call▁end"),
        structure=(_token("calls▁begin"), _token("calls▁end")),
        other_special=(_token("sep"),),
    )


_NAME_FIRST = r'\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)'


PLAIN_JSON = CallFormat(
    begin="{", head=re.compile(_NAME_FIRST), close="}", end="}", structure=("[", ",", "]")
)
"""A JSON array of objects with `name` and `arguments`, which a grammar guarantees."""

FORMATS: Mapping[ToolCallParser, CallFormat] = MappingProxyType(
    {
        ToolCallParser.DEEPSEEK_V3: _deepseek(
            rf"\s*function{_token('sep')}\s*(?P<name>[^\s<`]+)\s*```json\s*(?=\{{)", close="```"
        ),
        ToolCallParser.DEEPSEEK_V31: _deepseek(
            rf"\s*(?P<name>[^\s<]+)\s*{_token('sep')}\s*(?=\{{)", close=""
        ),
        ToolCallParser.DEEPSEEK_V32: CallFormat(
            begin=f"<{dsml('invoke')}",
            head=re.compile(r'\s+name="(?P<name>[^">]+)"\s*>'),
            close="",
            end=f"</{dsml('invoke')}>",
            structure=(f"<{dsml('function_calls')}>", f"</{dsml('function_calls')}>"),
            other_special=(dsml(""),),
            arguments=DsmlArguments,
        ),
        ToolCallParser.HERMES: CallFormat(
            begin="<tool_call>",
            head=re.compile(r"\s*\{" + _NAME_FIRST),
            close="}",
            end="</tool_call>",
            is_object=True,
        ),
    }
)
"""The formats of models, by parser."""
