"""Checks of single fields. Each returns the valid value or raises `InvalidMessageError`.

`kind` is the message's name and the first part of the error's kind: "staged" gives "staged_rank".
"""

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.planning.layout import DIGEST_BYTES
from equipoise.settings.address import parse_address
from equipoise.wire.errors import InvalidMessageError

MAX_COUNT = 2**53
"""Highest counter, generation, epoch or duration. Float64, in which loads are averaged, is exact up
to it, and real values are far below. It also detects floats sent as counters: the bits of an
ordinary float64, including NaN, are a far larger integer."""

MAX_TERM = 2**31 - 1
"""Highest term. Every place that keeps one holds it exactly: a Kubernetes Lease as int32, Redis
scripts as float64. With an election every second it lasts 68 years."""

MAX_CELLS = 2**18
"""Most slots of a layout, over all layers. DeepSeek-V3 on 320 ranks, the largest published
deployment, has 59 layers x 320 slots = 18,880."""

MAX_EXPERT_CELLS = 2**16
"""Most experts, and most slots of one rank, over all layers. Of published models Switch-C has 15
layers x 2,048 experts, Qwen3.5-397B 60 x 512 and Kimi K2 60 x 384; a rank that is a pool by itself
has a slot for each, and redundant ones."""

MAX_EXPERT_BYTES = MAX_COUNT // MAX_CELLS
"""Most bytes of an expert in one layer, 32 GiB: those of all slots of a layout are then a count."""

MAX_RANKS = 2**12
"""Most ranks of a pool, and most of its workers that are connected."""

MAX_DURATION_S = 3600.0
"""Longest valid interval or timeout, seconds."""

MAX_NAME_BYTES = 253
"""Most bytes of a name in UTF-8: as many as a DNS name has (RFC 1035), which names of Kubernetes'
nodes and pods are."""

_MAX_REASON_LENGTH = 1000
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def name(kind: str, field: str, value: str) -> str:
    """A name for display: printable, not blank, at most `MAX_NAME_BYTES` long."""
    is_short = 0 < len(value) <= MAX_NAME_BYTES
    is_shown = is_short and value.isprintable() and not value.isspace()
    if not is_shown or len(value.encode()) > MAX_NAME_BYTES:
        raise InvalidMessageError(
            f"{kind}_name",
            f"{kind}: {field} must be 1 to {MAX_NAME_BYTES} bytes of printable characters, "
            f"not {shorten(value)}",
        )
    return value


def names(kind: str, message: Any, *fields: str, optional: bool = False) -> dict[str, Any]:
    """Several fields of a message that are names, by field; `optional` ones may be empty."""
    values = {field: getattr(message, field) for field in fields}
    return {k: v if optional and not v else name(kind, k, v) for k, v in values.items()}


def address(kind: str, field: str, value: str) -> str:
    """A host:port to connect to."""
    try:
        parse_address(value, min_port=1)
    except ValueError as error:
        raise InvalidMessageError(f"{kind}_address", f"{kind}: {field} {error}") from None
    return value


def reason(value: str) -> str:
    """One line for display: truncated, without control characters. Never raises."""
    line = value.strip() if value.isprintable() else _printable(value).strip()
    if len(line) > _MAX_REASON_LENGTH:
        line = line[: _MAX_REASON_LENGTH - 1] + "…"
    return line or "no reason given"


def _printable(value: str) -> str:
    return "".join(character if character.isprintable() else " " for character in value)


def traceparent(value: str) -> str:
    """A W3C traceparent; anything else becomes empty. Never raises."""
    return value if _TRACEPARENT.fullmatch(value) else ""


def count(kind: str, field: str, value: int, *, least: int = 0) -> int:
    """A whole number from `least` to `MAX_COUNT`."""
    if not least <= value <= MAX_COUNT:
        raise InvalidMessageError(
            f"{kind}_range", f"{kind}: {field} must be from {least} to 2^53, not {value}"
        )
    return value


def term(kind: str, field: str, value: int) -> int:
    """A term from 0 to `MAX_TERM`."""
    if value > MAX_TERM:
        raise InvalidMessageError(
            f"{kind}_range", f"{kind}: {field} must be from 0 to {MAX_TERM}, not {value}"
        )
    return value


def rank(kind: str, value: int, *, num_ranks: int = MAX_RANKS) -> int:
    """A rank below `num_ranks`. Whether the pool has it now is for the caller to check."""
    if value >= num_ranks:
        raise InvalidMessageError(
            f"{kind}_rank", f"{kind}: rank must be from 0 to {num_ranks - 1}, not {value}"
        )
    return value


def total(*reported: float) -> int:
    """Add what others report, to a whole number of which `MAX_COUNT` is the highest.

    Senders bound each number and not how often they send one, so a sum must not leave the range
    that the contract, the store and float64 have.
    """
    return round(min(sum(reported), MAX_COUNT))


def counts(kind: str, message: Any, *fields: str, least: int = 0) -> dict[str, Any]:
    """Several fields of a message that are whole numbers, by name."""
    return {field: count(kind, field, getattr(message, field), least=least) for field in fields}


def place(kind: str, message: Any) -> dict[str, Any]:
    """The epoch, rank and generation of a rank's message, by name."""
    numbers = counts(kind, message, "epoch", "generation", least=1)
    return {**numbers, "rank": rank(kind, message.rank)}


def layout_digest(kind: str, value: bytes) -> bytes:
    """A layout's digest; empty if not reported."""
    if len(value) not in {0, DIGEST_BYTES}:
        raise InvalidMessageError(
            f"{kind}_shape",
            f"{kind}: layout_digest must have {DIGEST_BYTES} bytes, not {len(value)}",
        )
    return value


def duration_s(kind: str, field: str, value: float) -> float:
    """Seconds above 0, at most `MAX_DURATION_S`."""
    if not (math.isfinite(value) and 0 < value <= MAX_DURATION_S):
        raise InvalidMessageError(
            f"{kind}_range",
            f"{kind}: {field} must be above 0 and at most {MAX_DURATION_S:g} seconds, not {value}",
        )
    return value


def staged_generation(kind: str, value: int, *, generation: int) -> int:
    """0 for none, or a generation above the running one."""
    count(kind, "staged_generation", value)
    if 0 < value <= generation:
        raise InvalidMessageError(
            f"{kind}_generation",
            f"{kind}: staged_generation must be 0 or above the running generation {generation}, "
            f"not {value}",
        )
    return value


def table(
    kind: str, message: Any, field: str, *, dtype: str, shape: tuple[int, ...]
) -> npt.NDArray[np.generic]:
    """A field of packed little-endian bytes as a read-only, row-major array."""
    data = getattr(message, field)
    wanted = math.prod(shape) * np.dtype(dtype).itemsize
    if len(data) != wanted:
        raise InvalidMessageError(
            f"{kind}_shape",
            f"{kind}: {field} must be {dtype} of shape {list(shape)} = {wanted} bytes, "
            f"not {len(data)} bytes",
        )
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def shorten(value: str) -> str:
    """Any text, quoted and truncated for an error message."""
    return repr(value if len(value) <= 60 else value[:59] + "…")
