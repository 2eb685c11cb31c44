"""`SimRegister`: the lease in a simulated server, with the ID that this had as it was written."""

from collections.abc import Callable
from typing import Any

from equipoise.balancer.leadership.lease import LeaseRecord, Sighting
from equipoise.balancer.leadership.register import RegisterError, record_from_text, record_to_text
from equipoise.balancer.store.store import StoreError
from tests.simulation.store import Client, Data

LEASES = "leases"
"""The machine of a register of its own."""


class SimRegister(Client):
    """A `LeaseRegister` in the store's server, or in one of its own."""

    async def read(self) -> Sighting | None:
        return await self._answer(self._held)

    def _held(self) -> Sighting | None:
        held = self._server.data.get("lease")
        if held is None:
            return None
        (text, written), server = held, self._server.num_failovers
        record = record_from_text(text, where="the lease")
        return Sighting(record=record, version=f"{server} {text}", is_latest=written == server)

    async def write(self, record: LeaseRecord, *, replacing: str | None) -> Sighting | None:
        def change(data: Data) -> Sighting | None:
            held = self._held()
            if (held and held.version) != replacing:
                return None
            text, server = record_to_text(record), self._server.num_failovers
            data["lease"] = text, server
            return Sighting(record=record, version=f"{server} {text}")

        return await self._answer(lambda: self._server.write(change))

    async def close(self) -> None:
        pass

    async def _answer(self, step: Callable[[], Any]) -> Any:
        try:
            return await self.request(step)
        except StoreError as error:
            raise RegisterError(str(error)) from error
