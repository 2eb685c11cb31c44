"""Opens containers: a folder, a zip of tensors, JSON or YAML. Independent of formats."""

import json
from pathlib import Path
from typing import Any

from equipoise.formats import archive, npz_file, torch_file, yaml_file
from equipoise.formats.errors import FormatError

META_INFO = "meta_info.json"
"""Marks a folder of statistics."""


class Folder(dict[str, bytes]):
    """The files of a folder of statistics, by name."""


def open_document(path: Path) -> Any:
    """Read the content of a file as lists, dicts and arrays.

    Numbers of JSON are numbers, those of YAML text, and those of .pt and .npz files arrays.

    Raises:
        FormatError: the file has no known type, is damaged, or is too large.
        OSError: it cannot be read.
    """
    if path.is_dir():
        return _folder(path)
    with path.open("rb") as file:
        data = file.read(archive.MAX_BYTES + 1)
    if len(data) > archive.MAX_BYTES:
        raise FormatError(f"it has more than {archive.MAX_BYTES} bytes")
    if data.startswith(archive.MAGIC):
        members = archive.unpacked(data)
        if any(name.endswith(".npy") for name in members):
            return npz_file.load(members)
        return torch_file.load(data)
    return _text_document(data)


def _folder(path: Path) -> Folder:
    if not (path / META_INFO).is_file():
        raise FormatError(f"the folder has no {META_INFO}")
    files = [path / META_INFO, *sorted(path.glob("rank*.safetensors"))]
    size = sum(file.stat().st_size for file in files)
    if size > archive.MAX_BYTES:
        raise FormatError(f"its files have {size} bytes, more than {archive.MAX_BYTES}")
    return Folder({file.name: file.read_bytes() for file in files})


def _text_document(data: bytes) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise FormatError("it is neither text nor a .pt or .npz file") from None
    try:
        return json.loads(text, object_pairs_hook=_object)
    except FormatError:
        raise
    except RecursionError:
        raise FormatError("its JSON is nested too deeply") from None
    except ValueError as error:
        if text.lstrip().startswith(("{", "[")):
            raise FormatError(f"it is not valid JSON: {error}") from None
    return yaml_file.load(text)


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; rejects duplicate keys."""
    document = dict(members)
    if len(document) != len(members):
        names = [name for name, _ in members]
        twin = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"the JSON key {twin[:40]!r} is duplicated")
    return document
