"""`RedisLink`: a Redis server, how long it is waited for, and its faults in words.

Owns connections. Knows neither keys nor scripts.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from redis import exceptions as faults
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from equipoise.balancer.store.store import StoreError, StoreFault

_MAX_CONNECTIONS = 4
_QUEUE_TIMEOUT_S = 10.0
"""How long a request may wait for one of the connections: as long as a write may take at all."""


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
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=_MAX_CONNECTIONS,
                timeout=_QUEUE_TIMEOUT_S,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise StoreError(
                f"{self.name} is no Redis address ({error}): name one like redis://host:6379/0"
            ) from error
        self.redis: Redis = Redis.from_pool(pool)

    @asynccontextmanager
    async def explained(self) -> AsyncIterator[None]:
        """Turn what Redis raises inside the block into one sentence with a remedy.

        Raises:
            StoreError: with the fault's kind.
        """
        try:
            yield
        except faults.RedisError as error:
            if isinstance(error, faults.ConnectionError):
                # Its siblings are dead too; each would cost somebody a request to find out.
                await self.redis.connection_pool.disconnect(inuse_connections=False)
            fault, sentence = self._explain(error)
            raise StoreError(f"{self.name} {sentence}", fault=fault) from error
        except OSError as error:
            raise StoreError(
                f"{self.name} cannot be reached ({error}): check that it runs there"
            ) from error

    async def close(self) -> None:
        """Close all connections."""
        await self.redis.aclose()

    def _explain(self, error: faults.RedisError) -> tuple[StoreFault, str]:
        match error:
            case (
                faults.AuthenticationError()
                | faults.AuthorizationError()
                | faults.NoPermissionError()
            ):
                fault, sentence = StoreFault.DENIED, "does not let us in: check user and password"
            case faults.BusyLoadingError():
                fault, sentence = StoreFault.UNREACHABLE, "still loads its data: wait for it"
            case faults.TimeoutError():
                fault = StoreFault.SLOW
                sentence = f"did not answer within {self._timeout_s:g} s: check its load"
            case faults.ConnectionError():
                fault, sentence = StoreFault.UNREACHABLE, "cannot be reached: check that it runs"
            case faults.OutOfMemoryError():
                fault, sentence = StoreFault.FULL, "is full: raise its maxmemory or free some"
            case faults.ReadOnlyError():
                fault, sentence = StoreFault.DENIED, "is a read-only replica: name the primary"
            case faults.ResponseError() if str(error).startswith("NOAUTH"):
                fault, sentence = StoreFault.DENIED, "wants a password: put it into the address"
            case faults.ResponseError() if "MISCONF" in str(error):
                fault, sentence = StoreFault.FULL, "cannot write to its disk: free some room"
            case faults.ResponseError() if "WRONGTYPE" in str(error):
                fault = StoreFault.FOREIGN
                sentence = "has our keys with another program's contents: name another database"
            case _:
                fault, sentence = StoreFault.DENIED, "refuses (it must be Redis 6.2 or newer)"
        return fault, f"{sentence} ({error})"
