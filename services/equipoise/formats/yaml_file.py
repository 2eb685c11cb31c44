"""Reads the YAML of TensorRT-LLM's files: mappings, lists, and scalars as text.

Built on libyaml's events with a depth limit, without tags (nothing is constructed) and aliases
(nothing expands).
"""

from typing import Any

import yaml

from equipoise.formats.errors import FormatError
from equipoise.formats.tables import shown

MAX_DEPTH = 8

_Loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


def load(text: str) -> Any:
    """Parse a document, every scalar as text; None if it is empty.

    Raises:
        FormatError: it is not valid YAML, or uses more than TensorRT-LLM's files need.
    """
    document: list[Any] = []
    open_nodes: list[list[Any]] = [document]
    kinds: list[str] = ["list"]
    try:
        for event in yaml.parse(text, Loader=_Loader):
            match event:
                case yaml.AliasEvent():
                    raise FormatError("YAML aliases are not supported")
                case yaml.ScalarEvent():
                    open_nodes[-1].append(event.value)
                case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                    if len(open_nodes) > MAX_DEPTH:
                        raise FormatError(f"YAML is nested deeper than {MAX_DEPTH}")
                    is_list = isinstance(event, yaml.SequenceStartEvent)
                    kinds.append("list" if is_list else "mapping")
                    open_nodes.append([])
                case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                    items = open_nodes.pop()
                    is_list = kinds.pop() == "list"
                    open_nodes[-1].append(items if is_list else _mapping(items))
                case _:
                    pass
    except yaml.YAMLError as error:
        raise FormatError(f"it is not valid YAML: {' '.join(str(error).split())}") from None
    return document[0] if document else None


def _mapping(items: list[Any]) -> dict[str, Any]:
    """Build a mapping from alternating keys and values."""
    mapping: dict[str, Any] = {}
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str):
            raise FormatError(f"a YAML key must be a scalar, not {shown(key)}")
        if key in mapping:
            raise FormatError(f"the YAML key {key!r} is duplicated")
        mapping[key] = value
    return mapping
