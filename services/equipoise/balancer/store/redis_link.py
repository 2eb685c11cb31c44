"""`RedisLink`: connections to a Redis server, with timeouts and human-readable errors."""

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
"""Concurrent requests, and so connections."""

_QUEUE_TIMEOUT_S = 10.0
"""How long a request may be queued: as long as a write may take in total."""


class RedisLink:
    """The server at `url` (redis://[user:password@]host:port/db, or rediss://).

    Nothing is retried here: only the caller knows whether a retry is safe.

    Raises:
        StoreError: the URL is not valid.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        parts = urlsplit(url)
        self.name = f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}{parts.path}"
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(_MAX_REQUESTS)
        try:
            # `request` limits each request as a whole. With a `socket_timeout` the library would
            # send with wait_for, which in Python 3.11 can swallow a cancellation.
            self.redis: Redis = Redis.from_url(
                url,
                socket_timeout=None,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise StoreError(
                f"{self.name} is not a valid Redis address ({error}): use one like redis://host:6379/0"
            ) from error

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Limit the time of a request to Redis inside the block, and explain its errors.

        Raises:
            StoreError: the request failed; has the kind of the fault and a remedy.
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
                f"{self.name}: a request was queued for {_QUEUE_TIMEOUT_S:g} s behind "
                f"{_MAX_REQUESTS} requests in flight: check its load",
                fault=StoreFault.SLOW,
            ) from None
        try:
            yield
        finally:
            self._turns.release()

    async def _fault(self, error: faults.RedisError | OSError) -> StoreError:
        if isinstance(error, faults.ConnectionError):
            # The other connections are dead too; each would fail one more request.
            await self.redis.connection_pool.disconnect(inuse_connections=False)
        if isinstance(error, OSError) and not isinstance(error, TimeoutError):
            return StoreError(
                f"{self.name} cannot be reached ({error}): check that it is running there"
            )
        fault, sentence = self._explain(error)
        return StoreError(f"{self.name} {sentence}", fault=fault)

    def _explain(self, error: faults.RedisError | TimeoutError) -> tuple[StoreFault, str]:
        match error:
            case (
                faults.AuthenticationError()
                | faults.AuthorizationError()
                | faults.NoPermissionError()
            ):
                fault, sentence = (
                    StoreFault.DENIED,
                    "rejects the credentials: check user and password",
                )
            case faults.BusyLoadingError():
                fault, sentence = StoreFault.UNREACHABLE, "is still loading its data: wait for it"
            case faults.TimeoutError() | TimeoutError():
                fault = StoreFault.SLOW
                sentence = f"did not answer within {self._timeout_s:g} s: check its load"
            case faults.ConnectionError():
                fault, sentence = (
                    StoreFault.UNREACHABLE,
                    "cannot be reached: check that it is running",
                )
            case faults.OutOfMemoryError():
                fault, sentence = (
                    StoreFault.FULL,
                    "is full: raise its maxmemory or free some memory",
                )
            case faults.ReadOnlyError():
                fault, sentence = (
                    StoreFault.DENIED,
                    "is a read-only replica: use the primary's address",
                )
            case _:
                known = ((kind, text) for mark, kind, text in _ANSWERS if mark in str(error))
                fault, sentence = next(known, _REJECTION)
        return fault, f"{sentence} ({error})" if str(error) else sentence


_ANSWERS = (
    ("NOAUTH", StoreFault.DENIED, "requires a password: add it to the address"),
    ("NOREPLICAS", StoreFault.FULL, "accepts no writes without its replicas: repair them"),
    ("MISCONF", StoreFault.FULL, "cannot write to its disk: free some space"),
    (
        "WRONGTYPE",
        StoreFault.FOREIGN,
        "has keys of another program: use another database",
    ),
)
"""Explanations of error replies, by a word in the reply."""

_REJECTION = (StoreFault.DENIED, "rejects the request (Redis 6.2 or newer is required)")
