"""A Redis primary with a replica that a test promotes, and the link between them."""

import asyncio
from contextlib import asynccontextmanager

from redis import Redis
from redis.exceptions import ResponseError

from tests.support.redis_server import RedisServer, require_redis
from tests.support.tcp_proxy import TcpProxy

WAIT_S = 60.0


@asynccontextmanager
async def replicated(folder, **required):
    """A primary, its replica, and the link between them."""
    require_redis()
    with RedisServer(folder / "primary", options=required) as primary:
        async with TcpProxy(primary.port) as link:
            options = {"replicaof": f"127.0.0.1 {link.port}", "repl-timeout": 60}
            with RedisServer(folder / "replica", options=options) as replica:
                with Redis.from_url(replica.url) as client:
                    await until(lambda: is_synchronised(client))
                yield primary, link, replica


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - of servers, which tell nobody
            await asyncio.sleep(0.05)


async def until_replicated(client):
    """Wait until the replica has what was written until now."""
    client.incr("a write of this connection, because WAIT waits for those only")
    # On a thread, because the link to the replica runs in this loop.
    assert await asyncio.to_thread(client.wait, 1, 1000 * int(WAIT_S)) == 1


def is_synchronised(client):
    return client.info("replication")["master_link_status"] == "up"


def replication_id(server):
    """What a restart, a promotion and the first replica change."""
    with Redis.from_url(server.url) as client:
        return client.info("replication")["master_replid"]


def takes_no_write(server):
    """Whether it rejects writes, because it lacks the replicas that it requires."""
    with Redis.from_url(server.url) as client:
        try:
            client.set("probe", "")
        except ResponseError as error:
            return "NOREPLICAS" in str(error)
    return False


def promote(server):
    with Redis.from_url(server.url) as client:
        client.replicaof("NO", "ONE")
