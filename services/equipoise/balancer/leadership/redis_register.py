"""`RedisRegister`: the lease in the Redis server that stores the state.

Weaker than a quorum. A failover to a replica that lags loses the last renewal. A leader that is cut
off together with the old primary keeps renewing its lease there, unless that server requires
replicas for its writes (`failover_risk`).
"""

from equipoise.balancer.leadership.lease import LeaseRecord, Sighting
from equipoise.balancer.leadership.register import RegisterError, record_from_text, record_to_text
from equipoise.balancer.store.redis_link import RedisLink
from equipoise.balancer.store.redis_store import HASH_TAG
from equipoise.balancer.store.store import StoreError

_KEY = f"{HASH_TAG}:lease"

_READ = """
redis.call('DEL', KEYS[2])
return redis.call('GET', KEYS[1])
"""
"""Deletes a key that is never set: a replica rejects a write, so nobody takes the standstill of one
that is cut off for an expired lease."""

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
        self._read = self._link.redis.register_script(_READ)
        self._replace = self._link.redis.register_script(_REPLACE)

    async def read(self) -> Sighting | None:
        """Return the current record; None if there is none."""
        try:
            async with self._link.request():
                found = await self._read(keys=[_KEY, f"{_KEY}:unset"])
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

    async def failover_risk(self) -> str:
        """Return why a failover of this server can leave two leaders; empty if it cannot.

        Only replicas that are connected now count: a server without any has no failover.

        Raises:
            RegisterError: the server did not answer, or does not show its replication.
        """
        try:
            async with self._link.request():
                found = await self._link.redis.info("replication")
        except StoreError as error:
            raise RegisterError(str(error)) from error
        num_replicas = int(found.get("connected_slaves", 0))
        # The server shows this field only if it requires replicas for its writes.
        if found.get("role") != "master" or not num_replicas or "min_slaves_good_slaves" in found:
            return ""
        replicas = f"{num_replicas} replica{'s' if num_replicas > 1 else ''}"
        return (
            f"{self._link.name} has {replicas} but accepts writes without them: after a failover, "
            "a balancer that still reaches the old server keeps leading. To prevent it, set its "
            "min-replicas-to-write to 1 and its min-replicas-max-lag below the time that a "
            "failover takes, or use --lease=kubernetes"
        )

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()
