"""From the text of a policy file to a `BalancePolicy`, or to all its faults with their lines."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from equipoise.planning.errors import InvalidPolicyError
from equipoise.planning.policy import Policy
from equipoise.policy.document import BalancePolicy, Section, settings
from equipoise.policy.errors import PolicyError, PolicyFault

MAX_BYTES = 256 * 1024
"""Most bytes of a policy file; a ConfigMap holds four times as much."""

_MOST_DEPTH = 16
_MOST_SHOWN = 60

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPolicy:
    """A policy that was accepted: one `Policy` for all pools, and those of pools that differ."""

    document: BalancePolicy
    defaults: Policy
    pools: Mapping[str, Policy] = field(default_factory=dict)


def read_policy(text: str, *, source: str, base: Policy | None = None) -> ReadPolicy:
    """Read the YAML (or JSON) of a policy; `base` are defaults for what it does not say.

    Raises:
        PolicyError: it is refused, with every fault that was found; `source` names it.
    """
    if len(text.encode()) > MAX_BYTES:
        why = f"is larger than {MAX_BYTES} bytes"
        raise PolicyError(source, [PolicyFault(path="", line=0, value="", why=why)])
    value, lines = _parsed(text, source)
    try:
        document = BalancePolicy.model_validate(value)
    except ValidationError as error:
        faults = [_fault(one, lines) for one in error.errors(include_url=False)]
        raise PolicyError(source, sorted(faults, key=lambda fault: fault.line)) from None
    return _resolved(document, source=source, base=base or Policy(), lines=lines)


def _resolved(
    document: BalancePolicy, *, source: str, base: Policy, lines: Mapping[Path, int]
) -> ReadPolicy:
    """Lay what is said over what is not; values that contradict each other are faults."""
    faults: list[PolicyFault] = []
    values = {name: getattr(base, name) for name in Policy.__dataclass_fields__}
    common = values | document.defaults.given()

    def policy(where: Path, chosen: dict[str, Any]) -> Policy:
        try:
            return Policy(**chosen)
        except InvalidPolicyError as error:
            faults.append(_contradiction(where, str(error), lines))
            return base

    defaults = policy(("defaults",), common)
    pools = {}
    if not faults:
        # A pool rests on the defaults, so their faults would be repeated in each.
        for name, section in document.pools.items():
            pools[name] = policy(("pools", name), common | section.given())
    if faults:
        raise PolicyError(source, faults)
    return ReadPolicy(document=document, defaults=defaults, pools=pools)


def _contradiction(where: Path, words: str, lines: Mapping[Path, int]) -> PolicyFault:
    """A fault between fields, in the file's names; its line is that of the first field written."""
    paths = {setting.name: path for path, setting, _ in settings()}
    line, about = lines.get(where, 0), ".".join(map(str, where))
    first = words.partition(" ")[0]
    for name in sorted(paths, key=len, reverse=True):
        words = words.replace(name, paths[name])
    if first in paths:
        below = (*where, *paths[first].split("."))
        line, about = lines.get(below, line), ".".join(map(str, below))
    return PolicyFault(path=about, line=line, value="", why=words)


# Faults in words ---------------------------------------------------------------------------------


def _fault(error: ErrorDetails, lines: Mapping[Path, int]) -> PolicyFault:
    path = tuple(step for step in error["loc"] if step != "[key]")
    value, why = _shown(error["input"]), error["msg"]
    match error["type"]:
        case "extra_forbidden":
            value, why = "", _unknown(path)
        case "missing":
            value, why = "", "is missing"
        case "value_error":
            why = str(error.get("ctx", {}).get("error", why))
        case "model_type" | "dict_type":
            why = "must hold fields by name"
        case "literal_error":
            why = f"must be {error.get('ctx', {}).get('expected', '')}"
    known = next((lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in lines), 0)
    return PolicyFault(path=".".join(map(str, path)), line=known, value=value, why=why)


def _unknown(path: Path) -> str:
    """What to say of a field that is not known: the one that was meant, if it can be guessed."""
    *above, name = path
    section = _section_at(above)
    names = [info.alias or key for key, info in section.model_fields.items()]
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if near:
        return f"there is no such field: did you mean {near[0]}?"
    inner = {full.rpartition(".")[2]: full for full, _, _ in settings()}
    near = difflib.get_close_matches(str(name), inner, n=1, cutoff=0.75)
    if near:
        return f"there is no such field here: did you mean {inner[near[0]]}?"
    return f"there is no such field here, there are {', '.join(names)}"


def _section_at(path: list[str | int]) -> type[Section]:
    section: type[Section] = BalancePolicy
    steps = iter(path)
    for step in steps:
        if step == "pools":
            next(steps, None)
            step = "defaults"  # noqa: PLW2901 - a pool has the form of the defaults
        for info in section.model_fields.values():
            if info.alias == step and isinstance(info.annotation, type):
                section = info.annotation
    return section


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


# YAML with lines ---------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML without aliases, which can make a small file endless."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.get_mark()
            raise yaml.composer.ComposerError(
                None, None, "aliases are not used here, write it out", mark
            )
        return super().compose_node(parent, index)


def _parsed(text: str, source: str) -> tuple[Any, Mapping[Path, int]]:
    """The values of a YAML mapping, and the line of each."""

    def refused(line: int, why: str) -> PolicyError:
        return PolicyError(source, [PolicyFault(path="", line=line, value="", why=why)])

    try:
        tree = _composed(text)
        if not isinstance(tree, yaml.MappingNode):
            raise refused(0 if tree is None else tree.start_mark.line + 1, "is empty or no mapping")
        fault = _misshapen(tree, ())
        if fault is not None:
            raise PolicyError(source, [fault])
        return _value(tree), dict(_lines(tree, ()))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise refused(mark.line + 1 if mark else 0, f"is no YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise refused(0, f"is no YAML: {error}") from None
    except RecursionError:
        raise refused(0, "is nested too deeply") from None


def _composed(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _misshapen(node: yaml.Node, path: Path) -> PolicyFault | None:
    """Depth without end, keys that are not words, and keys that are there twice."""
    why, line = None, node.start_mark.line + 1
    if len(path) > _MOST_DEPTH:
        why = "is nested too deeply"
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                why = "keys must be words"
            elif key.value in seen:
                path, why = (*path, key.value), f"is there twice, first in line {seen[key.value]}"
            if why is not None:
                break
            seen[key.value] = line
            fault = _misshapen(value, (*path, key.value))
            if fault is not None:
                return fault
    if why is None:
        return None
    return PolicyFault(path=".".join(map(str, path)), line=line, value="", why=why)


def _lines(node: yaml.Node, path: Path) -> Iterator[tuple[Path, int]]:
    """The line of every field, from 1."""
    if not path:
        yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from _lines(value, (*path, key.value))


def _value(node: yaml.Node) -> Any:
    """Plain values; keys are words whatever they look like, since pools may be called 1 or on."""
    if isinstance(node, yaml.MappingNode):
        return {key.value: _value(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_value(one) for one in node.value]
    try:
        return yaml.constructor.SafeConstructor().construct_document(node)
    except (ValueError, OverflowError):  # For example a date that there never was.
        return node.value
