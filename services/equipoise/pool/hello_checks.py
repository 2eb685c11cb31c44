"""What a worker says of itself when it comes, held against what the pool knows."""

from equipoise.pool.pool import Pool
from equipoise.pool.records import RefusedWorkerError
from equipoise.wire.messages import Hello

MAX_LEAP = 2**32
"""Epochs, or generations, that a worker may be ahead of what is known here. A balancer whose store
was lost meets such workers; but numbers are never used again, so a wrong one would be for ever."""


def check_numbers(pool: Pool, hello: Hello) -> None:
    """One worker's word must not use up the numbers of epochs and generations."""
    running, lost = hello.running, hello.group_lost
    epoch = running.epoch if running is not None else lost.epoch if lost is not None else 0
    generation = lost.generation if lost is not None else 0
    if running is not None:
        generation = max(running.generation, running.staged_generation)
    for what, told, known in (
        ("epoch", epoch, pool.roster.highest_epoch),
        ("generation", generation, pool.layouts.next_generation),
    ):
        if told > known + MAX_LEAP:
            raise RefusedWorkerError(
                f"hello_{what}_leap",
                f"worker {hello.worker} speaks of {what} {told}, but pool {hello.pool} has "
                f"come to {known}: restart the worker",
            )


def check_running_layout(pool: Pool, hello: Hello) -> None:
    """Two layouts must not share a number; the ranks that are here are right."""
    if hello.running is None:
        return
    theirs = hello.running.layout
    ours = pool.layouts.get(theirs.generation)
    others_run = any(
        member.connected and member.serving and member.name != hello.worker
        for member in pool.roster.seated()
    )
    if ours is not None and others_run and not ours.same_placement(theirs):
        raise RefusedWorkerError(
            "hello_layout",
            f"worker {hello.worker} runs another layout as generation {theirs.generation} than "
            f"pool {hello.pool}: restart it",
        )
