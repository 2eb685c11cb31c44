"""What a balancer and a process that plans for it say to each other: pickles, each with its length.

Both sides are on one machine and of one release, unless somebody upgrades below a balancer that
runs; then what comes cannot be read.
"""

import asyncio
import pickle
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct("!Q")


def frame(value: object) -> bytes:
    """The bytes of a value that can be pickled."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def read_frame(file: BinaryIO) -> Any:
    """The next value. Blocks.

    Raises:
        EOFError: there is none.
        Exception: it cannot be read.
    """
    length = file.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        raise EOFError
    return pickle.loads(file.read(*_LENGTH.unpack(length)))  # noqa: S301 - our own


async def receive_frame(reader: asyncio.StreamReader) -> Any:
    """The next value.

    Raises:
        asyncio.IncompleteReadError: there is none.
        Exception: it cannot be read.
    """
    length = await reader.readexactly(_LENGTH.size)
    return pickle.loads(await reader.readexactly(*_LENGTH.unpack(length)))  # noqa: S301 - our own
