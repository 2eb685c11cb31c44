"""`RedisLink`: connections to a Redis server, with timeouts and human-readable errors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from redis import exceptions as faults
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from equipoise.balancer.store.store import StoreError, StoreFault

_MAX_REQUESTS = 4
"""Concurrent requests, and so connections."""

_QUEUE_TIMEOUT_S = 10.0
"""How long a request may be queued: as long as a write may take in total."""


class RedisLink:
    """The server at `url` (redis://[user@]host:port/db, or rediss://).

    The password is read from `password_file`, if given, for every connection. Nothing is retried
    here: only the caller knows whether a retry is safe.

    Raises:
        StoreError: the URL is not valid, or the password file cannot be read.
    """

    def __init__(self, url: str, *, timeout_s: float, password_file: str = "") -> None:
        parts = urlsplit(url)
        self.name = f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}{parts.path}"
        self._timeout_s = timeout_s
        login = _Login(parts.username or "", password_file) if password_file else None
        if login is not None:
            url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
            try:
                login.get_credentials()
            except faults.AuthenticationError as error:
                raise StoreError(str(error)) from error
        self._turns = asyncio.Semaphore(_MAX_REQUESTS)
        try:
            # `request` limits each request as a whole. With a `socket_timeout` the library would
            # send with wait_for, which in Python 3.11 can swallow a cancellation.
            self.redis: Redis = Redis.from_url(
                url,
                credential_provider=login,
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
        if isinstance(error, faults.ConnectionError | faults.ReadOnlyError):
            # The other connections are dead too, or lead to a server that is a replica now, while
            # the address may be that of the new primary; each would fail one more request.
            await self.redis.connection_pool.disconnect(inuse_connections=False)
        if isinstance(error, OSError) and not isinstance(error, TimeoutError):
            error = faults.ConnectionError(str(error))
        fault, sentence = self._explain(error)
        return StoreError(f"{self.name} {sentence}", fault=fault)

    def _explain(self, error: faults.RedisError | TimeoutError) -> tuple[StoreFault, str]:
        known = next((row for row in _BY_CLASS if isinstance(error, row[0])), None)
        if known is not None:
            _, fault, sentence = known
        elif isinstance(error, faults.TimeoutError | TimeoutError):
            fault = StoreFault.SLOW
            sentence = f"did not answer within {self._timeout_s:g} s: check its load"
        elif isinstance(error, faults.ConnectionError) and _is_unsent(str(error)):
            fault, sentence = StoreFault.UNREACHABLE, "cannot be reached: check that it is running"
        elif isinstance(error, faults.ConnectionError):
            fault, sentence = (
                StoreFault.BROKEN,
                "ended the connection: check that it is running",
            )
        else:
            answers = ((kind, text) for mark, kind, text in _ANSWERS if mark in str(error))
            fault, sentence = next(answers, _REJECTION)
        return fault, f"{sentence} ({error})" if str(error) else sentence


class _Login(CredentialProvider):
    """The user, and the password in a file, which may be replaced at any time."""

    def __init__(self, user: str, password_file: str) -> None:
        self._user = user
        self._password_file = password_file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """User and password for a new connection.

        Raises:
            AuthenticationError: the file cannot be read.
        """
        try:
            password = Path(self._password_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise faults.AuthenticationError(
                f"store_password_file {self._password_file}: {reason}"
            ) from error
        return (self._user, password) if self._user else (password,)


def _is_unsent(message: str) -> bool:
    """Whether a connection failed before it carried a request."""
    return "connecting to" in message or "max number of clients" in message


_BY_CLASS: tuple[tuple[tuple[type[Exception], ...], StoreFault, str], ...] = (
    (
        (faults.AuthenticationError, faults.AuthorizationError, faults.NoPermissionError),
        StoreFault.DENIED,
        "rejects the credentials: check user and password",
    ),
    (
        (faults.BusyLoadingError,),
        StoreFault.UNREACHABLE,
        "is still loading its data: wait for it",
    ),
    (
        (faults.OutOfMemoryError,),
        StoreFault.FULL,
        "is full: raise its maxmemory or free some memory",
    ),
    (
        (faults.ReadOnlyError,),
        StoreFault.UNREACHABLE,
        "is a read-only replica: use the primary's address",
    ),
    (
        (faults.MasterDownError,),
        StoreFault.UNREACHABLE,
        "is a replica without its primary: repair it",
    ),
    (
        (faults.ClusterDownError, faults.TryAgainError),
        StoreFault.UNREACHABLE,
        "is a cluster that cannot answer now: repair it",
    ),
    (
        (faults.MovedError,),
        StoreFault.DENIED,
        (
            "is a cluster, and this node does not have the slot of {equipoise}: use an address "
            "that always reaches its owner, or a Redis without cluster mode"
        ),
    ),
)
"""Explanations of errors that have a class, in the order of precedence."""

_ANSWERS = (
    ("NOAUTH", StoreFault.DENIED, "requires a password: set --store-password-file"),
    ("BUSY ", StoreFault.UNREACHABLE, "runs a script that blocks it: check its load"),
    ("NOREPLICAS", StoreFault.FULL, "accepts no writes without its replicas: repair them"),
    ("MISCONF", StoreFault.FULL, "cannot write to its disk: free some space"),
    (
        "WRONGTYPE",
        StoreFault.FOREIGN,
        "has keys of another program: use another database",
    ),
    # Scripts of the store are right about records that it wrote.
    ("attempt to", StoreFault.DAMAGED, "has a record that is damaged"),
    ("is not an integer", StoreFault.DAMAGED, "has a number that is damaged"),
)
"""Explanations of error replies, by a word in the reply."""

_REJECTION = (StoreFault.DENIED, "rejects the request (Redis 6.2 or newer is required)")
