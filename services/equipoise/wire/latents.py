"""The `LatentTransfer` contract: checks of requests, and blocks from a stream of their parts."""

import struct
import zlib
from collections.abc import Iterator

from equipoise.wire.block_keys import KEY_BYTES
from equipoise.wire.errors import InvalidMessageError
from equipoise_api.v1 import worker_pb2 as pb

PART_BYTES = 2**20
"""Most bytes of a block in one message: gRPC's limit is 4 MiB, and a block may be larger."""


def check_fetch(message: pb.LatentTransferFetchRequest, *, max_blocks: int) -> None:
    """Check the keys of a request; `max_blocks` are those of the longest context.

    Raises:
        InvalidMessageError: "latents_count" or "latents_key"; says what is wrong.
    """
    if not 1 <= len(message.keys) <= max_blocks:
        raise InvalidMessageError(
            "latents_count",
            f"{len(message.keys)} blocks are asked for: this worker's context has 1 to "
            f"{max_blocks}",
        )
    for index, key in enumerate(message.keys):
        if len(key) != KEY_BYTES:
            raise InvalidMessageError(
                "latents_key", f"key {index} has {len(key)} bytes, not {KEY_BYTES}"
            )


def parts_of(index: int, data: bytes) -> Iterator[pb.LatentTransferFetchResponse]:
    """Yield the messages for one block; the last has its checksum."""
    for start in range(0, len(data), PART_BYTES):
        is_last = start + PART_BYTES >= len(data)
        yield pb.LatentTransferFetchResponse(
            index=index,
            data=data[start : start + PART_BYTES],
            checksum=zlib.crc32(data) if is_last else None,
        )


class BlockStream:
    """Puts blocks together from messages, in order and each of `block_bytes`."""

    def __init__(self, *, num_blocks: int, block_bytes: int) -> None:
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._index = 0
        self._data = bytearray()

    def add(self, message: pb.LatentTransferFetchResponse) -> bytes | None:
        """Take a message; returns a block that is complete and has its checksum.

        Raises:
            InvalidMessageError: "latents_order", "latents_size" or "latents_checksum".
        """
        if message.index != self._index or self._index >= self._num_blocks:
            raise InvalidMessageError(
                "latents_order",
                f"block {message.index} came where block {self._index} of {self._num_blocks} was "
                "expected",
            )
        self._data += message.data
        has_end = message.HasField("checksum")
        if (
            len(self._data) > self._block_bytes
            or not message.data
            or (has_end and len(self._data) != self._block_bytes)
        ):
            raise InvalidMessageError(
                "latents_size",
                f"block {message.index} has {len(self._data)} bytes, not {self._block_bytes}",
            )
        if not has_end:
            return None
        block, self._data = bytes(self._data), bytearray()
        self._index += 1
        if zlib.crc32(block) != message.checksum:
            sent = struct.pack(">I", message.checksum).hex()
            raise InvalidMessageError(
                "latents_checksum",
                f"block {message.index} has checksum {zlib.crc32(block):08x}, not {sent}",
            )
        return block
