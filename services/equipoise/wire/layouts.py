"""Layouts and their changes, model shapes and checksums: the parts that several messages carry."""

import numpy as np

from equipoise.planning.arrays import Checksums
from equipoise.planning.change import DIGEST_BYTES, LayoutChange
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout
from equipoise.planning.moves import CHECKSUM_BYTES
from equipoise.planning.topology import ModelShape
from equipoise.wire import checks
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import Hello
from equipoise_api.v1 import worker_link_pb2 as pb


def layout_to_proto(layout: Layout) -> pb.Layout:
    """The layout as its message."""
    shares = layout.share_of_slot
    return pb.Layout(
        generation=layout.generation,
        num_layers=layout.num_layers,
        num_slots=layout.num_slots,
        num_experts=layout.num_experts,
        num_ranks=layout.num_ranks,
        expert_of_slot=layout.expert_of_slot.astype("<i4", copy=False).tobytes(),
        share_of_slot=None if shares is None else shares.astype("<u2").tobytes(),
    )


def layout_from_proto(message: pb.Layout, *, kind: str = "layout") -> Layout:
    """The layout in a message; whether it suits a pool is `check_layout_suits`.

    Raises:
        InvalidMessageError: "_shape" when a table has another size than the message says,
            "_layout" when it is not a layout that any pool may run.
    """
    shape = (message.num_layers, message.num_slots)
    # Sizes before contents: what is allocated below must be bounded by what was sent.
    if not 0 < message.num_layers * message.num_slots <= checks.MAX_CELLS:
        raise InvalidMessageError(
            f"{kind}_shape",
            f"{kind}: a layout has from 1 to 2^20 cells, not {shape[0]} layers x {shape[1]} slots",
        )
    if not 0 < message.num_experts <= message.num_slots:
        raise InvalidMessageError(
            f"{kind}_shape",
            f"{kind}: {message.num_slots} slots cannot hold {message.num_experts} experts",
        )
    cells = checks.table(kind, "expert_of_slot", message.expert_of_slot, dtype="<i4", shape=shape)
    shares = None
    if message.HasField("share_of_slot"):
        parts = checks.table(kind, "share_of_slot", message.share_of_slot, dtype="<u2", shape=shape)
        shares = parts.astype(np.int32)
    try:
        return Layout(
            generation=checks.count(kind, "generation", message.generation, least=1),
            num_experts=message.num_experts,
            num_ranks=message.num_ranks,
            expert_of_slot=cells.astype(np.int32),
            share_of_slot=shares,
        )
    except InvalidLayoutError as error:
        raise InvalidMessageError(f"{kind}_layout", f"{kind}: {error}") from error


def change_to_proto(change: LayoutChange) -> pb.LayoutChange:
    """The change as its message."""
    shares = change.share_of_cell
    return pb.LayoutChange(
        generation=change.generation,
        cells=change.cells.astype("<u4", copy=False).tobytes(),
        expert_of_cell=change.expert_of_cell.astype("<i4", copy=False).tobytes(),
        share_of_cell=None if shares is None else shares.astype("<u2").tobytes(),
        digest=change.digest,
    )


def changed_from_proto(message: pb.LayoutChange, *, kind: str, base: Layout) -> Layout:
    """The layout that a change makes of `base`.

    Raises:
        InvalidMessageError: "_shape" when a table has another size than there are cells, "_layout"
            when what comes out is no layout, or not the one that was meant.
    """
    num_cells = len(message.cells) // 4
    cells = checks.table(kind, "cells", message.cells, dtype="<u4", shape=(num_cells,))
    experts = checks.table(
        kind, "expert_of_cell", message.expert_of_cell, dtype="<i4", shape=(num_cells,)
    )
    shares = None
    if message.HasField("share_of_cell"):
        parts = checks.table(
            kind, "share_of_cell", message.share_of_cell, dtype="<u2", shape=(num_cells,)
        )
        shares = parts.astype(np.int32)
    if len(message.digest) != DIGEST_BYTES:
        raise InvalidMessageError(
            f"{kind}_shape",
            f"{kind}: a digest has {DIGEST_BYTES} bytes, not {len(message.digest)}",
        )
    change = LayoutChange(
        generation=checks.count(kind, "generation", message.generation, least=1),
        cells=cells.astype(np.uint32, copy=False),
        expert_of_cell=experts.astype(np.int32, copy=False),
        share_of_cell=shares,
        digest=message.digest,
    )
    try:
        return change.applied_to(base)
    except InvalidLayoutError as error:
        raise InvalidMessageError(f"{kind}_layout", f"{kind}: {error}") from error


def check_layout_suits(kind: str, layout: Layout, *, hello: Hello) -> None:
    """Refuse a layout for another model, or for ranks of another size.

    It may have any number of ranks: pools grow and shrink.

    Raises:
        InvalidMessageError: "_shape", naming both shapes.
    """
    has = (layout.num_layers, layout.num_experts, layout.slots_per_rank)
    wanted = (hello.model.num_layers, hello.model.num_experts, hello.slots_per_rank)
    if has != wanted:
        raise InvalidMessageError(
            f"{kind}_shape",
            f"{kind}: the layout has (layers, experts, slots per rank) {has}, "
            f"but {hello.worker} serves {wanted}",
        )


def model_to_proto(model: ModelShape) -> pb.ModelShape:
    """The shape as its message."""
    return pb.ModelShape(
        num_layers=model.num_layers,
        num_experts=model.num_experts,
        num_groups=model.num_groups,
        expert_bytes=model.expert_bytes,
    )


def model_from_proto(message: pb.ModelShape, *, kind: str = "model") -> ModelShape:
    """The shape in a message.

    Raises:
        InvalidMessageError: "_model" when no model has this shape.
    """
    checks.count(kind, "expert_bytes", message.expert_bytes, least=1)
    if message.num_layers * message.num_experts > checks.MAX_CELLS:
        raise InvalidMessageError(
            f"{kind}_model",
            f"{kind}: {message.num_layers} layers x {message.num_experts} experts is more than "
            "2^20 experts in all",
        )
    try:
        return ModelShape(
            num_layers=message.num_layers,
            num_experts=message.num_experts,
            num_groups=message.num_groups,
            expert_bytes=message.expert_bytes,
        )
    except ValueError as error:
        raise InvalidMessageError(f"{kind}_model", f"{kind}: {error}") from error


def checksums_to_bytes(checksums: Checksums) -> bytes:
    """Checksums of own slots, packed."""
    assert checksums.dtype == np.uint8, checksums.dtype
    assert checksums.ndim == 3, checksums.shape
    assert checksums.shape[2] == CHECKSUM_BYTES, checksums.shape
    return checksums.tobytes()


def checksums_from_bytes(
    kind: str, data: bytes, *, model: ModelShape, slots_per_rank: int
) -> Checksums:
    """Checksums of own slots, uint8 [layers, slots_per_rank, 16], read-only.

    Raises:
        InvalidMessageError: "_shape" when the bytes are not as many.
    """
    shape = (model.num_layers, slots_per_rank, CHECKSUM_BYTES)
    return checks.table(kind, "slot_checksums", data, dtype="|u1", shape=shape).astype(
        np.uint8, copy=False
    )
