"""A client that does not read is bounded, blocks no other client, and is disconnected."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager, closing
from urllib.parse import urlsplit

import psutil
import pytest

from equipoise.gateway.client import HttpClient
from equipoise.gateway.errors import ClientGoneError
from equipoise_api.v1 import worker_pb2 as pb
from tests.support.scripted_ranks import BOUND_S, FakeRank, all_events, listening, tokens_of

MANY_TOKENS = 80_000
TOKENS_A_MESSAGE = 40


class ChattyRank(FakeRank):
    """Says the same token as often as it is asked to, with much about each; counts messages."""

    num_sent = 0

    async def _serve(self, request, context, _fault):
        await context.send_initial_metadata(())
        about = pb.TokenLogprob(logprob=-1.0, top_tokens=range(20), top_logprobs=[-1.0] * 20)
        for made in range(0, request.max_tokens, TOKENS_A_MESSAGE):
            num_tokens = min(TOKENS_A_MESSAGE, request.max_tokens - made)
            is_last = made + num_tokens == request.max_tokens
            await context.write(
                pb.GenerateResponse(
                    tokens=[65] * num_tokens,
                    finish_reason=pb.FINISH_REASON_LENGTH if is_last else 0,
                    logprobs=[about] * num_tokens if request.sampling.HasField("logprobs") else [],
                )
            )
            self.num_sent += 1


def ask_and_read_nothing(base_url, **fields):
    """Megabytes are asked for by a client that has room for next to nothing."""
    fields |= {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    body = json.dumps({"top_logprobs": 20, **fields}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((urlsplit(str(base_url)).hostname, urlsplit(str(base_url)).port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def is_connected(client):
    """Whether the gateway, in this process, has its end of the connection."""
    _, port = client.getsockname()
    connections = psutil.Process().net_connections("tcp")
    return any(one.raddr and one.raddr.port == port for one in connections)


@asynccontextmanager
async def running(run_gateway, rank):
    """A gateway that waits a second for its clients."""
    sizes = {"max_tokens": MANY_TOKENS, "context_length": 2 * MANY_TOKENS}
    async with (
        listening(rank) as address,
        run_gateway(workers=(address,), client_timeout_s=1.0, **sizes) as gateway,
    ):
        yield gateway


async def test_a_client_that_does_not_read_is_disconnected_and_delays_no_other(run_gateway):
    rank, served = ChattyRank(), 0
    async with running(run_gateway, rank) as gateway:
        url = gateway.client.base_url
        with closing(ask_and_read_nothing(url, max_tokens=MANY_TOKENS, stream=True)) as client:
            await asyncio.wait_for(rank.until(lambda: rank.num_open), BOUND_S)
            async with asyncio.timeout(BOUND_S):
                while is_connected(client):
                    async with gateway.stream(prompt=[7], max_tokens=5) as response:
                        assert tokens_of(await all_events(response)) == (65,) * 5
                    served += 1
            await asyncio.wait_for(rank.until(lambda: not rank.num_open), BOUND_S)
    assert served > 3
    # Unread output is not buffered: its rank was held back.
    assert (rank.num_sent - served) * TOKENS_A_MESSAGE < MANY_TOKENS / 2


async def test_a_client_that_does_not_read_a_whole_answer_is_disconnected(run_gateway):
    rank = ChattyRank()
    async with running(run_gateway, rank) as gateway:
        with closing(ask_and_read_nothing(gateway.client.base_url, max_tokens=4600)) as client:
            await asyncio.wait_for(rank.until(lambda: rank.num_open), BOUND_S)
            assert is_connected(client)
            async with asyncio.timeout(BOUND_S):
                while is_connected(client):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)


async def test_a_client_that_reads_too_slowly_ends_its_stream():
    """The system sees that it reads, but the next event waits for long."""

    async def send(_message):
        await asyncio.Event().wait()

    client = HttpClient({}, send, send, timeout_s=0.05)
    with pytest.raises(ClientGoneError, match=r"did not read for 0\.05 s"):
        await client.send_event("text")
