"""`RedisRegister`: the lease in the Redis server that stores the state.

Weaker than a quorum. A failover to a replica that lags loses the latest records, so the server's
replication ID, which a promotion or a restart changes, is stored with each record. A leader that is
cut off together with the old primary keeps renewing its lease there, unless that server requires
replicas for its writes (`failover_risk`).
"""

import sys

from equipoise.balancer.leadership.lease import LeaseRecord, Sighting
from equipoise.balancer.leadership.register import RegisterError, record_from_text, record_to_text
from equipoise.balancer.store.redis_link import RedisLink
from equipoise.balancer.store.redis_store import HASH_TAG
from equipoise.balancer.store.store import StoreError

_KEY = f"{HASH_TAG}:lease"

_SERVER_KEY = f"{_KEY}:server"
"""Holds the replication ID of the server that the record was written to."""

_SERVER = """
local info = redis.pcall('INFO', 'replication')
local server = type(info) == 'string' and string.match(info, 'master_replid:(%w+)') or ''
local held = redis.call('GET', KEYS[1])
"""
"""Without a replication ID (the account may not use INFO), no record is the latest for sure."""

_READ = (
    _SERVER
    + """
redis.call('DEL', KEYS[3])
local written = redis.call('GET', KEYS[2])
return {held, server, (server ~= '' and written == server) and 1 or 0}
"""
)
"""Deletes a key that is never set: a replica rejects a write, so no candidate mistakes the
unchanged record of one that is cut off for an expired lease."""

_REPLACE = (
    _SERVER
    + """
local version = ''
if held then version = server .. ' ' .. held end
if version ~= ARGV[1] then return false end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], server)
return server
"""
)


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
                held, server, is_latest = await self._read(
                    keys=[_KEY, _SERVER_KEY, f"{_KEY}:unset"]
                )
        except StoreError as error:
            raise RegisterError(str(error)) from error
        if held is None:
            return None
        text = _text(held)
        record = record_from_text(text, where=f"key {_KEY} of {self._link.name}")
        version = f"{_text(server)} {text}"
        return Sighting(record=record, version=version, is_latest=bool(is_latest))

    async def write(self, record: LeaseRecord, *, replacing: str | None) -> Sighting | None:
        """Replace version `replacing` by `record`; return None if the version differs."""
        text = record_to_text(record)
        try:
            async with self._link.request():
                server = await self._replace(keys=[_KEY, _SERVER_KEY], args=[replacing or "", text])
        except StoreError as error:
            raise RegisterError(str(error)) from error
        if server is None:
            return None
        version = f"{_text(server)} {text}"
        return Sighting(record=record, version=version, is_latest=bool(server))

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
        if found.get("role") != "master" or not num_replicas:
            return ""
        # The server shows this field only if it requires replicas for its writes.
        required = await self._required_replicas() if "min_slaves_good_slaves" in found else 0
        majority = (num_replicas + 1) // 2  # Of the servers, with the primary itself.
        if required >= majority:
            return ""
        replicas = f"{num_replicas} replica{'s' if num_replicas > 1 else ''}"
        return (
            f"{self._link.name} has {replicas} but accepts writes "
            f"{f'with only {required} of them' if required else 'without them'}: after a failover, "
            "a balancer that still reaches the old server keeps leading. To prevent it, set its "
            f"min-replicas-to-write to {majority} and its min-replicas-max-lag below the time that "
            "a failover takes, or use --lease=kubernetes"
        )

    async def _required_replicas(self) -> int:
        """Return how many replicas the server requires; many, if it does not show its settings."""
        setting = "min-replicas-to-write"
        try:
            async with self._link.request():
                return int(str((await self._link.redis.config_get(setting))[setting]))
        except (LookupError, StoreError, ValueError):
            return sys.maxsize

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()


def _text(found: bytes | str) -> str:
    return found.decode(errors="replace") if isinstance(found, bytes) else found
