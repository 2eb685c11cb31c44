"""vLLM's layouts: a JSON list [layers][slots] of expert ids, MoE layers only.

One flat list [slots] means the same placement in every layer. Slots are in rank order, as
in vLLM's own physical_to_logical_map; the number of ranks is not in the file.
"""

from typing import Any

import numpy as np

from equipoise.formats.errors import FormatError
from equipoise.formats.expected import Expected
from equipoise.formats.placement import ExpertPlacement
from equipoise.formats.tables import ids_2d, shown
from equipoise.formats.text import id_rows


def placement(document: Any, expected: Expected) -> ExpertPlacement:
    """Read a layout; a flat list is repeated for all expected layers, or is one layer.

    Raises:
        FormatError: the document has another form.
    """
    if not isinstance(document, list) or not document:
        raise FormatError(f"a list [layers][slots] is required, not {shown(document)}")
    if isinstance(document[0], list):
        return expected.placement(ids_2d(document))
    table = ids_2d([document])
    return expected.placement(np.repeat(table, expected.num_layers or 1, axis=0))


def placement_json(placement: ExpertPlacement) -> bytes:
    """Write a list [layers][slots], one line per layer."""
    return f"[{id_rows(placement.expert_of_slot)}]\n".encode()
