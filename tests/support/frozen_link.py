"""`FrozenLink`: TCP that stops to carry bytes, as when a machine is gone without a word."""

import asyncio
from contextlib import asynccontextmanager


class FrozenLink:
    """Carries one connection until `freeze`; afterwards nothing arrives on either side."""

    def __init__(self, target):
        self._host, _, self._port = target.rpartition(":")
        self._frozen = False
        self.address = ""
        self.closed_by_server = asyncio.Event()
        self.closed_by_client = asyncio.Event()

    def freeze(self):
        self._frozen = True

    async def accept(self, reader, writer):
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            await asyncio.gather(
                self._carry(reader, far_writer, self.closed_by_client),
                self._carry(far_reader, writer, self.closed_by_server),
            )
        finally:
            writer.close()
            far_writer.close()

    async def _carry(self, reader, writer, closed):
        try:
            while data := await reader.read(65536):
                if not self._frozen:
                    writer.write(data)
        except ConnectionError:
            pass
        closed.set()


@asynccontextmanager
async def frozen_link(target):
    link = FrozenLink(target)
    server = await asyncio.start_server(link.accept, "127.0.0.1", 0)
    link.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield link
    finally:
        server.close()
