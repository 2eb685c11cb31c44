"""`Gate`: holds up one handover at a stage, and says which ranks take part in it."""

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, Self

from tests.support.chaos.relay import GENERATE, LATENTS, Relay

LAST = -1
"""In place of a message's number: the end of its direction."""


class Stage(StrEnum):
    """What has just happened in a handover; the next thing waits."""

    PREFILL_ASKED = "a prefill rank is asked"
    FIRST_TOKEN = "the first token is there"
    DECODE_ASKED = "a decode rank is asked"
    FETCH_ASKED = "latents are asked for"
    FETCHING = "the first latents are there"
    FETCHED = "all latents are there"
    SECOND_TOKEN = "the second token is there"
    GENERATING = "some tokens are there"


class _Place(NamedTuple):
    """A message of a call to a rank of the prefill pool, or of the decode pool."""

    method: str
    to_prefill: bool
    upwards: bool
    number: int


_PLACES: Mapping[Stage, _Place] = {
    Stage.PREFILL_ASKED: _Place(GENERATE, to_prefill=True, upwards=True, number=0),
    Stage.FIRST_TOKEN: _Place(GENERATE, to_prefill=True, upwards=False, number=0),
    Stage.DECODE_ASKED: _Place(GENERATE, to_prefill=False, upwards=True, number=0),
    Stage.FETCH_ASKED: _Place(LATENTS, to_prefill=True, upwards=True, number=0),
    Stage.FETCHING: _Place(LATENTS, to_prefill=True, upwards=False, number=1),
    Stage.FETCHED: _Place(LATENTS, to_prefill=True, upwards=False, number=LAST),
    Stage.SECOND_TOKEN: _Place(GENERATE, to_prefill=False, upwards=False, number=0),
    Stage.GENERATING: _Place(GENERATE, to_prefill=False, upwards=False, number=3),
}


class Gate:
    """In relays in front of ranks; the first handover that reaches the stage waits in it."""

    def __init__(self, stage: Stage, *, prefill: Mapping[str, Relay], decode: Mapping[str, Relay]):
        """`prefill` and `decode` are the relays of both pools by worker."""
        self._place = _PLACES[stage]
        self._pools = {True: prefill, False: decode}
        self.reached = asyncio.Event()
        """Set when the stage is reached."""
        self.opened = asyncio.Event()
        """To be set when the handover may go on."""
        self.ranks: dict[bool, str] = {}
        """Latest rank of the prefill pool (True) and of the decode pool (False) that was asked."""

    def __enter__(self) -> Self:
        for to_prefill, relays in self._pools.items():
            for worker, relay in relays.items():
                relay.gate = self._of(worker, to_prefill=to_prefill)
        return self

    def __exit__(self, *error: object) -> None:
        self.opened.set()
        for relays in self._pools.values():
            for relay in relays.values():
                relay.gate = None

    def peer(self, *, of_prefill: bool) -> str:
        """Another rank of the pool."""
        return next(one for one in self._pools[of_prefill] if one != self.ranks.get(of_prefill))

    def _of(self, worker: str, *, to_prefill: bool):
        async def passes(method: str, *, upwards: bool, number: int) -> None:
            if self.reached.is_set():
                return
            if method == GENERATE and upwards and number == 0:
                self.ranks[to_prefill] = worker
            if self._place == (method, to_prefill, upwards, number):
                self.ranks[to_prefill] = worker
                self.reached.set()
                await self.opened.wait()

        return passes
