"""`RedisLink`: a Redis server, how long it is waited for, and its faults in words.

Owns connections. Knows neither keys nor scripts.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from redis import exceptions as faults
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from equipoise.balancer.store.store import StoreError, StoreFault

_MAX_REQUESTS = 4
"""Requests, and so connections, at a time."""

_QUEUE_TIMEOUT_S = 10.0
"""How long a request may wait for its turn: as long as a write may take at all."""


class RedisLink:
    """The server at `url` (redis://[user:password@]host:port/db, or rediss://).

    Nothing is tried twice in here: whoever asked knows whether it is safe to ask again.

    Raises:
        StoreError: the URL is none.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        parts = urlsplit(url)
        self.name = f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}{parts.path}"
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(_MAX_REQUESTS)
        try:
            # Each request is bounded here, as a whole. With a `socket_timeout` the library would
            # send by wait_for, which in Python 3.11 swallows a cancellation that comes meanwhile.
            self.redis: Redis = Redis.from_url(
                url,
                socket_timeout=None,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise StoreError(
                f"{self.name} is no Redis address ({error}): name one like redis://host:6379/0"
            ) from error

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Bound a request to Redis inside the block, and turn what it raises into one sentence.

        Raises:
            StoreError: with the fault's kind and a remedy.
        """
        async with self._turn():
            try:
                async with asyncio.timeout(self._timeout_s):
                    yield
            except (faults.RedisError, OSError) as error:
                raise await self._fault(error) from error

    async def close(self) -> None:
        """Close all connections."""
        await self.redis.aclose()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(_QUEUE_TIMEOUT_S):
                await self._turns.acquire()
        except TimeoutError:
            raise StoreError(
                f"{self.name} was not asked within {_QUEUE_TIMEOUT_S:g} s, because "
                f"{_MAX_REQUESTS} requests were under way all the time: check its load",
                fault=StoreFault.SLOW,
            ) from None
        try:
            yield
        finally:
            self._turns.release()

    async def _fault(self, error: faults.RedisError | OSError) -> StoreError:
        if isinstance(error, faults.ConnectionError):
            # Its siblings are dead too; each would cost somebody a request to find out.
            await self.redis.connection_pool.disconnect(inuse_connections=False)
        if isinstance(error, OSError) and not isinstance(error, TimeoutError):
            return StoreError(f"{self.name} cannot be reached ({error}): check that it runs there")
        fault, sentence = self._explain(error)
        return StoreError(f"{self.name} {sentence}", fault=fault)

    def _explain(self, error: faults.RedisError | TimeoutError) -> tuple[StoreFault, str]:
        match error:
            case (
                faults.AuthenticationError()
                | faults.AuthorizationError()
                | faults.NoPermissionError()
            ):
                fault, sentence = StoreFault.DENIED, "does not let us in: check user and password"
            case faults.BusyLoadingError():
                fault, sentence = StoreFault.UNREACHABLE, "still loads its data: wait for it"
            case faults.TimeoutError() | TimeoutError():
                fault = StoreFault.SLOW
                sentence = f"did not answer within {self._timeout_s:g} s: check its load"
            case faults.ConnectionError():
                fault, sentence = StoreFault.UNREACHABLE, "cannot be reached: check that it runs"
            case faults.OutOfMemoryError():
                fault, sentence = StoreFault.FULL, "is full: raise its maxmemory or free some"
            case faults.ReadOnlyError():
                fault, sentence = StoreFault.DENIED, "is a read-only replica: name the primary"
            case _:
                told = ((what, words) for mark, what, words in _ANSWERS if mark in str(error))
                fault, sentence = next(told, _REFUSAL)
        return fault, f"{sentence} ({error})" if str(error) else sentence


_ANSWERS = (
    ("NOAUTH", StoreFault.DENIED, "wants a password: put it into the address"),
    ("NOREPLICAS", StoreFault.FULL, "takes no write without its replicas: mend them"),
    ("MISCONF", StoreFault.FULL, "cannot write to its disk: free some room"),
    (
        "WRONGTYPE",
        StoreFault.FOREIGN,
        "has our keys with another program's contents: name another database",
    ),
)
"""What a server answers that does not do as it was asked, by a word in it."""

_REFUSAL = (StoreFault.DENIED, "refuses (it must be Redis 6.2 or newer)")
