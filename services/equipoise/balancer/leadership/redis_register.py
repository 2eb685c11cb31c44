"""`RedisRegister`: the lease in the Redis server that stores the state.

Weaker than a quorum: a failover to a replica that lags loses the last renewal. Then two balancers
may lead until the older one's lease expires; the term keeps the older one from writing.
"""

from equipoise.balancer.leadership.lease import LeaseRecord, Sighting
from equipoise.balancer.leadership.register import RegisterError, record_from_text, record_to_text
from equipoise.balancer.store.redis_link import RedisLink
from equipoise.balancer.store.redis_store import HASH_TAG
from equipoise.balancer.store.store import StoreError

_KEY = f"{HASH_TAG}:lease"

_REPLACE = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


class RedisRegister:
    """A `LeaseRegister` in the Redis server at `url`, with its own connection.

    Raises:
        StoreError: the URL is not valid, or the password file cannot be read.
    """

    def __init__(self, url: str, *, timeout_s: float, password_file: str = "") -> None:
        self._link = RedisLink(url, timeout_s=timeout_s, password_file=password_file)
        self._replace = self._link.redis.register_script(_REPLACE)

    async def read(self) -> Sighting | None:
        """Return the current record; None if there is none."""
        try:
            async with self._link.request():
                found = await self._link.redis.get(_KEY)
        except StoreError as error:
            raise RegisterError(str(error)) from error
        if found is None:
            return None
        text = found.decode(errors="replace") if isinstance(found, bytes) else found
        where = f"key {_KEY} of {self._link.name}"
        return Sighting(record=record_from_text(text, where=where), version=text)

    async def write(self, record: LeaseRecord, *, replacing: str | None) -> Sighting | None:
        """Replace version `replacing` by `record`; return None if the version differs."""
        text = record_to_text(record)
        try:
            async with self._link.request():
                replaced = await self._replace(keys=[_KEY], args=[replacing or "", text])
        except StoreError as error:
            raise RegisterError(str(error)) from error
        return Sighting(record=record, version=text) if replaced else None

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()
