"""How long messages may be, by what can be in them. Longer ones are not even decoded.

A port has one limit for all who connect, by the largest tables that `checks` lets through; once a
worker said what it is, its own shape says less.
"""

from equipoise.planning.moves import CHECKSUM_BYTES
from equipoise.wire.checks import MAX_CELLS
from equipoise.wire.messages import Hello

_REST_BYTES = 64 * 1024
"""Names, reasons, numbers and tags: whatever is not a table."""

_CELL_BYTES = 4 + 2
"""An expert and its share, for a slot of a layout."""

MAX_HELLO_BYTES = MAX_CELLS * (_CELL_BYTES + CHECKSUM_BYTES) + _REST_BYTES
"""A worker that runs: the layout of all ranks, and the checksums of its own slots (of a pool of
one rank those are all)."""

MAX_STATUS_BYTES = 3 * 8 * MAX_CELLS + _REST_BYTES
"""The longest answer of the Status service: three tables of float64."""


def max_message_bytes(hello: Hello) -> int:
    """The longest message after the Hello: a checksum, or a counter, for each own slot."""
    return hello.model.num_layers * hello.slots_per_rank * CHECKSUM_BYTES + _REST_BYTES


def max_request_bytes(*, context_length: int) -> int:
    """The longest message that a worker's own port takes: a prompt, and as many stop tokens.

    Each token is a varint of up to 5 bytes.
    """
    return 2 * 5 * context_length + _REST_BYTES
