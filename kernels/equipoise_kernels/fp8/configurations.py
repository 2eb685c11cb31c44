"""Frozen configurations of the kernels, by operation and size.

Owns the JSON files under `tuned/`: one per device, Triton version and operation, written by `make
tune` and committed. Serving never tunes: a launch is a pure function of its sizes and these files,
so every rank runs the same code. A device or version without files uses those of the H200 with
Triton 3.6: any configuration gives correct results.

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

DEFAULT_DEVICE = "nvidia_h200"
DEFAULT_TRITON = "3.6"

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
    """A CUDA device's name as in the files' paths: "nvidia_h200", also the default without CUDA."""
    if not torch.cuda.is_available():
        return DEFAULT_DEVICE
    return torch.cuda.get_device_name(device).lower().replace(" ", "_")


@cache
def _entries_here(operation: str) -> tuple[Entry, ...]:
    own = path_of(operation, device=device_name(), triton=triton_version() or DEFAULT_TRITON)
    default = path_of(operation, device=DEFAULT_DEVICE, triton=DEFAULT_TRITON)
    return read(own if own.exists() else default)
