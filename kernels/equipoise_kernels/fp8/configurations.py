"""Frozen configurations of the kernels, by operation and size.

Owns the JSON files under `tuned/`: one per device, Triton version and operation, written by `make
tune` and committed. Serving never tunes: a launch is a pure function of its sizes and these files,
so every rank runs the same code. A version of Triton without files uses those of one next to it,
and a device without files those of the H100: any configuration gives correct results.

A file is a list of entries, tried in order:

    {"max_rows": 64, "shapes": [[576, 7168]], "config": {...}}

Both conditions are optional; the last entry has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from equipoise_kernels.fp8.jit import triton_version

DEFAULT_DEVICE = "nvidia_h100_80gb_hbm3"

_FOLDER = Path(__file__).parent / "tuned"
_NO_OPTIONS = ("ctas_per_sm", "tokens_per_split")
_NUM_WARPS = "num_warps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A configuration and its conditions; None matches everything."""

    config: Mapping[str, Any]
    max_rows: int | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None

    def fits(self, rows: int, shape: tuple[int, ...]) -> bool:
        """Whether the entry applies to a launch with `rows` rows and weights of a shape."""
        return (self.max_rows is None or rows <= self.max_rows) and (
            self.shapes is None or shape in self.shapes
        )


@lru_cache(maxsize=4096)
def choose(operation: str, kind: Any, *, rows: int, shape: tuple[int, ...] = ()) -> Any:
    """Return the configuration of a launch on this process's device.

    Args:
        operation: its name.
        kind: the dataclass of its configurations.
        rows: rows of the launch, or the expected number.
        shape: (N, K) of the weights, or what else the operation is tuned for.
    """
    entry = next(entry for entry in _entries_here(operation) if entry.fits(rows, shape))
    return kind(**entry.config)


@lru_cache(maxsize=4096)
def options(config: Any) -> dict[str, Any]:
    """A configuration as launch options: constants in capitals, and `num_warps`."""
    return {
        name if name == _NUM_WARPS else name.upper(): value
        for name, value in asdict(config).items()
        if name not in _NO_OPTIONS
    }


def committed(operation: str) -> dict[str, tuple[Entry, ...]]:
    """All committed files of an operation: entries by "device/triton_version"."""
    return {
        f"{path.parent.parent.name}/{path.parent.name}": read(path)
        for path in sorted(_FOLDER.glob(f"*/*/{operation}.json"))
    }


def operations() -> tuple[str, ...]:
    """Names of the operations with committed configurations."""
    return tuple(sorted({path.stem for path in _FOLDER.glob("*/*/*.json")}))


def path_of(operation: str, *, device: str, triton: str) -> Path:
    """Path of an operation's committed configurations."""
    return _FOLDER / device / f"triton_{triton}" / f"{operation}.json"


def read(path: Path) -> tuple[Entry, ...]:
    """Read a file's entries, in order."""
    entries = []
    for item in json.loads(path.read_text())["entries"]:
        shapes = item.get("shapes")
        entries.append(
            Entry(
                config=item["config"],
                max_rows=item.get("max_rows"),
                shapes=None if shapes is None else tuple(tuple(shape) for shape in shapes),
            )
        )
    assert entries, f"{path} has no entries"
    assert entries[-1].max_rows is None, f"{path}: the last entry must fit every launch"
    assert entries[-1].shapes is None, f"{path}: the last entry must fit every launch"
    return tuple(entries)


def write(path: Path, entries: Sequence[Entry], *, origin: Mapping[str, str]) -> None:
    """Write a file; `origin` records how its configurations were chosen."""
    items = [{k: v for k, v in asdict(entry).items() if v is not None} for entry in entries]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"origin": dict(origin), "entries": items}, indent=1) + "\n")


def device_name(device: int = 0) -> str:
    """A CUDA device's name as in the files' paths: "nvidia_h200"; the default's without CUDA."""
    if not torch.cuda.is_available():
        return DEFAULT_DEVICE
    return torch.cuda.get_device_name(device).lower().replace(" ", "_")


def nearest(operation: str, *, device: str, triton: str | None) -> Path:
    """The committed file for a device and a version of Triton, or what is nearest to them.

    That is the last version before, or else the first after; the default device's, if the device
    has none; and the last of all without Triton.
    """
    own, default = (
        sorted(_FOLDER.glob(f"{name}/triton_*/{operation}.json"), key=_version)
        for name in (device, DEFAULT_DEVICE)
    )
    paths = own or default
    before = [path for path in paths if triton is None or _version(path) <= _numbers(triton)]
    return before[-1] if before else paths[0]


def _version(path: Path) -> tuple[int, ...]:
    return _numbers(path.parent.name.removeprefix("triton_"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@cache
def _entries_here(operation: str) -> tuple[Entry, ...]:
    return read(nearest(operation, device=device_name(), triton=triton_version()))
