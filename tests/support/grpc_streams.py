"""`GrpcConnection`: many gRPC streams of one method over one plain connection, at little cost.

HTTP/2 and gRPC as a client needs them to talk to a server that keeps to the rules, and no more:
thousands of simulated ranks must leave the CPUs to the balancer that is measured. A call by
gRPC's own client takes ten times as much.
"""

import asyncio
import struct
from collections.abc import Callable

from tests.support.raw_peer import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)

ACK = 1
PADDED = 8
INITIAL_WINDOW_SIZE = 4
FIRST_WINDOW = 65_535
LARGEST_WINDOW = 2**31 - 1
LARGEST_FRAME = 16_384


class GrpcStream:
    """One call: `write` sends, `heard` receives each message, `ended` the reason of the end."""

    def __init__(
        self,
        connection: "GrpcConnection",
        number: int,
        *,
        heard: Callable[[bytes], None],
        ended: Callable[[str], None],
    ) -> None:
        self.heard, self.ended = heard, ended
        self.window = connection.window_of_streams
        self.received = bytearray()
        self.waiting = bytearray()
        self._connection, self._number = connection, number

    def write(self, message: bytes) -> None:
        """Send a message, as far as the server's windows let it now; the rest follows."""
        self.waiting += struct.pack(">BI", 0, len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Send what waits, down to the last byte of a window: a server may grant none before."""
        connection = self._connection
        while self.waiting:
            size = min(len(self.waiting), LARGEST_FRAME, self.window, connection.window)
            if size <= 0:
                return
            self.window -= size
            connection.window -= size
            connection.send(frame(DATA, stream=self._number, body=bytes(self.waiting[:size])))
            del self.waiting[:size]

    def hear(self, data: bytes) -> None:
        """Take received bytes; complete messages go to `heard`."""
        self.received += data
        while len(self.received) >= 5:
            (size,) = struct.unpack_from(">I", self.received, 1)
            if len(self.received) < 5 + size:
                return
            message = bytes(self.received[5 : 5 + size])
            del self.received[: 5 + size]
            self.heard(message)


class GrpcConnection(asyncio.Protocol):
    """Streams of the method `path`. The server may send up to 2 GiB: no more is granted."""

    def __init__(self, path: str) -> None:
        self.window = FIRST_WINDOW
        self.window_of_streams = FIRST_WINDOW
        self._headers = _headers(path)
        self._streams: dict[int, GrpcStream] = {}
        self._next_number = 1
        self._received = bytearray()
        self._to_send: list[bytes] = []

    def open(self, *, heard: Callable[[bytes], None], ended: Callable[[str], None]) -> GrpcStream:
        """Begin a call."""
        number, self._next_number = self._next_number, self._next_number + 2
        stream = self._streams[number] = GrpcStream(self, number, heard=heard, ended=ended)
        self.send(frame(HEADERS, flags=END_HEADERS, stream=number, body=self._headers))
        return stream

    def send(self, data: bytes) -> None:
        """Send frames; those of one turn of the event loop go together."""
        if not self._to_send:
            asyncio.get_running_loop().call_soon(self._send_all)
        self._to_send.append(data)

    def _send_all(self) -> None:
        data, self._to_send = b"".join(self._to_send), []
        self._transport.write(data)

    # What asyncio says ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the server, and let it say what it wants."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        window = struct.pack(">HI", INITIAL_WINDOW_SIZE, LARGEST_WINDOW)
        more = struct.pack(">I", LARGEST_WINDOW - FIRST_WINDOW)
        self.send(PREFACE + frame(SETTINGS, body=window) + frame(WINDOW_UPDATE, body=more))

    def data_received(self, data: bytes) -> None:
        """Take whole frames; what is left of one waits for the rest."""
        self._received += data
        start = 0
        while len(self._received) - start >= 9:
            high, low, kind, flags, number = struct.unpack_from(">BHBBI", self._received, start)
            end = start + 9 + (high << 16 | low)
            if len(self._received) < end:
                break
            self._take(kind, flags, number, bytes(self._received[start + 9 : end]))
            start = end
        del self._received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """All calls are over."""
        self._end_all(f"the connection was lost: {exc}")

    # What the server says ------------------------------------------------------------------------

    def _take(self, kind: int, flags: int, number: int, body: bytes) -> None:
        stream = self._streams.get(number)
        if kind == DATA and stream is not None:
            assert not flags & PADDED, "gRPC pads nothing"
            stream.hear(body)
        elif kind == SETTINGS and not flags & ACK:
            self._take_settings(body)
        elif kind == PING and not flags & ACK:
            self.send(frame(PING, flags=ACK, body=body))
        elif kind == WINDOW_UPDATE:
            self._take_window(stream, number, body)
        elif kind == GOAWAY:
            code, why = struct.unpack_from(">I", body, 4)[0], body[8:].decode(errors="replace")
            self._end_all(f"the server goes away: {code} {why}")
        if stream is not None and (kind == RST_STREAM or (flags & END_STREAM and kind <= HEADERS)):
            del self._streams[number]
            stream.ended("the server ended the call")

    def _take_settings(self, body: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", body):
            if name == INITIAL_WINDOW_SIZE:
                grown = value - self.window_of_streams
                self.window_of_streams = value
                for stream in self._streams.values():
                    stream.window += grown
                    stream.flush()
        self.send(frame(SETTINGS, flags=ACK))

    def _take_window(self, stream: GrpcStream | None, number: int, body: bytes) -> None:
        (grown,) = struct.unpack(">I", body)
        if number:
            if stream is not None:
                stream.window += grown
                stream.flush()
            return
        self.window += grown
        for each in self._streams.values():
            each.flush()

    def _end_all(self, why: str) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.ended(why)


def _headers(path: str) -> bytes:
    """Headers of a call, as literals for which no table is needed."""
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "balancer"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields
    )
