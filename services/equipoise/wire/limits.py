"""Size limits of messages, derived from their contents. Larger messages are not decoded.

A port has one limit for all callers, from the largest tables that `checks` accepts. After its Hello
a worker's own shape gives a lower limit.
"""

from equipoise.planning.moves import CHECKSUM_BYTES
from equipoise.wire.checks import MAX_CELLS, MAX_EXPERT_CELLS, MAX_RANKS
from equipoise.wire.messages import Hello

_REST_BYTES = 64 * 1024
"""Room for everything but tables: names, reasons, numbers and tags."""

_CELL_BYTES = 4 + 2
"""Bytes of an expert and its share, per slot of a layout."""

_NAME_BYTES = 256
"""Bytes of a worker's name."""

MAX_HELLO_BYTES = (
    MAX_CELLS * _CELL_BYTES
    + 2 * MAX_EXPERT_CELLS * CHECKSUM_BYTES
    + MAX_RANKS * _NAME_BYTES
    + _REST_BYTES
)
"""Limit of a Hello: the layout and the workers of all ranks, the checksums of the worker's slots
and those of all experts. Less than 5 MiB."""

MAX_STATUS_BYTES = 3 * 8 * MAX_CELLS + _REST_BYTES
"""Limit of a response of the Status service: three tables of float64."""


def max_message_bytes(hello: Hello) -> int:
    """Limit of messages after the Hello: a checksum for each own slot and for each expert.

    At most 2 MiB and 64 KiB, by the ranges of a Hello.
    """
    cells = hello.model.num_layers * (hello.slots_per_rank + hello.model.num_experts)
    return cells * CHECKSUM_BYTES + _REST_BYTES


def max_request_bytes(*, context_length: int) -> int:
    """Limit of messages to a worker's port: a prompt and as many stop tokens.

    Each token is a varint of up to 5 bytes.
    """
    return 2 * 5 * context_length + _REST_BYTES
