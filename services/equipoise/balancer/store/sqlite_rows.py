"""Rows of the SQLite file that hold tables."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from equipoise.balancer.store.records import INVALID_RECORD, checked_average, stored_layout
from equipoise.planning.layout import Layout
from equipoise.pool.records import AverageRecord


def unpack_layout(generation: int, row: tuple[Any, ...]) -> Layout:
    """Read a layout from its columns, as the schema has them.

    Raises:
        one of INVALID_RECORD: it is not valid.
    """
    num_layers, num_experts, num_ranks, cells, packed_shares = row
    table = np.frombuffer(cells, dtype="<i4").reshape(num_layers, -1)
    shares = None
    if packed_shares is not None:
        shares = np.frombuffer(packed_shares, dtype="<u2").reshape(table.shape).astype(np.int32)
    return stored_layout(
        generation=generation,
        num_experts=num_experts,
        num_ranks=num_ranks,
        expert_of_slot=table.astype(np.int32),
        share_of_slot=shares,
    )


def unpack_average(row: tuple[Any, ...]) -> AverageRecord:
    """Read a moving average from its columns, as the schema has them.

    Raises:
        one of INVALID_RECORD: it is not valid.
    """
    half_life_s, time_unix_s, weight_s, num_layers, num_experts, decayed_load = row
    table = np.frombuffer(decayed_load, dtype="<f8").reshape(num_layers, num_experts)
    return checked_average(
        AverageRecord(
            half_life_s=half_life_s,
            time_unix_s=time_unix_s,
            weight_s=weight_s,
            decayed_load=table.astype(np.float64),
        )
    )


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Name the record in the error of reading it.

    Raises:
        ValueError: it is not valid.
    """
    try:
        yield
    except INVALID_RECORD as error:
        raise ValueError(f"{what}: {error}") from error
