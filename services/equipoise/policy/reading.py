"""Read a policy file, or find all its faults with their lines."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from equipoise.planning.errors import InvalidPolicyError
from equipoise.planning.phase import Phase
from equipoise.planning.policy import Policy
from equipoise.policy.document import BalancePolicy, PoolOverride, Section
from equipoise.policy.errors import PolicyError, PolicyFault
from equipoise.policy.setting import SETTINGS

MAX_BYTES = 256 * 1024
"""Maximum bytes of a policy file; a ConfigMap can hold four times as much."""

REPLACED = {
    "shiftThreshold": "was replaced by averages.shiftFactor, a multiple of noise and not a share "
    "of the load: remove it, or set averages.shiftFactor (2 unless set)",
    "targetBalancedness": "was removed, because plans make the moves that pay for themselves: "
    "remove it, and set judging.payback lower to move less",
}
"""Fields of earlier versions, and what to do about them."""

_MOST_DEPTH = 16
_MOST_SHOWN = 60

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPolicy:
    """The policies of a valid file."""

    defaults: Policy
    """For every pool not named in the file."""

    pools: Mapping[str, Policy] = field(default_factory=dict)
    """For the pools that the file names."""

    phases: Mapping[Phase, Policy] = field(default_factory=dict)
    """For the other pools, by phase."""

    def of(self, pool: str, phase: Phase | None) -> Policy:
        """For a pool; `phase` is None if unknown."""
        if pool in self.pools:
            return self.pools[pool]
        return self.defaults if phase is None else self.phases.get(phase, self.defaults)

    def named(self) -> Mapping[str, Policy]:
        """All but the defaults, with a name for display."""
        return {**self.pools, **{f"{phase} pools": one for phase, one in self.phases.items()}}


def read_policy(text: str, *, source: str, base: Policy | None = None) -> ReadPolicy:
    """Read a policy file in YAML or JSON; values it does not set come from `base`.

    Raises:
        PolicyError: the file is invalid; it holds every fault found, and `source` names the file.
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
    document: BalancePolicy, *, source: str, base: Policy, lines: Mapping[KeyPath, int]
) -> ReadPolicy:
    """Apply the file's values to `base`; values that contradict each other are faults."""
    faults: list[PolicyFault] = []
    values = {name: getattr(base, name) for name in Policy.__dataclass_fields__}
    common = values | document.defaults.written()

    def policy(where: KeyPath, chosen: dict[str, Any]) -> Policy:
        try:
            return Policy(**chosen)
        except InvalidPolicyError as error:
            faults.append(_contradiction(where, str(error), lines))
            return base

    defaults = policy(("defaults",), common)
    pools, phases = {}, {}
    if not faults:
        # Pools build on the defaults, so faults of the defaults would be repeated for each pool.
        for name, section in document.pools.items():
            values_in_force = policy(("pools", name), common | section.written())
            if section.phase is None:
                pools[name] = values_in_force
            elif Phase(section.phase) in phases:
                where = ("pools", name, "phase")
                why = "another entry is for the same phase: merge the two"
                faults.append(_fault_at(where, section.phase, why, lines))
            else:
                phases[Phase(section.phase)] = values_in_force
    if faults:
        raise PolicyError(source, faults)
    return ReadPolicy(defaults=defaults, pools=pools, phases=phases)


def _fault_at(where: KeyPath, value: str, why: str, lines: Mapping[KeyPath, int]) -> PolicyFault:
    path = ".".join(map(str, where))
    return PolicyFault(path=path, line=lines.get(where, 0), value=value, why=why)


def _contradiction(where: KeyPath, why: str, lines: Mapping[KeyPath, int]) -> PolicyFault:
    """The fault of two values, with the keys of the file and the line of the first value."""
    paths = {one.name: one.path for one in SETTINGS}
    line, about = lines.get(where, 0), ".".join(map(str, where))
    first = why.partition(" ")[0]
    for name in sorted(paths, key=len, reverse=True):
        why = why.replace(name, paths[name])
    if first in paths:
        below = (*where, *paths[first].split("."))
        line, about = lines.get(below, line), ".".join(map(str, below))
    return PolicyFault(path=about, line=line, value="", why=why)


# Faults ---------------------------------------------------------------------------------


def _fault(error: ErrorDetails, lines: Mapping[KeyPath, int]) -> PolicyFault:
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
            why = "must be a mapping of fields"
        case "literal_error":
            why = f"must be {error.get('ctx', {}).get('expected', '')}"
    known = next((lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in lines), 0)
    return PolicyFault(path=".".join(map(str, path)), line=known, value=value, why=why)


def _unknown(path: KeyPath) -> str:
    """The fault of an unknown field, with the field that replaced it or was probably meant."""
    *above, name = path
    if replaced := REPLACED.get(str(name)):
        return replaced
    section = _section_at(above)
    names = list(section.model_fields)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if near:
        return f"unknown field: did you mean {near[0]}?"
    inner = {one.path.rpartition(".")[2]: one.path for one in SETTINGS}
    near = difflib.get_close_matches(str(name), inner, n=1, cutoff=0.75)
    if near:
        return f"unknown field here: did you mean {inner[near[0]]}?"
    return f"unknown field here: the fields are {', '.join(names)}"


def _section_at(path: list[str | int]) -> type[Section]:
    section: type[Section] = BalancePolicy
    steps = iter(path)
    for step in steps:
        if step == "pools":
            next(steps, None)
            section = PoolOverride
            continue
        info = section.model_fields.get(str(step))
        if info is not None and isinstance(info.annotation, type):
            section = info.annotation
    return section


def _shown(value: object) -> str:
    try:
        text = repr(value) if isinstance(value, str) else str(value)
    except ValueError:  # Python writes no integer of thousands of digits.
        return "a number of thousands of digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


# YAML with lines ---------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML without aliases, because a small file with aliases can expand without bound."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.get_mark()
            raise yaml.composer.ComposerError(
                None, None, "aliases are not supported: repeat the value", mark
            )
        return super().compose_node(parent, index)


def _parsed(text: str, source: str) -> tuple[Any, Mapping[KeyPath, int]]:
    """The values of a YAML mapping, and the line of each."""

    def rejected(line: int, why: str) -> PolicyError:
        return PolicyError(source, [PolicyFault(path="", line=line, value="", why=why)])

    try:
        tree = yaml.compose(text, Loader=_Loader)
        if not isinstance(tree, yaml.MappingNode):
            raise rejected(
                0 if tree is None else tree.start_mark.line + 1, "is empty or not a mapping"
            )
        fault = _misshapen(tree, ())
        if fault is not None:
            raise PolicyError(source, [fault])
        return _value(tree), dict(_lines(tree, ()))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise rejected(
            mark.line + 1 if mark else 0, f"is not valid YAML: {error.problem}"
        ) from None
    except yaml.YAMLError as error:
        raise rejected(0, f"is not valid YAML: {error}") from None
    except RecursionError:
        raise rejected(0, "is nested too deeply") from None


def _misshapen(node: yaml.Node, path: KeyPath) -> PolicyFault | None:
    """The first excess of depth, key that is not a string, or duplicate key."""
    why, line = None, node.start_mark.line + 1
    if len(path) > _MOST_DEPTH:
        why = "is nested too deeply"
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                why = "keys must be strings"
            elif key.value in seen:
                path, why = (*path, key.value), f"is a duplicate of line {seen[key.value]}"
            if why is not None:
                break
            seen[key.value] = line
            fault = _misshapen(value, (*path, key.value))
            if fault is not None:
                return fault
    if why is None:
        return None
    return PolicyFault(path=".".join(map(str, path)), line=line, value="", why=why)


def _lines(node: yaml.Node, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    """The line of every field, from 1."""
    if not path:
        yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from _lines(value, (*path, key.value))


def _value(node: yaml.Node) -> Any:
    """The value of a node. Keys stay strings, since a pool may be named 1 or on."""
    if isinstance(node, yaml.MappingNode):
        return {key.value: _value(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_value(one) for one in node.value]
    try:
        return yaml.constructor.SafeConstructor().construct_document(node)
    except Exception:  # noqa: BLE001 - an impossible date, a boolean tagged maybe: PyYAML checks none
        return node.value
