"""Perform many runs on few fleets, and judge each."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from equipoise.cli.demo.reference import ReferenceModel
from equipoise.cli.demo.traffic import Prompt, prompts_of
from equipoise.formats.packaged import packaged_checkpoint
from equipoise_api.v1 import status_pb2 as pb
from equipoise_model.train.data import heldout_prompts
from tests.support.chaos.arena import NUM_CLIENTS, Arena, Condition, FleetError, whole
from tests.support.chaos.checks import NEXT_TOKEN_BOUND_S, Violation, violations
from tests.support.chaos.faults import suffer
from tests.support.chaos.history import History
from tests.support.chaos.plan import DOMAINS, Fault, Ground, Kind, Run, plan_run

WHOLE_BOUND_S = 60.0
"""All workers serve again this long after the last fault, restarted processes included."""

BALANCED_BOUND_S = 60.0
"""The busiest rank carries at most `BALANCED` times the mean again this long after that."""

UNUSED_BOUND_S = 30.0
"""No rank has a block of its cache in use, holds included, this long after the last request."""

BALANCED = 1.3
RUNS_PER_ARENA = 10
"""After this many runs a fleet is replaced; the start of a new one is a test too."""

PROMPTS_PER_DOMAIN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run and what came of it; `longest_pause_s` is the longest time without any token.

    `waits_s` is how long each condition took to recover after the faults. `num_latents` are
    messages with latents that ranks fetched from each other.
    """

    run: Run
    violations: tuple[Violation, ...]
    num_answers: int
    num_rejected: int
    longest_pause_s: float
    took_s: float
    waits_s: Mapping[str, float] = field(default_factory=dict)
    num_latents: int = 0


def undisturbed_answers() -> dict[Prompt, tuple[int, ...]]:
    """What a model in one process answers to every prompt that clients will send."""
    model = ReferenceModel.load(packaged_checkpoint())
    answers = {}
    for domain in DOMAINS:
        texts = heldout_prompts(domain, num_prompts=PROMPTS_PER_DOMAIN, seed=11)
        answers.update(model.answer(prompts_of(domain, texts, max_tokens=(24, 64), seed=11)))
    return answers


async def results(
    seeds: Iterable[int],
    *,
    ground: Ground,
    folder: Path,
    answers: Mapping[Prompt, Sequence[int]],
    clock_library: Path | None,
) -> AsyncIterator[Result]:
    """Perform the runs in their order; a fleet that violated anything is not used again."""
    without = frozenset(() if clock_library else (Kind.CLOCK_JUMPS,))
    left = [plan_run(seed, ground=ground, without=without) for seed in seeds]
    for number in itertools.count():
        if not left:
            return
        place = folder / f"{ground}-{number}-seed-{left[0].seed}"
        place.mkdir(parents=True)
        async with Arena(
            place, ground=ground, answers=answers, clock_library=clock_library
        ) as arena:
            for _ in range(min(RUNS_PER_ARENA, len(left))):
                result = await perform(arena, left.pop(0))
                yield result
                if result.violations:
                    break


async def perform(arena: Arena, run: Run) -> Result:
    """Perform a run on a healthy fleet."""
    history = arena.history = arena.clients.history = History()
    began_s, latents_before = time.monotonic(), arena.num_latents
    arena.clients.shift_to(run.domain)
    noting = asyncio.create_task(_note_layouts(arena))
    try:
        async with asyncio.TaskGroup() as befalling:
            for fault in run.faults:
                befalling.create_task(_at(arena, fault))
        await _recovered(arena)
    except FleetError as error:
        history.died.append(str(error))
    finally:
        noting.cancel()
        await asyncio.gather(noting, return_exceptions=True)
    return Result(
        run=run,
        violations=tuple(violations(history)),
        num_answers=sum(not answer.rejection for answer in history.answers),
        num_rejected=sum(bool(answer.rejection) for answer in history.answers),
        longest_pause_s=max(
            (later - sooner for sooner, later in itertools.pairwise(history.token_times_s)),
            default=0.0,
        ),
        took_s=time.monotonic() - began_s,
        waits_s=dict(history.waits),
        num_latents=arena.num_latents - latents_before,
    )


async def _at(arena: Arena, fault: Fault) -> None:
    await asyncio.sleep(fault.at_s)
    await suffer(arena, fault)


async def _recovered(arena: Arena) -> None:
    """Wait for everything that must be well again, each with its bound."""
    if not await _within(arena, "whole again", whole, bound_s=WHOLE_BOUND_S):
        return
    found = await arena.until(lambda _: True, bound_s=10.0)
    last_window = {status.pool: status.windows_closed for status in found}
    was_balanced: set[str] = set()

    def balanced(status: pb.PoolStatus) -> bool:
        """Pools need not be balanced in the same window."""
        if (
            status.windows_closed > last_window[status.pool]
            and status.windows
            and 0 < status.windows[-1].max_over_mean <= BALANCED
            and whole(status)
        ):
            was_balanced.add(status.pool)
        return status.pool in was_balanced

    if not await _within(arena, "balanced again", balanced, bound_s=BALANCED_BOUND_S):
        return
    began_s = time.monotonic()
    try:
        await arena.clients.until_whole(2 * NUM_CLIENTS, timeout_s=NEXT_TOKEN_BOUND_S)
        arena.history.waits["answering again"] = time.monotonic() - began_s
    except TimeoutError:
        arena.history.overdue.append(f"no client received a token in {NEXT_TOKEN_BOUND_S:g} s")
        return
    try:
        await arena.verify_experts()
    except TimeoutError as error:
        arena.history.overdue.append(f"experts could not be looked at: {error}")
        return
    async with arena.clients.resting():
        began_s = time.monotonic()
        try:
            await arena.until_unused(bound_s=UNUSED_BOUND_S)
            arena.history.waits["unused"] = time.monotonic() - began_s
        except TimeoutError as error:
            arena.history.overdue.append(f"not unused within {UNUSED_BOUND_S:g} s: {error}")


async def _within(arena: Arena, name: str, condition: Condition, *, bound_s: float) -> bool:
    began_s = time.monotonic()
    try:
        await arena.until(condition, bound_s=bound_s)
    except TimeoutError as error:
        arena.history.overdue.append(f"not {name} within {bound_s:g} s: {error}")
        return False
    arena.history.waits[name] = time.monotonic() - began_s
    return True


async def _note_layouts(arena: Arena) -> None:
    """See which layout each generation of a pool is, as long as the run lasts."""
    while True:
        try:
            await arena.note_layouts()
        except Exception:  # noqa: BLE001 - there is no leader now, or nothing is committed
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.2)
