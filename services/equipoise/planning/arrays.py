"""The arrays of planning, one name per element type and meaning.

Shapes are named in brackets where an array is documented, for example [layers, experts].
"""

import numpy as np
import numpy.typing as npt

Load = npt.NDArray[np.float64]
"""Assignments, in total or per second, or any other unit: [layers, experts | slots | ranks]."""

ExpertTable = npt.NDArray[np.int32]
"""The logical expert in each physical slot: [layers, slots]; EMPTY for none."""

EMPTY = -1
"""In a slot that holds no expert."""

ShareTable = npt.NDArray[np.int32]
"""The share of its expert that each slot serves: [layers, slots], in units of `shares.WHOLE`."""

AssignmentCounts = npt.NDArray[np.uint64]
"""Cumulative counters of one rank: [layers, slots_per_rank]."""

Checksums = npt.NDArray[np.uint8]
"""BLAKE2b-128 of experts: [layers, experts | slots, 16]."""

Slots = npt.NDArray[np.int32]
"""One layer of an `ExpertTable`: [slots]."""

Weights = npt.NDArray[np.float64]
"""Loads of one layer, or fractions: [experts | slots | ranks]."""

Indices = npt.NDArray[np.int64]
"""Positions or counts."""

Bools = npt.NDArray[np.bool_]
