"""Size limits of messages, derived from their contents. Larger messages are not decoded.

A port has one limit for all callers, from the largest tables that `checks` accepts. After its Hello
a worker's own shape gives a lower limit.
"""

from equipoise.planning.moves import CHECKSUM_BYTES
from equipoise.wire.checks import MAX_CELLS, MAX_EXPERT_CELLS, MAX_NAME_BYTES, MAX_RANKS
from equipoise.wire.inference_messages import MAX_GRAMMAR_BYTES, MAX_LISTED_TOKENS
from equipoise.wire.messages import Hello

_REST_BYTES = 64 * 1024
"""Room for everything but tables: names, reasons, numbers and tags."""

_CELL_BYTES = 4 + 2
"""Bytes of an expert and its share, per slot of a layout."""

_NAME_BYTES = MAX_NAME_BYTES + 3
"""Bytes of a name with its tag and length."""

_PEER_BYTES = 3 * _NAME_BYTES + len(":65535") + 8
"""Bytes of a rank among the peers of a JoinEpoch: worker, node, host and port, and its number."""

_MOVE_BYTES = 4 + 3 * 4 + (2 + CHECKSUM_BYTES) + 4
"""Bytes of a move: layer, slot and expert, checksum, and the checkpoint as its last source."""

_SOURCE_BYTES = 2 + 3
"""Bytes of a rank that is the source of a move."""

MAX_HELLO_BYTES = (
    MAX_CELLS * _CELL_BYTES
    + 2 * MAX_EXPERT_CELLS * CHECKSUM_BYTES
    + MAX_RANKS * _NAME_BYTES
    + _REST_BYTES
)
"""Limit of a Hello: the layout and the workers of all ranks, the checksums of the worker's slots
and those of all experts. Less than 5 MiB."""

MAX_PUSH_BYTES = (
    MAX_RANKS * _PEER_BYTES
    + MAX_CELLS * (_CELL_BYTES + _SOURCE_BYTES)
    + MAX_EXPERT_CELLS * _MOVE_BYTES
    + _REST_BYTES
)
"""Limit of a message to a worker, which a JoinEpoch may reach: all peers, the layout, and a move
into each own slot. The sources of a rank's moves are at most as many as the layout has slots,
because only ranks that hold an expert of the same layer are. Less than 9 MiB."""

_RANK_STATUS_BYTES = 10 * _NAME_BYTES + 2 * 1000 + 512
"""Bytes of a rank in a status: its names, two sentences, and numbers."""

MAX_STATUS_BYTES = 3 * 8 * MAX_CELLS + MAX_RANKS * _RANK_STATUS_BYTES + _REST_BYTES
"""Limit of a response of the Status service: three tables of float64, and all ranks. Less than 26
MiB."""


def max_message_bytes(hello: Hello) -> int:
    """Limit of messages after the Hello: a checksum for each own slot and expert, or all peers.

    At most 3 MiB and 64 KiB, by the ranges of a Hello.
    """
    cells = hello.model.num_layers * (hello.slots_per_rank + hello.model.num_experts)
    return cells * CHECKSUM_BYTES + MAX_RANKS * _NAME_BYTES + _REST_BYTES


def max_request_bytes(*, context_length: int) -> int:
    """Limit of messages to a worker's port: a prompt, a grammar, stop tokens and biased ones.

    Each token is a varint of up to 5 bytes; a biased one is a message with a tag and a float, too.
    """
    listed = MAX_LISTED_TOKENS * (5 + 16)
    return 5 * context_length + MAX_GRAMMAR_BYTES + listed + _REST_BYTES
