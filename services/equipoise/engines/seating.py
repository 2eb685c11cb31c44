"""`take_seat`: a rank's seat with its link, however a plugin found the engine."""

from collections.abc import Callable
from dataclasses import replace

from equipoise.engines.errors import UnsupportedEngineError
from equipoise.engines.link import EngineLink
from equipoise.engines.lockstep import Lockstep
from equipoise.engines.model import EngineModel
from equipoise.engines.seat import EngineSeat
from equipoise.engines.settings import EngineSettings, Mode


def take_seat(model: EngineModel, lockstep: Lockstep, settings: EngineSettings) -> EngineSeat:
    """Return the seat of a rank; its link starts once the ranks hold verified experts.

    In observe mode, the engine keeps even the tables that it started with.

    A rank that can have no link has all stop at their first exchange. Without a seat it would keep
    the others waiting there.
    """
    if settings.mode is Mode.OBSERVE:
        model = replace(model, commit=lambda _tables: None)

    def seat_with(start: Callable[[EngineSeat], None]) -> EngineSeat:
        worker = settings.worker_of(lockstep.rank)
        return EngineSeat(model, lockstep, worker=worker, on_ready=start)

    try:
        return seat_with(EngineLink(settings).start)
    except UnsupportedEngineError as error:
        seat = seat_with(lambda _seat: None)
        seat.leave(f"rank {lockstep.rank}: {error}")
        return seat
