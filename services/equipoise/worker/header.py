"""What ranks tell each other before every step, and what follows from it. Pure.

The header is the whole of the switch protocol: because every rank sees the same headers and
applies the same rule, all ranks switch at the same step or none does, with no balancer involved.
"""

from dataclasses import astuple, dataclass, fields

from equipoise.worker.errors import GroupError, PeerLeftError


@dataclass(frozen=True, slots=True)
class StepHeader:
    """One rank's header: a row of int64, in this order.

    `step` is the number of the step it precedes. `staged_generation` is 0 when nothing is staged.
    `leaving` is 1 when the rank stops after this header.
    """

    epoch: int
    step: int
    num_tokens: int
    generation: int
    staged_generation: int
    leaving: int


HEADER_WIDTH = len(fields(StepHeader))


def pack(header: StepHeader) -> tuple[int, ...]:
    """The header as the row that travels."""
    return astuple(header)


def unpack(row: list[int]) -> StepHeader:
    """The header that a row of `HEADER_WIDTH` numbers means."""
    assert len(row) == HEADER_WIDTH
    return StepHeader(*row)


def check_group(headers: tuple[StepHeader, ...], *, names: tuple[str, ...]) -> None:
    """See that all ranks stay, and stand at the same step of the same epoch and generation.

    `headers` and `names` (of workers, for people) are in rank order.

    Raises:
        PeerLeftError: a rank said that it leaves.
        GroupError: ranks disagree; a step would mix layouts or wait for ever.
    """
    leaving = [names[rank] for rank, header in enumerate(headers) if header.leaving]
    if leaving:
        raise PeerLeftError(f"{' and '.join(leaving)} left the pool, so its ranks must form anew")
    for field in ("epoch", "step", "generation"):
        values = [getattr(header, field) for header in headers]
        if len(set(values)) > 1:
            told = ", ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
            raise GroupError(f"ranks disagree about the {field} ({told}): restart these workers")


def agreed_generation(headers: tuple[StepHeader, ...]) -> int | None:
    """The generation that every rank has staged and can switch to now, or None.

    All must have staged the same one. A minimum over ranks would be wrong: after an abort and a
    new stage, it could name a generation that some rank has dropped.
    """
    staged = {header.staged_generation for header in headers}
    if len(staged) > 1:
        return None
    generation = staged.pop()
    return generation if generation > headers[0].generation else None
