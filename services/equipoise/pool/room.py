"""`check_room`: how many workers a pool may have, and how much memory their Hellos may take.

Of a Hello only its names and numbers stay, and what the worker reports to run until the pool has
decided about it. Workers of one group report the same layout, of which one copy is kept.
"""

from collections.abc import Collection
from dataclasses import replace

from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.pool.member import Member, bytes_of
from equipoise.wire.checks import MAX_CELLS, MAX_RANKS
from equipoise.wire.messages import Hello, RunningState

MAX_BYTES = 64 * 2**20
"""Bytes that the Hellos of one pool's workers may take. Tables of 320 ranks of DeepSeek-V3 with 59
layers x 1 slot each take 1 MiB, and those of a pool with as many slots as the wire allows 9 MiB;
names of 4,096 workers take about as much."""

POOL_FULL = "hello_pool_full"
"""Kind of a rejection that ends by itself, when other workers of the pool leave."""

_NAME_BYTES = 1080
"""Bytes of memory that a name takes at most: one wide character makes all others as wide."""


def shared(running: RunningState, members: Collection[Member]) -> RunningState:
    """Return what a worker reports to run, with the tables of another that runs the same."""
    for other in members:
        claim = other.claim
        if claim is None or claim.generation != running.generation:
            continue
        if claim.layout.digest() == running.layout.digest():
            workers = claim.workers if claim.workers == running.workers else running.workers
            return replace(running, layout=claim.layout, workers=workers)
    return running


def check_room(hello: Hello, others: Collection[Member], *, pool: str) -> None:
    """Check that there is room for one more worker beside `others`.

    Raises:
        RejectedWorkerError: the pool has as many workers as it may have, or what they report takes
            too much memory.
    """
    _check_number(hello, others, pool=pool)
    claims = [one.claim for one in others if one.claim is not None]
    if hello.running is not None:
        claims.append(hello.running)
    num_bytes = bytes_of(hello) + sum(one.hello_bytes for one in others)
    num_bytes += sum(_layout_bytes(one) for one in {id(one.layout): one for one in claims}.values())
    num_bytes += sum(
        len(workers) * _NAME_BYTES
        for workers in {id(one.workers): one.workers for one in claims}.values()
    )
    tables = (one.expert_checksums for one in claims)
    num_bytes += sum(table.nbytes for table in tables if table is not None)
    if num_bytes > MAX_BYTES:
        raise RejectedWorkerError(
            POOL_FULL,
            f"worker {hello.worker}: what it and {len(others)} other workers of pool {pool} report "
            f"would take {num_bytes / 2**20:.0f} MiB, and a pool may take "
            f"{MAX_BYTES // 2**20} MiB: stop those that run another layout; retrying",
        )


def _check_number(hello: Hello, others: Collection[Member], *, pool: str) -> None:
    """Check that an epoch may have one more worker: it has all that are alike.

    The place of a rank that is gone is kept until the next epoch: it may return with what it runs.
    """
    num_connected = sum(one.connected for one in others)
    if num_connected >= MAX_RANKS:
        raise RejectedWorkerError(
            POOL_FULL,
            f"worker {hello.worker}: pool {pool} has {num_connected} workers, the most that a pool "
            "may have: start it in another pool; retrying",
        )
    num_layers, slots_per_rank = hello.model.num_layers, hello.slots_per_rank
    most = MAX_CELLS // (num_layers * slots_per_rank)
    if len(others) < most:
        return
    shape = (hello.model, slots_per_rank)
    num_alike = sum((one.hello.model, one.hello.slots_per_rank) == shape for one in others)
    if num_alike >= most:
        raise RejectedWorkerError(
            POOL_FULL,
            f"worker {hello.worker}: pool {pool} has {num_alike} workers with {num_layers} layers "
            f"x {slots_per_rank} slots, and with one more a layout would have more than the "
            f"{MAX_CELLS} slots that it may have: start it in another pool, or all workers with "
            "fewer slots; retrying",
        )


def _layout_bytes(running: RunningState) -> int:
    layout = running.layout
    shares = 0 if layout.share_of_slot is None else layout.share_of_slot.nbytes
    return layout.expert_of_slot.nbytes + shares
