"""`odd_workers`: connected workers that do not fit the pool, each with the reason.

What the pool is, most ranks of its epoch decide, or without any most connected workers: the first
worker need not be right. Of two with as many workers each, it is what the latest epoch had, else
neither.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from equipoise.pool.hello_checks import SharedBackends, engine_of, memory_of
from equipoise.pool.members import Roster
from equipoise.wire.messages import Hello

MAX_KINDS = 16
"""Different `Hello.backends` that are compared, the most common ones. Workers of one release on one
kind of device have the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OddWorker:
    """Why a worker does not fit."""

    kind: str
    """In what it differs, as a constant for counting."""

    reason: str
    """How it differs, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trait:
    """What all workers of a pool have in common."""

    kind: str
    name: str
    of: Callable[[Hello], Hashable]
    shown: Callable[[Hello], object]


_TRAITS = (
    _Trait(
        kind="other_model",
        name="model shape",
        of=lambda hello: hello.model,
        shown=lambda hello: hello.model,
    ),
    _Trait(
        kind="other_slots",
        name="slots per rank",
        of=lambda hello: hello.slots_per_rank,
        shown=lambda hello: hello.slots_per_rank,
    ),
    _Trait(
        kind="other_places",
        name="memory for experts",
        of=memory_of,
        shown=memory_of,
    ),
    _Trait(kind="other_engine", name="engine", of=engine_of, shown=engine_of),
    _Trait(
        kind="other_checkpoint",
        name="checkpoint",
        of=lambda hello: (hello.checkpoint_fingerprint, hello.experts_digest),
        shown=lambda hello: (
            f"{hello.checkpoint_fingerprint} with experts {hello.experts_digest.hex()}"
        ),
    ),
    _Trait(
        kind="other_phase",
        name="phase",
        of=lambda hello: hello.phase,
        shown=lambda hello: hello.phase.value,
    ),
)


def odd_workers(roster: Roster) -> Mapping[str, OddWorker]:
    """Compare each trait of those that fit in the ones before, then their kernels."""
    fitting = [one.hello for one in roster.members.values() if one.connected]
    ranks = {one.name for one in roster.seated() if one.connected and one.lost_reason is None} or {
        hello.worker for hello in fitting
    }
    odd: dict[str, OddWorker] = {}
    for trait in _TRAITS:
        odd |= _minority(fitting, trait, ranks=ranks, latest=roster.latest)
        fitting = [hello for hello in fitting if hello.worker not in odd]
    return odd | _without_shared_kernels(fitting, ranks=ranks)


def _minority(
    hellos: Sequence[Hello], trait: _Trait, *, ranks: set[str], latest: Hello | None
) -> dict[str, OddWorker]:
    values = {hello.worker: trait.of(hello) for hello in hellos}
    if len(set(values.values())) <= 1:
        return {}
    counts = Counter(value for worker, value in values.items() if worker in ranks)
    most = max(counts.values(), default=0)
    leading = [value for value, count in counts.items() if count == most]
    if len(leading) > 1 and latest is not None:
        leading = [value for value in leading if value == trait.of(latest)]
    if len(leading) != 1:
        return {
            hello.worker: OddWorker(
                kind=trait.kind,
                reason=f"its {trait.name} is {trait.shown(hello)}, and workers with "
                f"{len(counts)} different ones are connected, none of them the majority: start "
                "them with the same one",
            )
            for hello in hellos
        }
    ours = next(hello for hello in hellos if values[hello.worker] == leading[0])
    return {
        hello.worker: OddWorker(
            kind=trait.kind,
            reason=f"its {trait.name} is {trait.shown(hello)}, but {most} workers of the pool "
            f"have {trait.shown(ours)}: start it with the same one, or in another pool",
        )
        for hello in hellos
        if values[hello.worker] != leading[0]
    }


def _without_shared_kernels(hellos: Sequence[Hello], *, ranks: set[str]) -> dict[str, OddWorker]:
    """Workers that share no backend with those of most workers: they could never form a group."""
    known = [hello for hello in hellos if hello.backends]
    numbers = Counter(hello.backends for hello in known)
    if len(numbers) <= 1:
        return {}
    counts = Counter(hello.backends for hello in known if hello.worker in ranks)
    kinds = sorted(numbers, key=lambda one: counts[one], reverse=True)
    shared, num_agreed = SharedBackends(), 0
    lacks: dict[tuple[str, ...], str] = {}
    for backends in kinds[:MAX_KINDS]:
        operation = shared.join(backends)
        if operation is None:
            num_agreed += numbers[backends]
        else:
            lacks[backends] = f"no backend of {operation} is available to it and"
    for backends in kinds[MAX_KINDS:]:
        lacks[backends] = f"{MAX_KINDS} other sets of kernels are as common or more so among"
    return {
        hello.worker: OddWorker(
            kind="other_kernels",
            reason=f"it computes with {hello.kernels}, and {lacks[hello.backends]} {num_agreed} "
            "workers of the pool: start it with the same weights, device and EQUIPOISE_KERNELS, or "
            "in another pool",
        )
        for hello in known
        if hello.backends in lacks
    }
