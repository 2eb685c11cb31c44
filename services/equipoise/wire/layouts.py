"""Conversion of what several messages contain: layouts, their changes, shapes and checksums."""

from collections.abc import Collection
from typing import Any

import numpy as np
from google.protobuf.message import Message

from equipoise.planning.arrays import Checksums, ShareTable
from equipoise.planning.change import LayoutChange
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import DIGEST_BYTES, Layout
from equipoise.planning.moves import CHECKSUM_BYTES
from equipoise.planning.topology import ModelShape
from equipoise.wire import checks
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import Hello
from equipoise_api.v1 import worker_link_pb2 as pb


def fields_of(value: Any, *, but: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a message, by name, without those that protobuf has in another form."""
    # `dataclasses.fields` takes longer than the conversion of a small message.
    names = value.__dataclass_fields__
    return {name: getattr(value, name) for name in names if name not in but}


def layout_to_proto(layout: Layout) -> pb.Layout:
    """Convert a layout."""
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
    """Check and convert a layout. `check_layout_suits` checks whether it suits a worker.

    Raises:
        InvalidMessageError: "_shape" if a table's size does not match the message's dimensions,
            "_layout" if it is not a valid layout.
    """
    shape = (message.num_layers, message.num_slots)
    # Check sizes before contents, so that allocations are bounded by the bytes received.
    if not 0 < message.num_layers * message.num_slots <= checks.MAX_CELLS:
        raise InvalidMessageError(
            f"{kind}_shape",
            f"{kind}: a layout must have 1 to {checks.MAX_CELLS} slots over all layers, not "
            f"{shape[0]} layers x {shape[1]} slots",
        )
    if not 0 < message.num_experts <= message.num_slots:
        raise InvalidMessageError(
            f"{kind}_shape",
            f"{kind}: {message.num_slots} slots cannot hold {message.num_experts} experts",
        )
    cells = checks.table(kind, message, "expert_of_slot", dtype="<i4", shape=shape)
    try:
        return Layout(
            generation=checks.count(kind, "generation", message.generation, least=1),
            num_experts=message.num_experts,
            num_ranks=message.num_ranks,
            expert_of_slot=cells.astype(np.int32),
            share_of_slot=_shares(kind, message, "share_of_slot", shape),
        )
    except InvalidLayoutError as error:
        raise InvalidMessageError(f"{kind}_layout", f"{kind}: {error}") from error


def change_to_proto(change: LayoutChange) -> pb.LayoutChange:
    """Convert a layout change."""
    shares = change.share_of_cell
    return pb.LayoutChange(
        generation=change.generation,
        cells=change.cells.astype("<u4", copy=False).tobytes(),
        expert_of_cell=change.expert_of_cell.astype("<i4", copy=False).tobytes(),
        share_of_cell=None if shares is None else shares.astype("<u2").tobytes(),
        digest=change.digest,
    )


def changed_from_proto(message: pb.LayoutChange, *, kind: str, base: Layout) -> Layout:
    """Check a layout change and apply it to `base`.

    Raises:
        InvalidMessageError: "_shape" if a table does not match the number of cells; "_layout" if
            the result is not a valid layout or its digest differs.
    """
    num_cells = len(message.cells) // 4
    cells = checks.table(kind, message, "cells", dtype="<u4", shape=(num_cells,))
    experts = checks.table(kind, message, "expert_of_cell", dtype="<i4", shape=(num_cells,))
    if len(message.digest) != DIGEST_BYTES:
        raise InvalidMessageError(
            f"{kind}_shape",
            f"{kind}: digest must have {DIGEST_BYTES} bytes, not {len(message.digest)}",
        )
    change = LayoutChange(
        generation=checks.count(kind, "generation", message.generation, least=1),
        cells=cells.astype(np.uint32, copy=False),
        expert_of_cell=experts.astype(np.int32, copy=False),
        share_of_cell=_shares(kind, message, "share_of_cell", (num_cells,)),
        digest=message.digest,
    )
    try:
        return change.applied_to(base)
    except InvalidLayoutError as error:
        raise InvalidMessageError(f"{kind}_layout", f"{kind}: {error}") from error


def check_layout_suits(kind: str, layout: Layout, *, hello: Hello) -> None:
    """Check that a layout matches the worker's model and slots per rank.

    The number of ranks is not checked, because pools grow and shrink; `check_places` checks the
    worker's own places.

    Raises:
        InvalidMessageError: "_shape" or "_places" if it does not match.
    """
    has = (layout.num_layers, layout.num_experts, layout.slots_per_rank)
    wanted = (hello.model.num_layers, hello.model.num_experts, hello.slots_per_rank)
    if has != wanted:
        raise InvalidMessageError(
            f"{kind}_shape",
            f"{kind}: the layout has (layers, experts, slots per rank) {has}, "
            f"but {hello.worker} serves {wanted}",
        )
    if not hello.num_places and layout.has_empty_slots:
        raise InvalidMessageError(
            f"{kind}_places",
            f"{kind}: the layout has empty slots, but {hello.worker} has no places that layers "
            "share",
        )


def check_places(kind: str, layout: Layout, *, hello: Hello, rank: int) -> None:
    """Check that the worker, as a rank of a layout that suits it, has a place for each expert.

    Raises:
        InvalidMessageError: "_places" if it has not.
    """
    used = layout.used_places[rank]
    if 0 < hello.num_places < used:
        raise InvalidMessageError(
            f"{kind}_places",
            f"{kind}: rank {rank} of the layout holds {used} experts, but {hello.worker} has "
            f"{hello.num_places} places",
        )


def model_to_proto(model: ModelShape) -> pb.ModelShape:
    """Convert a model shape."""
    return pb.ModelShape(**fields_of(model))


def model_from_proto(message: pb.ModelShape, *, kind: str = "model") -> ModelShape:
    """Check and convert a model shape.

    Raises:
        InvalidMessageError: "_model" if it is not valid.
    """
    if not 1 <= message.expert_bytes <= checks.MAX_EXPERT_BYTES:
        raise InvalidMessageError(
            f"{kind}_range",
            f"{kind}: expert_bytes must be from 1 to 2^35, not {message.expert_bytes}",
        )
    if message.num_layers * message.num_experts > checks.MAX_EXPERT_CELLS:
        raise InvalidMessageError(
            f"{kind}_model",
            f"{kind}: {message.num_layers} layers x {message.num_experts} experts must be at most "
            f"{checks.MAX_EXPERT_CELLS}",
        )
    try:
        return ModelShape(
            num_layers=message.num_layers,
            num_experts=message.num_experts,
            num_groups=message.num_groups,
            expert_bytes=message.expert_bytes,
            has_shared_expert=message.has_shared_expert,
        )
    except ValueError as error:
        raise InvalidMessageError(f"{kind}_model", f"{kind}: {error}") from error


def checksums_to_bytes(checksums: Checksums) -> bytes:
    """Pack the checksums of a worker's slots, or of all experts."""
    assert checksums.dtype == np.uint8, checksums.dtype
    assert checksums.ndim == 3, checksums.shape
    assert checksums.shape[2] == CHECKSUM_BYTES, checksums.shape
    return checksums.tobytes()


def slot_checksums_from_proto(kind: str, message: Any, *, hello: Hello) -> Checksums:
    """Checksums of a worker's slots, uint8 [layers, slots_per_rank, 16], read-only.

    Raises:
        InvalidMessageError: "_shape" if the number of bytes does not match.
    """
    shape = (hello.model.num_layers, hello.slots_per_rank, CHECKSUM_BYTES)
    table = checks.table(kind, message, "slot_checksums", dtype="|u1", shape=shape)
    return table.astype(np.uint8, copy=False)


def expert_checksums_from_proto(kind: str, message: Any, *, hello: Hello) -> Checksums | None:
    """Checksums of all experts, uint8 [layers, experts, 16], read-only; None if not sent.

    Raises:
        InvalidMessageError: "_shape" if the number of bytes does not match.
    """
    if not message.expert_checksums:
        return None
    shape = (hello.model.num_layers, hello.model.num_experts, CHECKSUM_BYTES)
    table = checks.table(kind, message, "expert_checksums", dtype="|u1", shape=shape)
    return table.astype(np.uint8, copy=False)


def _shares(kind: str, message: Message, field: str, shape: tuple[int, ...]) -> ShareTable | None:
    if not message.HasField(field):
        return None
    return checks.table(kind, message, field, dtype="<u2", shape=shape).astype(np.int32)
