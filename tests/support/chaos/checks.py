"""What must hold after every run: each check is a function of the history."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from equipoise.gateway.settings import GatewaySettings
from tests.support.chaos.history import History

_GATEWAY = GatewaySettings()
"""Of a fleet: its gateway has no options about time."""

NEXT_TOKEN_BOUND_S = _GATEWAY.first_token_timeout_s + (
    _GATEWAY.queue_timeout_s + _GATEWAY.accept_timeout_s + _GATEWAY.first_token_timeout_s
)
"""No client waits longer for its next token: a rank fails as late as the gateway lets it, and the
next takes the request as late. A whole answer has no bound, because slow tokens are not a fault."""


class Violation(NamedTuple):
    """Something that must never happen, and what of it was seen."""

    what: str
    message: str


def violations(history: History) -> list[Violation]:
    """All that is wrong with a run; none, if all is well."""
    return [Violation(name, text) for name, check in CHECKS.items() for text in check(history)]


def tokens_differ(history: History) -> Iterator[str]:
    """Greedy tokens are those of an undisturbed run, also of answers that broke."""
    for answer in history.answers:
        if answer.tokens != answer.expected[: len(answer.tokens)]:
            at = next(
                (
                    i
                    for i, (ours, theirs) in enumerate(
                        zip(answer.tokens, answer.expected, strict=False)
                    )
                    if ours != theirs
                ),
                len(answer.expected),
            )
            yield f"{answer.prompt!r}: token {at} differs from the undisturbed run's"


def requests_lost(history: History) -> Iterator[str]:
    """What was accepted is answered to its end."""
    for answer in history.answers:
        if answer.rejection:
            continue
        if answer.breakage:
            yield f"{answer.prompt!r}: {answer.breakage}"
        elif len(answer.tokens) < len(answer.expected):
            yield f"{answer.prompt!r}: {len(answer.tokens)} of {len(answer.expected)} tokens came"


def two_generations_in_a_step(history: History) -> Iterator[str]:
    """All ranks of an epoch use one generation in a step."""
    by_step: dict[tuple[str, int, int], dict[int, str]] = defaultdict(dict)
    for seen in history.steps:
        by_step[seen.pool, seen.epoch, seen.step].setdefault(seen.generation, seen.worker)
    for (pool, epoch, step), workers in by_step.items():
        if len(workers) > 1:
            yield (
                f"pool {pool}, epoch {epoch}, step {step} ran in generations "
                f"{dict(sorted(workers.items()))}"
            )


def generations_go_back(history: History) -> Iterator[str]:
    """Within an epoch a later step never has a lower generation."""
    latest: dict[tuple[str, int], tuple[int, int]] = {}
    for seen in sorted(history.steps):
        epoch = seen.pool, seen.epoch
        step, generation = latest.get(epoch, (0, 0))
        if seen.step > step and seen.generation < generation:
            yield (
                f"pool {seen.pool}, epoch {seen.epoch}: step {step} ran in generation "
                f"{generation}, step {seen.step} in {seen.generation}"
            )
        latest[epoch] = (seen.step, max(generation, seen.generation))


def generations_reused(history: History) -> Iterator[str]:
    """A generation is one layout for ever."""
    for (pool, generation), layouts in history.layouts.items():
        if len(layouts) > 1:
            yield f"generation {generation} of pool {pool} was {len(layouts)} layouts"


def waits_beyond_bounds(history: History) -> Iterator[str]:
    """The fleet is whole, balanced and answering again within its bounds."""
    yield from history.overdue
    for answer in history.answers:
        if answer.longest_wait_s > NEXT_TOKEN_BOUND_S:
            yield f"{answer.prompt!r} waited {answer.longest_wait_s:.0f} s for a token"


def experts_without_copies(history: History) -> Iterator[str]:
    """Every slot holds the expert that the layout says, to the bit."""
    yield from history.unverified


def processes_that_died(history: History) -> Iterator[str]:
    """Nothing ends but what was ended."""
    yield from history.died


CHECKS: dict[str, Callable[[History], Iterator[str]]] = {
    "a token differs": tokens_differ,
    "an accepted request was lost": requests_lost,
    "two generations in one step": two_generations_in_a_step,
    "a generation went back": generations_go_back,
    "a generation was reused": generations_reused,
    "a wait beyond its bound": waits_beyond_bounds,
    "an expert without a verified copy": experts_without_copies,
    "a process died by itself": processes_that_died,
}
