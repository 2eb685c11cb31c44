"""The header that ranks exchange before every step, and the decisions that follow from it. Pure.

The header is the entire switch protocol: every rank sees the same headers and applies the same
rule, so all ranks switch at the same step or none does, without the balancer.
"""

from dataclasses import dataclass, fields

from equipoise.worker.errors import GroupError, PeerLeftError


@dataclass(frozen=True, slots=True)
class StepHeader:
    """One rank's header; travels as a row of int64, in the order of the fields."""

    epoch: int
    step: int
    """Number of steps completed in the epoch."""
    num_tokens: int
    """Tokens that the rank runs in the coming step."""
    generation: int
    staged_generation: int
    """0 if no generation is staged."""
    leaving: int
    """1 if the rank stops after this header."""


HEADER_WIDTH = len(fields(StepHeader))


def check_group(headers: tuple[StepHeader, ...], *, names: tuple[str, ...]) -> None:
    """Check that all ranks stay, and are at the same step of the same epoch and generation.

    `headers` and `names` (of workers, for the message) are in rank order.

    Raises:
        PeerLeftError: a rank leaves.
        GroupError: ranks disagree; a step would mix layouts or hang.
    """
    leaving = [names[rank] for rank, header in enumerate(headers) if header.leaving]
    if leaving:
        raise PeerLeftError(
            f"{' and '.join(leaving)} left the pool: the ranks must form a new group"
        )
    for field in ("epoch", "step", "generation"):
        values = [getattr(header, field) for header in headers]
        if len(set(values)) > 1:
            detail = ", ".join(
                f"{name}: {value}" for name, value in zip(names, values, strict=True)
            )
            raise GroupError(f"ranks disagree about the {field} ({detail}): restart these workers")


def agreed_generation(headers: tuple[StepHeader, ...]) -> int | None:
    """Return the generation that every rank has staged and can switch to now, or None.

    All ranks must have staged the same one. A minimum over ranks would be wrong: after an abort
    and a new stage, it could name a generation that some rank has dropped.
    """
    staged = {header.staged_generation for header in headers}
    if len(staged) > 1:
        return None
    generation = staged.pop()
    return generation if generation > headers[0].generation else None
