"""Loads of 58 layers x 256 experts to measure planners on, by name.

Those of our own trained model have 32 experts; eight of its recorded layers side by side, drawn by
a seed, are one of 256. `EQUIPOISE_LOADS`, a folder of recordings in any format we read, replaces
them: `EQUIPOISE_LOADS=deepseek-r1-loads make bench`. Each load is there twice, the second time with
expert ids shuffled per layer.
"""

import json
import os
from pathlib import Path

import numpy as np

from equipoise.formats.files import read_recording

RECORDED = Path(__file__).parents[2] / "model/equipoise_model/checkpoints/tiny/loads.json"
SHUFFLED = " shuffled"
SEED = 7


def loads_to_measure():
    """Loads by name, float64 [layers, experts] each."""
    folder = os.environ.get("EQUIPOISE_LOADS")
    loads = own_loads() if folder is None else _loads_in(Path(folder))
    rng = np.random.default_rng(SEED)
    shuffled = {f"{name}{SHUFFLED}": rng.permuted(load, axis=1) for name, load in loads.items()}
    return {**loads, **shuffled}


def as_recorded(loads):
    """Those whose expert ids are as they were recorded."""
    return {name: load for name, load in loads.items() if not name.endswith(SHUFFLED)}


def own_loads():
    """A load for each kind of text that our own model's experts were counted on."""
    domains = json.loads(RECORDED.read_text())["domains"]
    return {name: _side_by_side(np.array(windows, float)) for name, windows in domains.items()}


def _side_by_side(windows):
    rows = windows.reshape(-1, windows.shape[-1])
    rng = np.random.default_rng(SEED)
    layers = []
    for _ in range(58):
        chosen = rows[rng.choice(len(rows), 8, replace=False)]
        # Groups of a router are not alike; within one, experts keep what was counted.
        layers.append((chosen * rng.lognormal(sigma=0.3, size=(8, 1))).ravel())
    return np.array(layers)


def _loads_in(folder):
    return {path.stem: read_recording(path).total() for path in sorted(folder.iterdir())}
