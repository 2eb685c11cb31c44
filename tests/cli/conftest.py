"""A gateway over a scripted rank, for commands that talk to an OpenAI-compatible server."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest_asyncio

from equipoise.gateway.server import serve
from equipoise.gateway.settings import GatewaySettings
from tests.support.scripted_ranks import BOUND_S, END_TOKEN, VOCAB_SIZE, FakeRank, listening


class Server:
    def __init__(self, url, rank):
        self.url, self.rank = url, rank


@asynccontextmanager
async def serving_gateway(folder):
    """A gateway at a URL, and the rank it forwards to."""
    config = {"vocab_size": VOCAB_SIZE, "eos_token_id": END_TOKEN}
    (folder / "config.json").write_text(json.dumps(config))
    rank, stop = FakeRank(), asyncio.Event()
    address = asyncio.get_running_loop().create_future()
    async with listening(rank) as worker:
        settings = GatewaySettings(
            listen="127.0.0.1:0", checkpoint=folder, workers=(worker,), max_attempts=1
        )
        task = asyncio.create_task(serve(settings, stop=stop, listening=address.set_result))
        async with asyncio.timeout(BOUND_S):
            url = f"http://{await address}"
        yield Server(url, rank)
        stop.set()
        async with asyncio.timeout(BOUND_S):
            await task


@pytest_asyncio.fixture
async def server(tmp_path):
    """A gateway at a URL, and the rank it forwards to."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    async with serving_gateway(folder) as server:
        yield server
