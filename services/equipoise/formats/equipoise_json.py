"""Equipoise's own files, JSON, MoE layers only.

Loads: {"domains": {name: [windows][layers][experts]}}, or {"windows": {name: [layers][experts]}} if
windows are not ordered by domain; also "first_moe_layer" and "top_k", if known. Windows are in
order of time.
Layouts: {"num_experts", "num_ranks", "first_moe_layer", "expert_of_slot": [layers][slots]}, and
"share_of_slot", of the same shape, if experts are not split evenly over their slots: the share of
its expert's load that each slot serves, in 1/32768ths.
"""

import json
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np

from equipoise.formats.errors import FormatError
from equipoise.formats.expected import Expected
from equipoise.formats.placement import ExpertPlacement
from equipoise.formats.recording import Recording
from equipoise.formats.tables import Numbers, ids_2d, loads_3d, member, shown, whole
from equipoise.formats.text import id_rows, number_rows
from equipoise.planning.arrays import ShareTable

DOMAINS_KEY = "domains"
WINDOWS_KEY = "windows"
LAYOUT_KEY = "expert_of_slot"
SHARES_KEY = "share_of_slot"


def recording(document: Any) -> Recording:
    """Read windows by name; those of domains are called "code/0", "code/1" and so on.

    Raises:
        FormatError: the document has another form.
    """
    if not isinstance(document, dict):
        raise FormatError(f"an object with {DOMAINS_KEY!r} is required, not {shown(document)}")
    key = WINDOWS_KEY if WINDOWS_KEY in document else DOMAINS_KEY
    parts = member(document, key)
    if not isinstance(parts, dict) or not parts:
        raise FormatError(f"{key} must be an object of recordings, not {shown(parts)}")
    windows: list[Numbers] = []
    names: list[str] = []
    for name, value in parts.items():
        part = _part(value, f"{key}, {name[:40]!r}")
        if windows and part.shape[1:] != windows[0].shape[1:]:
            raise FormatError(
                f"{key}, {name[:40]!r} has {part.shape[1]} layers x {part.shape[2]} experts, but "
                f"those before have {windows[0].shape[1]} x {windows[0].shape[2]}"
            )
        if key == WINDOWS_KEY and len(part) != 1:
            raise FormatError(f"{key}, {name[:40]!r} must be a single window, not {len(part)}")
        windows.append(part)
        names += [name] if key == WINDOWS_KEY else [f"{name}/{index}" for index in range(len(part))]
    return Recording(
        windows=np.concatenate(windows),
        names=tuple(names),
        first_moe_layer=_optional(document, "first_moe_layer", least=0),
        top_k=_optional(document, "top_k", least=1),
    )


def recording_json(recording: Recording) -> bytes:
    """Write one line per layer."""
    facts = {"first_moe_layer": recording.first_moe_layer, "top_k": recording.top_k}
    head = "".join(f'"{key}": {value}, ' for key, value in facts.items() if value is not None)
    matrices = [f"[{number_rows(window)}]" for window in recording.windows]
    key, parts = WINDOWS_KEY, dict(zip(recording.names, matrices, strict=True))
    domains = _domains(recording.names)
    if domains is not None:
        rest = iter(matrices)
        key = DOMAINS_KEY
        parts = {name: f"[{','.join(islice(rest, num))}]" for name, num in domains.items()}
    body = ",\n".join(f"{json.dumps(name)}: {text}" for name, text in parts.items())
    return f'{{{head}"{key}": {{\n{body}}}}}\n'.encode()


def placement(document: Any, expected: Expected) -> ExpertPlacement:
    """Read a layout.

    Raises:
        FormatError: the document has another form.
    """
    table = member(document, LAYOUT_KEY)
    first = _optional(document, "first_moe_layer", least=0)
    return expected.placement(
        ids_2d(table, first_layer=first or 0),
        num_experts=whole(member(document, "num_experts"), "num_experts", least=1),
        num_ranks=_optional(document, "num_ranks", least=1),
        first_moe_layer=first,
        share_of_slot=_shares(document, first_layer=first or 0),
        may_be_empty=True,
    )


def placement_json(placement: ExpertPlacement) -> bytes:
    """Write one line per layer."""
    facts = {
        "num_experts": placement.num_experts,
        "num_ranks": placement.num_ranks,
        "first_moe_layer": placement.first_moe_layer,
    }
    head = "".join(f'"{key}": {json.dumps(value)}, ' for key, value in facts.items())
    tables = {LAYOUT_KEY: placement.expert_of_slot}
    if placement.share_of_slot is not None:
        tables[SHARES_KEY] = placement.share_of_slot
    body = ",\n".join(f'"{key}": [\n{id_rows(table)}]' for key, table in tables.items())
    return f"{{{head}{body}}}\n".encode()


def _shares(document: dict[str, Any], *, first_layer: int) -> ShareTable | None:
    if document.get(SHARES_KEY) is None:
        return None
    try:
        return ids_2d(document[SHARES_KEY], first_layer=first_layer)
    except FormatError as error:
        raise FormatError(f"{SHARES_KEY}: {error}") from None


def _domains(names: tuple[str, ...]) -> dict[str, int] | None:
    """Count the windows of each domain, if the names are regular; else None."""
    counts = Counter(name.rpartition("/")[0] for name in names)
    regular = [f"{domain}/{index}" for domain, num in counts.items() for index in range(num)]
    return dict(counts) if list(names) == regular else None


def _part(value: Any, where: str) -> Numbers:
    try:
        return loads_3d(value)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None


def _optional(document: dict[str, Any], key: str, *, least: int) -> int | None:
    value = document.get(key)
    return None if value is None else whole(value, key, least=least)
