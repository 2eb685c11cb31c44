"""`TcpProxy`: a TCP port that passes bytes to another one, and can hold back either direction.

Stands in for a one-way partition without a privileged network namespace: what is held back arrives
when the partition ends, as retransmitted segments do.
"""

import asyncio
from contextlib import suppress
from typing import Self


class TcpProxy:
    """Listens on a free port of 127.0.0.1 for `target`, a port there. An asynchronous context."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._passes = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._tasks = set()
        self.port = 0
        self.heal()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error) -> None:
        self._server.close()
        self.drop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hold(self, *directions: str) -> None:
        """Pass nothing "up" (to the target), "down" (from it), or, without a word, either way."""
        for direction in directions or self._passes:
            self._passes[direction].clear()

    def redirect(self, target: int) -> None:
        """Take new connections to another port, as a service address does after a failover."""
        self._target = target

    def drop(self) -> None:
        """End all connections; whoever needs one makes it anew."""
        for task in tuple(self._tasks):
            task.cancel()

    def heal(self) -> None:
        """Pass everything again, beginning with what was held back."""
        for passes in self._passes.values():
            passes.set()

    async def _serve(self, reader, writer) -> None:
        self._tasks.add(asyncio.current_task())
        writers = [writer]
        try:
            there, here = await asyncio.open_connection("127.0.0.1", self._target)
            writers.append(here)
            passing = self._pass(reader, here, "up"), self._pass(there, writer, "down")
            await asyncio.gather(*passing)
        except (OSError, asyncio.CancelledError):
            pass  # In Python 3.11 the streams log a server's cancelled task as an error.
        finally:
            for one in writers:
                one.transport.abort()
            self._tasks.discard(asyncio.current_task())

    async def _pass(self, reader, writer, direction) -> None:
        """Pass one direction, and its end."""
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._passes[direction].wait()
                writer.write(data)
                await writer.drain()
            await self._passes[direction].wait()
        writer.close()
