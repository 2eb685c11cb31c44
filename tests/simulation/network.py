"""`Network`: connections between simulated processes, in place of gRPC's sockets.

A connection is two first-in-first-out pipes with random delays. A cut, in one direction or in both,
keeps messages until it heals, as TCP does; a reset ends both ends. Single messages may be doubled
or overtaken (`flaky`), or lost (`lossy`), although TCP excludes that within a connection.
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import grpc

from tests.simulation.loop import Process, SimLoop

DELAY_S = (0.0005, 0.02)
CONNECT_TIMEOUT_S = 20.0

END = object()
_BROKEN = object()


class Network:
    """Who can reach whom."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self._listeners: dict[str, tuple[Process, dict[str, Any]]] = {}
        self._cuts: dict[tuple[str, str], int] = {}
        self._connections: list[Connection] = []
        self._held: list[_Pipe] = []
        self.delay_factor = 1.0
        self.flaky = self.lossy = 0.0
        self.num_stopped: Counter[tuple[str, str]] = Counter()
        """Messages that a cut has stopped, by source and target."""
        self.on_effect: Callable[[str], None] = lambda _kind: None

    def listen(self, process: Process, address: str, handlers: dict[str, Any]) -> None:
        """Serve methods by their last name, `handler(requests, context)` each."""
        alive = {at: one for at, one in self._listeners.items() if one[0].alive}
        self._listeners = {**alive, address: (process, handlers)}

    def cut(self, source: str, target: str) -> None:
        """Stop messages from one process to another; cuts add up."""
        self._cuts[source, target] = self._cuts.get((source, target), 0) + 1

    def heal(self, source: str, target: str) -> None:
        """Undo one cut; what was sent meanwhile arrives."""
        self._cuts[source, target] -= 1
        if self._cuts[source, target] == 0:
            del self._cuts[source, target]
            held, self._held = self._held, []
            for pipe in held:
                pipe.flush()

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cuts or (source, "*") in self._cuts

    def stops(self, source: str, target: str) -> bool:
        """Whether a cut stops a message."""
        if not self._cuts or not self.is_cut(source, target):
            return False
        self.num_stopped[source, target] += 1
        return True

    def hold(self, pipe: "_Pipe") -> None:
        if pipe not in self._held:
            self._held.append(pipe)

    def reset(self, one: str, other: str) -> int:
        """Break every connection between two processes; returns how many there were."""
        found = [c for c in self._connections if {c.client.name, c.server.name} == {one, other}]
        for connection in found:
            connection.reset()
        return len(found)

    def calls(self, client: Process, method: str) -> "list[Connection]":
        """The calls of a method that a process has open."""
        return [c for c in self._connections if c.client is client and c.method == method]

    def delay_s(self) -> float:
        if self.delay_factor != 1.0:
            self.on_effect("slow_network")
        low_s, high_s = DELAY_S
        return (low_s + (high_s - low_s) * self.rng.random()) * self.delay_factor

    def connect(self, client: Process, address: str, method: str) -> "Connection":
        connection = Connection(self, client, address, method)
        self._connections.append(connection)
        return connection

    def forget(self, connection: "Connection") -> None:
        if connection in self._connections:
            self._connections.remove(connection)
        connection.server.off_death(connection._server_died)
        connection.client.off_death(connection._client_died)

    def listener(self, address: str) -> tuple[Process, dict[str, Any]] | None:
        found = self._listeners.get(address)
        return found if found is not None and found[0].alive else None


class _Pipe:
    """One direction of a connection."""

    def __init__(self, network: Network, source: Process, target: Process, receive) -> None:
        self._network = network
        self._source, self._target = source, target
        self._receive: Callable[[Any], None] = receive
        self._queue: deque[Any] = deque()
        self._last_s = self._latest_s = 0.0
        self.closed = False

    def send(self, item: Any) -> None:
        network = self._network
        now_s = network.loop.time()
        when_s = now_s + network.delay_s()
        is_message = item is not END and item is not _BROKEN
        if is_message and self._is_disturbed(item, when_s):
            return
        # Nothing arrives after the end of what it belongs to.
        before_s = self._latest_s if item is END else self._last_s
        when_s = self._last_s = max(when_s, before_s)
        self._latest_s = max(when_s, self._latest_s)
        self._target.call_at(when_s, self._arrive, item)

    def flush(self) -> None:
        """The cut has healed."""
        queue, self._queue = self._queue, deque()
        for item in queue:
            self.send(item)

    def _is_disturbed(self, item: Any, when_s: float) -> bool:
        network = self._network
        if network.lossy and network.rng.random() < network.lossy:
            network.on_effect("lossy_network")
            return True
        if not network.flaky or network.rng.random() >= network.flaky:
            return False
        network.on_effect("flaky_network")
        is_doubled = network.rng.random() < 0.5  # Else it arrives later than those after it.
        late_s = when_s + (1 if is_doubled else 5) * network.delay_s()
        self._latest_s = max(late_s, self._latest_s)
        self._target.call_at(late_s, self._arrive, item)
        return not is_doubled

    def _arrive(self, item: Any) -> None:
        if self.closed and item is not _BROKEN:  # A reset arrives even if the other end is gone.
            return
        if self._queue or self._network.stops(self._source.name, self._target.name):
            self._queue.append(item)
            self._network.hold(self)
            return
        self._receive(item)


class _Inbox:
    """Messages that have arrived, for one reader."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self.end: BaseException | None = None
        self.ended = False

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._wake()

    def finish(self, error: BaseException | None = None) -> None:
        if not self.ended:
            self.ended, self.end = True, error
            if error is not None:
                self._items.clear()
            self._wake()

    async def get(self) -> Any:
        """The next message; raises StopAsyncIteration, or the error, at the end."""
        while not self._items:
            if self.ended:
                if self.end is not None:
                    raise self.end
                raise StopAsyncIteration
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._items.popleft()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def __aiter__(self) -> "_Inbox":
        return self

    async def __anext__(self) -> Any:
        return await self.get()


class Connection:
    """One call: a client's stream to a server's method."""

    def __init__(self, network: Network, client: Process, address: str, method: str) -> None:
        self.network, self.client, self.method = network, client, method
        self.answers = _Inbox()
        self._requests = _Inbox()
        self._task: asyncio.Task[Any] | None = None
        self.is_open = False
        self.done = False
        self.identity: Any = None
        found = network.listener(address)
        self._up: _Pipe | None = None
        self.server = client if found is None else found[0]
        if found is None:
            when_s = network.loop.time() + 2 * network.delay_s()
            client.call_at(when_s, self._fail, "failed to connect to all addresses")
            return
        process, handlers = found
        self._handler = handlers[method]
        self._up = _Pipe(network, client, process, self._at_server)
        self._down = _Pipe(network, process, client, self._at_client)
        self._up.send(None)  # The connection itself.
        process.on_death(self._server_died)
        client.on_death(self._client_died)
        timeout_s = network.loop.time() + CONNECT_TIMEOUT_S
        client.call_at(timeout_s, self._connect_timeout)

    # The client's side.

    def send(self, item: Any) -> None:
        if self.done:
            raise asyncio.InvalidStateError("the call is over")
        if self._up is not None:
            self._up.send(item)

    def cancel(self) -> None:
        if self.done:
            return
        if self._up is not None:
            self._up.send(_BROKEN)
        self._finish_client(None)

    def _fail(self, details: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        if not self.done:
            self._finish_client(grpc.aio.AioRpcError(code, _NO_METADATA, _NO_METADATA, details))

    def _finish_client(self, error: BaseException | None) -> None:
        self.done = True
        self.answers.finish(error)
        self.network.forget(self)

    def _connect_timeout(self) -> None:
        if not self.is_open:
            self._fail("connection timed out")

    def _at_client(self, item: Any) -> None:
        self.is_open = True
        if self.done:
            return
        if item is _BROKEN:
            self._fail("connection reset by peer")
        elif isinstance(item, _Status):
            if item.code is grpc.StatusCode.OK:
                self._finish_client(None)
            else:
                self._fail(item.details, item.code)
        elif item is not None:
            self.answers.put(item)

    # The server's side.

    def _at_server(self, item: Any) -> None:
        if item is None:
            if self._task is None:
                self._down.send(None)
                self._task = self.server.spawn(self._serve())
        elif item is END:
            self._requests.finish()
        elif item is _BROKEN:
            # Even the opening of the call, if it was overtaken, comes too late now.
            self._up.closed = True
            if self._task is not None:
                self._task.cancel()
            self._requests.finish()
        else:
            self._requests.put(item)

    async def _serve(self) -> None:
        context = ServerContext(self)
        status = _Status(grpc.StatusCode.OK, "")
        try:
            await self._handler(self._requests, context)
        except _AbortError as abort:
            status = _Status(abort.code, abort.details)
        except asyncio.CancelledError:
            self._down.closed = True
            raise
        except Exception as error:  # noqa: BLE001 - as a server does
            status = _Status(grpc.StatusCode.UNKNOWN, repr(error))
            self.network.loop.faults.append(f"{self.method}: {error!r}")
        self._down.send(status)

    def answer(self, item: Any) -> None:
        self._down.send(item)

    def reset(self) -> None:
        """The network breaks it: both ends notice."""
        self._client_died()
        self._server_died()

    def _server_died(self) -> None:
        # The machine's kernel says so, if the network lets it.
        if not self.done and self._up is not None:
            self._down.send(_BROKEN)

    def _client_died(self) -> None:
        if self._up is not None and self.server.alive:
            self._up.send(_BROKEN)
        if not self.client.alive:
            self.network.forget(self)


class _Status:
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details


class _AbortError(Exception):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details


class ServerContext:
    """What a servicer's method uses of gRPC's context."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.identity = connection.identity

    async def write(self, item: Any) -> None:
        self._connection.answer(item)

    def peer(self) -> str:
        return f"ipv4:{self._connection.client.name}"

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise _AbortError(code, details)


_NO_METADATA = grpc.aio.Metadata()
