"""Messages between a balancer and its planning processes: pickles, each with its length.

Both sides run on one machine and are of one release, unless the package is upgraded under a running
balancer; then messages cannot be decoded.
"""

import asyncio
import pickle
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct("!Q")


def frame(value: object) -> bytes:
    """Return the bytes of a value that can be pickled."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def read_frame(file: BinaryIO) -> Any:
    """Read the next value. Blocks.

    Raises:
        EOFError: there is no next value.
        Exception: it cannot be decoded.
    """
    length = file.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        raise EOFError
    return pickle.loads(file.read(*_LENGTH.unpack(length)))  # noqa: S301 - our own


async def receive_frame(reader: asyncio.StreamReader) -> Any:
    """Read the next value.

    Raises:
        asyncio.IncompleteReadError: there is no next value.
        Exception: it cannot be decoded.
    """
    length = await reader.readexactly(_LENGTH.size)
    return pickle.loads(await reader.readexactly(*_LENGTH.unpack(length)))  # noqa: S301 - our own
