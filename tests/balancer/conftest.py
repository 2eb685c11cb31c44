"""Fixtures: a pool's controller alone, real servers and real Redis servers."""

import grpc
import pytest
from redis import Redis

from equipoise_api.v1 import status_pb2_grpc
from tests.support.balancer_links import opened
from tests.support.pool_harness import (  # noqa: F401 - fixtures
    harness,
    hello_of,
    make_harness,
    policy,
    serving_harness,
    skewed,
    worker_of,
)
from tests.support.redis_server import RedisServer, require_redis


@pytest.fixture
async def address(tmp_path):
    """Where a real server listens, with a real file."""
    async with opened(tmp_path) as address:
        yield address


@pytest.fixture
async def channel(address):
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel


@pytest.fixture
def status(channel):
    return status_pb2_grpc.StatusStub(channel)


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory):
    require_redis()
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(shared_redis):
    """An empty database of a server that works."""
    with Redis.from_url(shared_redis.url) as client:
        client.flushall()
    return shared_redis.url


@pytest.fixture
def redis_server(tmp_path):
    """A server of the test's own, to be hurt."""
    require_redis()
    with RedisServer(tmp_path / "redis") as server:
        yield server
