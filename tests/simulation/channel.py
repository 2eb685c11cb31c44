"""`Channel`: what the generated stubs use of gRPC, over a simulated network."""

from typing import Any, Self

import grpc

from tests.simulation.loop import Process
from tests.simulation.network import END, Connection, Network


class Channel:
    """What the generated stubs use of gRPC's channel."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network, self._process, self._address = network, process, address
        self.identity: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        pass

    async def close(self, grace: float | None = None) -> None:
        pass

    def stream_stream(self, path, *, request_serializer, response_deserializer, **_kwargs):
        def call(_requests=None, *, metadata=None):
            connection = self._open(path)
            return Call(connection, request_serializer, response_deserializer)

        return call

    def unary_stream(self, path, *, request_serializer, response_deserializer, **_kwargs):
        def call(request, *, timeout=None, metadata=None):
            connection = self._open(path)
            if timeout is not None:
                loop = self._network.loop
                self._process.call_at(
                    loop.time() + timeout,
                    connection._fail,
                    "Deadline Exceeded",
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                )
            connection.send(request_serializer(request))
            connection.send(END)
            return Call(connection, request_serializer, response_deserializer)

        return call

    def _open(self, path: str) -> Connection:
        method = path.rpartition("/")[2]
        connection = self._network.connect(self._process, self._address, method)
        connection.identity = self.identity
        return connection


class Call:
    """What a client uses of a call."""

    def __init__(self, connection: Connection, serialize, deserialize) -> None:
        self._connection = connection
        self._serialize, self._deserialize = serialize, deserialize

    async def write(self, message: Any) -> None:
        self._connection.send(self._serialize(message))

    async def done_writing(self) -> None:
        self._connection.send(END)

    def cancel(self) -> None:
        self._connection.cancel()

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> Any:
        return self._deserialize(await self._connection.answers.get())
