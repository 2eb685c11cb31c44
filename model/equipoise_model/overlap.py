"""Runs the micro-batches of a step so that one computes while the other's rows travel.

Each micro-batch runs the model as a generator that yields after every stage of a MoE layer. Which
one runs its next stage is decided beforehand by `turns`, from numbers that all ranks share, so all
ranks begin the same exchanges in the same order. There are no threads. Orders are those of
DeepSeek's inference system (open-infra-index, day 6).
"""

from collections.abc import Generator, Sequence
from enum import Enum, IntEnum, auto
from functools import cache
from typing import TypeVar

Result = TypeVar("Result")


class Stage(IntEnum):
    """What a micro-batch has done of a MoE layer."""

    PROJECTED = 0
    """Attention is computed up to the queries, and latents are stored."""
    ROUTED = 1
    """Attention and gate are computed."""
    SENT = 2
    """Rows are on their way to the ranks of their experts."""
    COMPUTED = 3
    """Rows have come, experts are computed, and their outputs are on their way back."""
    COMBINED = 4
    """Outputs have come and are summed."""


class Order(Enum):
    """In which order two micro-batches take turns. D: rows are sent, C: outputs are sent back."""

    PREFILL = auto()
    """D_A D_B C_A C_B: each runs until it has sent something. Up to two exchanges are open."""
    DECODE = auto()
    """D_A C_A D_B C_B: B is two stages behind A, so that exchanges never overlap each other."""


Stages = Generator[Stage, None, Result]
"""Work that pauses after each stage of each MoE layer, and then has a result."""


@cache
def turns(order: Order, *, num_batches: int, num_layers: int) -> tuple[tuple[int, Stage], ...]:
    """Which micro-batch runs which stage next, through all MoE layers.

    A micro-batch reaches any stage of a layer before those after it do, so that they can attend to
    the latents it stored.
    """

    def key(turn: tuple[int, int]) -> tuple[int, int, int]:
        batch, place = turn
        if order is Order.DECODE:
            return place + _STAGES_BEHIND * batch, batch, place
        layer, stage = divmod(place, len(Stage))
        num_sent = 2 * layer + max(0, stage - Stage.SENT)
        return num_sent, batch, place

    places = range(num_layers * len(Stage))
    ordered = sorted(((batch, place) for batch in range(num_batches) for place in places), key=key)
    return tuple((batch, Stage(place % len(Stage))) for batch, place in ordered)


def run_in_turns(
    batches: Sequence[Stages[Result]], *, order: Order, num_layers: int
) -> list[Result]:
    """Run micro-batches through their MoE layers in turns, and return their results."""
    for batch, stage in turns(order, num_batches=len(batches), num_layers=num_layers):
        reached = next(batches[batch])
        assert reached is stage, "every micro-batch runs the same layers"
    return [finish(batch) for batch in batches]


def finish(stages: Stages[Result]) -> Result:
    """Run what is left of a micro-batch without a pause."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: Result = end.value
            return result


_STAGES_BEHIND = 2
