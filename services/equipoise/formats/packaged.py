"""Locates the checkpoint shipped with `equipoise_model`, without importing it."""

import importlib.util
from pathlib import Path

from equipoise.formats.errors import FormatError


def packaged_checkpoint() -> Path:
    """Return the folder of the tiny checkpoint.

    Raises:
        FormatError: the model package is not installed.
    """
    spec = importlib.util.find_spec("equipoise_model")
    if spec is None or not spec.submodule_search_locations:
        raise FormatError(
            "equipoise_model is not installed: name the folder of a model with --checkpoint, or "
            "run pip install '.[worker]' in a checkout"
        )
    return Path(spec.submodule_search_locations[0]) / "checkpoints" / "tiny"
