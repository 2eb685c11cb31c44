"""Checks of a worker against the pool's state. Those of a Hello raise `RejectedWorkerError`."""

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.planning.layout import Layout
from equipoise.wire.messages import Hello

MAX_PER_S = 1000
"""No pool opens that many epochs, or begins that many waves, in a second, so its numbers stay below
this times the seconds since 1970. A higher one is false, and could never be taken back."""

MIN_BOUND = 2**32
"""Numbers up to this are plausible at any time: the balancer's clock may not be set yet."""

LARGE_LEAP = 2**20
"""A worker that raises a number of its pool by more than that, perhaps in many reports, is named in
the log."""

NAME_TAKEN = "hello_name_taken"
"""Kind of a rejection that ends by itself, when the other process's stream ends."""


class RejectedWorkerError(Exception):
    """A worker that this pool cannot take; `kind` is a constant, for counting."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedNumbers:
    """The highest numbers that a worker knows of: the balancer must use higher ones."""

    epoch: int = 0
    """Newest epoch that it has taken up; 0 for none."""

    generation: int = 0
    """Highest generation that it has started in, run or staged; 0 for none."""

    @classmethod
    def in_hello(cls, hello: Hello) -> "UsedNumbers":
        """All that a Hello says; an older release says it of a group only."""
        running, lost = hello.running, hello.group_lost
        epochs, generations = [hello.highest_epoch], [hello.highest_generation]
        if running is not None:
            epochs.append(running.epoch)
            generations += [running.generation, running.staged_generation]
        if lost is not None:
            epochs.append(lost.epoch)
            generations.append(lost.generation)
        return cls(epoch=max(epochs), generation=max(generations))

    def leaps(self, *, known: "UsedNumbers", clock_s: int) -> dict[str, tuple[int, int]]:
        """By name, each number above those known and the clock, and by how much it is."""
        return {
            what: (reported, reported - max(ours, clock_s))
            for what, reported, ours in self._beside(known)
            if reported > max(ours, clock_s)
        }

    def fault(self, *, known: "UsedNumbers", now: float) -> tuple[str, str] | None:
        """Return which number no pool can have reached, as (name, description), or None."""
        highest = max(MIN_BOUND, int(now * MAX_PER_S))
        for what, reported, ours in self._beside(known):
            if reported > max(ours, highest):
                return what, (
                    f"{what} {reported}, but its pool is at {ours}, and no pool can have reached "
                    f"more than {highest}"
                )
        return None

    def _beside(self, known: "UsedNumbers") -> tuple[tuple[str, int, int], ...]:
        return (
            ("epoch", self.epoch, known.epoch),
            ("generation", self.generation, known.generation),
        )


def check_name(hello: Hello, live: Hello | None, *, is_certified: bool) -> None:
    """Reject a worker whose name another process has in use; `live` is that process's Hello.

    A worker whose own credentials name it (`is_certified`) replaces its former process. Without
    such credentials all workers of the pool are trusted alike: the status shows boot IDs.
    """
    if live is not None and live.boot_id != hello.boot_id and not is_certified:
        raise RejectedWorkerError(
            NAME_TAKEN,
            f"worker {hello.worker} is connected from {live.address}: stop that process, or give "
            "each worker an identity of its own; retrying",
        )


def check_order(hello: Hello, known: Hello, *, epoch: int) -> None:
    """Reject a Hello that is older than `known`: its process has served in `epoch` since.

    A balancer that was suspended reads such Hellos, of streams that were given up, when it wakes.
    """
    if hello.boot_id == known.boot_id and UsedNumbers.in_hello(hello).epoch < epoch:
        raise RejectedWorkerError(
            "hello_outdated",
            f"outdated Hello of worker {hello.worker}: its process serves in epoch {epoch} by now",
        )


def check_running_layout(hello: Hello, ours: Layout | None) -> None:
    """Reject a worker that runs another layout than `ours` under the same generation."""
    if hello.running is None or ours is None:
        return
    theirs = hello.running.layout
    if not ours.same_placement(theirs):
        raise RejectedWorkerError(
            "hello_layout",
            f"worker {hello.worker} runs generation {theirs.generation} with another layout than "
            f"pool {hello.pool}: restart it",
        )


def check_slots(hello: Hello) -> None:
    """Reject a worker whose pool could not hold all experts, or whose engine not every layout."""
    num_slots = hello.num_ranks * hello.slots_per_rank
    # All other experts have one slot each, and no rank holds an expert twice without need.
    per_rank = -(-hello.slots_per_rank // hello.model.num_experts)
    most = min(num_slots - hello.model.num_experts + 1, hello.num_ranks * per_rank)
    if 0 < hello.max_replicas < most:
        raise RejectedWorkerError(
            "hello_replicas",
            f"worker {hello.worker}: a layout can give an expert {most} replicas, but its engine "
            f"has room for {hello.max_replicas}: start it with at most {hello.max_replicas - 1} "
            f"redundant experts, or on at most {hello.max_replicas} ranks",
        )
    if num_slots < hello.model.num_experts:
        raise RejectedWorkerError(
            "hello_too_few_slots",
            f"worker {hello.worker}: {hello.num_ranks} ranks x {hello.slots_per_rank} slots "
            f"cannot hold {hello.model.num_experts} experts: give each rank at least "
            f"{-(-hello.model.num_experts // hello.num_ranks)} slots",
        )


def check_shape(hello: Hello, rank: Hello, *, pool: str) -> None:
    """Reject a worker whose model or slots differ from those of a `rank` of the pool.

    One with another checkpoint is quarantined instead, and so are all that differ before a pool has
    ranks: `odd_workers`.
    """
    for kind, what, theirs, ours in (
        ("hello_model", "model shape", hello.model, rank.model),
        ("hello_slots", "slots per rank", hello.slots_per_rank, rank.slots_per_rank),
        ("hello_places", "memory for experts", memory_of(hello), memory_of(rank)),
        ("hello_engine", "engine", engine_of(hello), engine_of(rank)),
        ("hello_phase", "phase", hello.phase.value, rank.phase.value),
    ):
        if theirs != ours:
            raise RejectedWorkerError(
                kind,
                f"worker {hello.worker}: its {what} is {theirs}, but pool {pool} has {ours} (like "
                f"worker {rank.worker}): start it with the same one, or in another pool",
            )


def memory_of(hello: Hello) -> str:
    """How layers divide the memory for experts. How much there is may differ between workers."""
    return "shared by layers (--places)" if hello.num_places else "slots of each layer"


def engine_of(hello: Hello) -> str:
    """The engine without its version, which may differ while a pool restarts."""
    return hello.engine.partition(" ")[0] or "Equipoise's worker"


def check_kernels(hello: Hello, ranks: Sequence[Hello], *, pool: str) -> None:
    """Reject a worker that shares no backend with all ranks: they could never form a group."""
    if hello.backends in {(), ranks[0].backends}:
        return
    shared = SharedBackends()
    for backends in dict.fromkeys(rank.backends for rank in ranks if rank.backends):
        shared.join(backends)
    operation = shared.join(hello.backends)
    if operation is not None:
        raise RejectedWorkerError(
            "hello_kernels",
            f"worker {hello.worker}: it computes with {hello.kernels}, but pool {pool} with "
            f"{ranks[0].kernels} (worker {ranks[0].worker}), and no backend of {operation} is "
            f"available to all: start it with the same weights, device and EQUIPOISE_KERNELS, or "
            f"in another pool",
        )


class SharedBackends:
    """The backends that all of some workers have, by operation: ranks compute with one of each.

    A worker's are a `Hello.backends`: "operation=backend|backend" for each operation.
    """

    def __init__(self) -> None:
        self._of_operation: dict[str, set[str]] = {}

    def join(self, backends: tuple[str, ...]) -> str | None:
        """Let one more worker join; if no backend of an operation is left, name it instead."""
        pairs = (one.partition("=") for one in backends)
        theirs = {operation: set(names.split("|")) for operation, _, names in pairs}
        ours = self._of_operation or theirs
        both = {
            operation: ours.get(operation, set()) & theirs.get(operation, set())
            for operation in ours.keys() | theirs
        }
        missing = [operation for operation, names in both.items() if not names]
        if missing:
            return min(missing)
        self._of_operation = both
        return None
