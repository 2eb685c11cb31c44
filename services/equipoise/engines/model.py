"""`EngineModel`: the model in an engine, as its plugin describes it to the seat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.engines.errors import UnsupportedEngineError
from equipoise.engines.slots import EngineSlots
from equipoise.planning.layout import Layout
from equipoise.planning.topology import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineModel:
    """What a plugin knows of the model in its engine.

    Raises:
        UnsupportedEngineError: experts of its layers differ in size, or its table has other slots
            than its tensors.
    """

    engine: str
    """Name and version of the engine, for display."""

    shape: ModelShape
    """Shape of the model."""

    expert_of_slot: npt.NDArray[np.int32]
    """The layout that the engine started with, [layers, slots]."""

    slots: Sequence[EngineSlots]
    """This rank's slots, by MoE layer."""

    tables: Callable[[Layout], Any]
    """Makes the engine's tables of a layout, on any thread. Raises StageRejectedError if the engine
    cannot serve it; whatever may fail, fails here."""

    commit: Callable[[Any], None]
    """Puts tables in force between two passes, by copies that cannot fail."""

    max_replicas: int
    """Most replicas of an expert that its tables have room for."""

    counted_rows: Sequence[int]
    """The rows of its layers in what the engine counts; others are of dense layers, or of other
    stages."""

    def __post_init__(self) -> None:
        sizes = {slots.expert_bytes for slots in self.slots}
        if len(sizes) > 1:
            raise UnsupportedEngineError(
                f"an expert has {min(sizes)} bytes in one layer and {max(sizes)} in another: serve "
                "a model with the same quantization in all MoE layers"
            )
        held, (num_layers, num_slots) = (
            [one.num_slots for one in self.slots],
            self.expert_of_slot.shape,
        )
        if len(held) != num_layers or len(set(held)) > 1 or num_slots % held[0]:
            raise UnsupportedEngineError(
                f"its table has {num_layers} layers of {num_slots} slots, and this rank has "
                f"tensors of {sorted(set(held))} slots in {len(held)} layers: this release is "
                "unknown"
            )
