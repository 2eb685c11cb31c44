"""Reads and writes files of any format; error messages name the file.

The format is detected from the content, never from the name alone. Dense layers are removed, so
values have MoE layers only.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from equipoise.formats import (
    deepseek,
    equipoise_json,
    sglang,
    tensorrt_llm,
    vllm,
    vllm_ascend,
)
from equipoise.formats.container import Folder, open_document
from equipoise.formats.errors import FormatError, naming
from equipoise.formats.expected import Expected
from equipoise.formats.format import Format
from equipoise.formats.placement import ExpertPlacement
from equipoise.formats.recording import Recording

Reader = TypeVar("Reader")


def read_recording(
    path: Path,
    *,
    form: Format | None = None,
    num_experts: int | None = None,
    first_moe_layer: int | None = None,
) -> Recording:
    """Read the loads of the MoE layers. Without `form`, the format is detected from the content.

    If a file has a row for each layer of the model and `first_moe_layer` is None, leading rows
    without load count as dense layers.

    Raises:
        FormatError: the file cannot be used; the message names it.
    """
    known = Expected(num_experts=num_experts, first_moe_layer=first_moe_layer)
    with naming(path):
        return _recording(open_document(path), form, known)


def read_placement(
    path: Path, *, form: Format | None = None, expected: Expected | None = None
) -> ExpertPlacement:
    """Read a layout of the MoE layers. Without `form`, the format is detected from the content.

    Raises:
        FormatError: the file cannot be used; the message names it.
    """
    with naming(path):
        return _placement(open_document(path), form, expected or Expected())


def read_either(
    path: Path, *, form: Format | None, expected: Expected
) -> Recording | ExpertPlacement:
    """Read loads or a layout, like `read_recording` and `read_placement`.

    Raises:
        FormatError: the file cannot be used; the message names it.
    """
    with naming(path):
        document = open_document(path)
        if any(kind.is_this(document) for kind in _RECORDINGS.values()):
            return _recording(document, form, expected)
        return _placement(document, form, expected)


def write_recording(recording: Recording, path: Path, *, form: Format) -> None:
    """Write loads; for TensorRT-LLM, `path` is a folder, created if necessary.

    Raises:
        FormatError: the format has no file for loads or needs unknown facts, or the file cannot be
            written.
    """
    with naming(path):
        if form is not Format.TENSORRT_LLM:
            _write(path, _encoded_recording(recording, path, form))
            return
        members = tensorrt_llm.recording_members(recording)
        path.mkdir(parents=True, exist_ok=True)
        if next(path.iterdir(), None) is not None:
            # Readers would add the ranks of an older recording to this one.
            raise FormatError("the folder is not empty")
        for name, data in members.items():
            _write(path / name, data)


def write_placement(placement: ExpertPlacement, path: Path, *, form: Format) -> None:
    """Write a layout.

    Raises:
        FormatError: the format needs unknown facts or cannot express the layout, or the file cannot
            be written.
    """
    with naming(path):
        if placement.share_of_slot is not None and form is not Format.EQUIPOISE:
            raise FormatError(
                f"{form} cannot express shares and would split each expert evenly: write "
                f"{Format.EQUIPOISE}, or plan without weights"
            )
        if placement.has_empty_slots and form is not Format.EQUIPOISE:
            raise FormatError(
                f"{form} cannot express layers with different numbers of slots: write "
                f"{Format.EQUIPOISE}, or plan without --places"
            )
        _write(path, _PLACEMENT_WRITERS[form](placement))


class _Kind(NamedTuple, Generic[Reader]):
    """How to detect one format, and its reader."""

    is_this: Callable[[Any], bool]
    read: Reader


def _has(*keys: str) -> Callable[[Any], bool]:
    """Whether a document is an object with one of these keys."""
    return lambda document: isinstance(document, dict) and not document.keys().isdisjoint(keys)


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda document: isinstance(document, kind)


def _statistics(document: Any) -> Recording:
    if not isinstance(document, Folder):
        raise FormatError("TensorRT-LLM's statistics are a folder with meta_info.json")
    return tensorrt_llm.recording(document)


_RECORDINGS: Mapping[Format, _Kind[Callable[[Any], Recording]]] = {
    Format.EQUIPOISE: _Kind(
        _has(equipoise_json.DOMAINS_KEY, equipoise_json.WINDOWS_KEY), equipoise_json.recording
    ),
    Format.SGLANG: _Kind(_has(sglang.LOADS_KEY, sglang.SINGLE_PASSES_KEY), sglang.recording),
    Format.TENSORRT_LLM: _Kind(_is(Folder), _statistics),
    Format.DEEPSEEK: _Kind(_has(deepseek.LOADS_KEY), deepseek.recording),
}
_PLACEMENTS: Mapping[Format, _Kind[Callable[[Any, Expected], ExpertPlacement]]] = {
    Format.EQUIPOISE: _Kind(_has(equipoise_json.LAYOUT_KEY), equipoise_json.placement),
    Format.SGLANG: _Kind(_has(sglang.LAYOUT_KEY), sglang.placement),
    Format.VLLM: _Kind(_is(list), vllm.placement),
    Format.VLLM_ASCEND: _Kind(_has(vllm_ascend.LAYOUT_KEY), vllm_ascend.placement),
    Format.TENSORRT_LLM: _Kind(_has(tensorrt_llm.LAYOUT_KEY), tensorrt_llm.placement),
    Format.DEEPSEEK: _Kind(_has(deepseek.LAYOUT_KEY), deepseek.placement),
}
_PLACEMENT_WRITERS: Mapping[Format, Callable[[ExpertPlacement], bytes]] = {
    Format.EQUIPOISE: equipoise_json.placement_json,
    Format.SGLANG: sglang.placement_json,
    Format.VLLM: vllm.placement_json,
    Format.VLLM_ASCEND: vllm_ascend.placement_json,
    Format.TENSORRT_LLM: tensorrt_llm.placement_yaml,
    Format.DEEPSEEK: deepseek.placement_npz,
}


def _recording(document: Any, form: Format | None, expected: Expected) -> Recording:
    recording = _reader(document, form, _RECORDINGS, "loads")(document)
    if expected.num_experts not in {None, recording.num_experts}:
        raise FormatError(
            f"it has {recording.num_experts} experts, expected {expected.num_experts}"
        )
    return _without_dense(recording, expected.first_moe_layer)


def _placement(document: Any, form: Format | None, expected: Expected) -> ExpertPlacement:
    return _reader(document, form, _PLACEMENTS, "a layout")(document, expected)


def _reader(
    document: Any, form: Format | None, kinds: Mapping[Format, _Kind[Reader]], what: str
) -> Reader:
    if form is not None:
        if form not in kinds:
            raise FormatError(f"{form} has no format for {what}; use {', '.join(kinds)}")
        return kinds[form].read
    for kind in kinds.values():
        if kind.is_this(document):
            return kind.read
    raise FormatError(
        f"it is not recognised as {what}; supported formats are {', '.join(kinds)}"
        + _what_it_is_instead(document, what)
    )


def _what_it_is_instead(document: Any, what: str) -> str:
    others: dict[str, tuple[str, Mapping[Format, _Kind[Any]]]] = {
        "loads": ("a layout", _PLACEMENTS),
        "a layout": ("loads", _RECORDINGS),
    }
    other, kinds = others[what]
    for form, kind in kinds.items():
        if kind.is_this(document):
            return f". It is {other} of {form}"
    return ""


def _without_dense(recording: Recording, first_moe_layer: int | None) -> Recording:
    if recording.first_moe_layer is None:
        return replace(recording, first_moe_layer=first_moe_layer)
    if first_moe_layer is not None:
        return recording.from_layer(first_moe_layer)
    if recording.first_moe_layer > 0:
        return recording
    return recording.from_layer(recording.num_leading_idle())


def _encoded_recording(recording: Recording, path: Path, form: Format) -> bytes:
    match form:
        case Format.EQUIPOISE:
            return equipoise_json.recording_json(recording)
        case Format.SGLANG if path.suffix == ".pt":
            return sglang.recording_pt(recording)
        case Format.SGLANG:
            return sglang.recording_json(recording)
        case Format.DEEPSEEK:
            return deepseek.recording_npz(recording)
        case _:
            raise FormatError(f"{form} has no format for loads; use {', '.join(_RECORDINGS)}")


def _write(path: Path, data: bytes) -> None:
    """Write atomically: a reader never sees a partial file."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
