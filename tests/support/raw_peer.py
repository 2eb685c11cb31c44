"""A peer that speaks HTTP/2 and gRPC as badly as bytes allow, over a plain socket."""

import random as random_module
import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE = range(9)
CONTINUATION = 9
END_STREAM, END_HEADERS = 1, 4
PATIENCE_S = 0.2

METHODS = (
    "/equipoise_api.v1.WorkerLink/Connect",
    "/equipoise_api.v1.Status/GetStatus",
    "/equipoise_api.v1.Status/WatchStatus",
    "/equipoise_api.v1.Status/ListPools",
    "/equipoise_api.v1.Status/GetLayout",
    "/equipoise_api.v1.Status/GetLoads",
    "/equipoise_api.v1.Status/ListDecisions",
    "/grpc.health.v1.Health/Check",
    "/equipoise_api.v1.Status/NoSuchMethod",
)


class RawPeer:
    """Connects, says something broken, and goes; counts the messages it said.

    `payloads` are serialised messages, good and broken, that calls carry.
    """

    def __init__(self, address: str, *, seed: int, payloads: list[bytes]) -> None:
        host, _, port = address.rpartition(":")
        self._where = (host, int(port))
        self._random = random_module.Random(seed)
        self._payloads = payloads
        self.num_said = 0

    def visit(self) -> None:
        """One connection: garbage, broken frames, or calls whose messages are broken."""
        what = self._random.choice((self._garbage, self._frames, self._calls, self._calls))
        try:
            with socket.create_connection(self._where, timeout=5.0) as connection:
                connection.settimeout(PATIENCE_S)
                self._say(connection, what())
                if self._random.random() < 0.5:
                    # Half of them wait for an answer, the others hang up on it.
                    connection.recv(65_536)
        except OSError:
            pass  # The server may hang up whenever it likes.

    def _say(self, connection: socket.socket, pieces: list[bytes]) -> None:
        self.num_said += len(pieces)
        connection.sendall(b"".join(pieces))

    def _garbage(self) -> list[bytes]:
        start = self._random.choice((b"", PREFACE, PREFACE[:10], b"GET / HTTP/1.1\r\n\r\n"))
        return [start, self._random.randbytes(self._random.choice((1, 9, 100, 20_000)))]

    def _frames(self) -> list[bytes]:
        """Frames of any kind, length, stream and contents."""
        random = self._random
        frames = [PREFACE + frame(SETTINGS)]
        for _ in range(random.randint(1, 40)):
            body = random.randbytes(random.choice((0, 1, 4, 5, 8, 16, 200)))
            made = frame(
                random.choice((*range(10), 10, 255)),
                flags=random.choice((0, 1, 4, 5, 8, 32, 255)),
                stream=random.choice((0, 1, 1, 2, 3, 5, 2**31 - 1)),
                body=body,
            )
            if random.random() < 0.1:
                made = struct.pack(">I", random.choice((0, 5, 2**24 - 1)))[1:] + made[3:]
            frames.append(made)
        return frames

    def _calls(self) -> list[bytes]:
        """Proper calls with improper messages: bad lengths, flags, contents and ends."""
        random = self._random
        said = [PREFACE + frame(SETTINGS)]
        for stream in range(1, 2 * random.randint(1, 8), 2):
            head = headers(random.choice(METHODS), random)
            said.append(frame(HEADERS, flags=END_HEADERS, stream=stream, body=head))
            for _ in range(random.randint(0, 12)):
                ends = END_STREAM if random.random() < 0.1 else 0
                body = self._grpc_message()
                said.append(frame(DATA, flags=ends, stream=stream, body=body[:16_384]))
                if ends:
                    break
            if random.random() < 0.2:
                said.append(frame(RST_STREAM, stream=stream, body=b"\0\0\0\x08"))
        return said

    def _grpc_message(self) -> bytes:
        random = self._random
        payload = random.choice(self._payloads)
        length, flag = len(payload), 0
        if random.random() < 0.15:
            length = random.choice((0, 1, length + 1, length * 2, 2**31, 2**32 - 1))
        if random.random() < 0.1:
            flag = random.choice((1, 2, 255))
        return struct.pack(">BI", flag, length) + payload


def frame(kind: int, *, flags: int = 0, stream: int = 0, body: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def headers(path: str, random: random_module.Random) -> bytes:
    """Headers of a call, as literals that no table is needed for; now and then broken."""
    fields = [
        (":method", random.choice(("POST", "POST", "POST", "GET", "BREW"))),
        (":scheme", "http"),
        (":path", path),
        (":authority", "balancer"),
        ("te", "trailers"),
        ("content-type", random.choice(("application/grpc",) * 4 + ("text/html",))),
        ("grpc-timeout", random.choice(("1S", "1S", "99999999H", "-1S", "x"))),
        ("authorization", random.choice(("", "Bearer x", "Bearer " + "y" * 100))),
    ]
    if random.random() < 0.1:
        random.shuffle(fields)
    if random.random() < 0.1:
        fields.pop(random.randrange(len(fields)))
    return b"".join(b"\0" + _literal(name) + _literal(value) for name, value in fields)


def _literal(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127, "longer ones need another form"
    return bytes([len(data)]) + data
