"""No value of any field of the HTTP APIs or the workers' gRPC stops a live rank from serving.

The rank is a real engine of the tiny checkpoint in this process, behind real gRPC and HTTP.
"""

import asyncio
import json
import os
import random
import re
from collections import Counter
from contextlib import asynccontextmanager

import grpc
import httpx2
import psutil
import pytest
import pytest_asyncio

from equipoise.formats.packaged import packaged_checkpoint
from equipoise.gateway import openai_requests as requests
from equipoise.gateway.responses_form import REPEATED_FIELDS
from equipoise.gateway.server import serve
from equipoise.gateway.settings import GatewaySettings
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc
from tests.support.live_rank import live_rank
from tests.support.random_bodies import random_body

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 60.0
CONTEXT_LENGTH = 64
PROMPT = tuple(b"def f(")

# Raw JSON, because much of it is more than a JSON library would write.
VALUES = (
    *(
        "null",
        "true",
        "false",
        '""',
        '"a"',
        '"1"',
        r'"\ud800"',
        r'"\u0000"',
        '"' + 2000 * "é" + '"',
    ),
    *("0", "-0.0", "1", "-1", "2", "0.5", "0.009", "1e-300", "1e-38", "5e-324"),
    *("1e38", "1e39", "1e308", "1e400", "-1e308", "NaN", "Infinity", "-Infinity"),
    *(str(2**31), str(2**32), str(2**63), str(-(2**63)), str(2**64), "9" * 400, "9" * 5000),
    *("[]", "[[]]", "[[[[1]]]]", "[1, -1]", "[1, 1e308]", "[null]", '["a", "b"]', r'["\ud800"]'),
    *('{"5": 1e-300, "6": 1e39}', '{"5": -100, "271": 100}', '{"messages": 1}'),
    *('{"type": "json_object"}', '{"json": {"type": "array"}}', '{"regex": "a{1,9}{1,9}"}'),
    *('{"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 7}}}', '"[a-"'),
    *('{"grammar": "start: start"}', '{"choice": ["a", 1]}', '"start: (/a/{1000}){1000}"'),
    *("{}", '{"a": {}}', '{"a": NaN}', '{"a": 1e999}', r'{"\udfff": "\udfff"}'),
    *('{"type": "text"}', '{"include_usage": 7}', 500 * "[" + 500 * "]"),
)
MESSAGE = '{"role": "user", "content": "def f("}'
# Other fields of the other two APIs are read by the same code as those of chats. These are too,
# but a completion counts or answers them in another form.
ANSWERED_OTHERWISE = {
    *("max_tokens", "logprobs", "prompt_logprobs", "n", "stop", "stream", "stream_options"),
    "return_token_ids",
}
PATHS = {
    "/v1/completions": (
        '"prompt": "def f(", "max_tokens": 2',
        (requests._OF_COMPLETIONS | {*requests._COMPLETIONS_UNSUPPORTED}) - requests._OF_CHATS
        | ANSWERED_OTHERWISE,
    ),
    "/v1/chat/completions": (
        f'"messages": [{MESSAGE}], "max_tokens": 2',
        requests._OF_CHATS | {*requests._CHATS_UNSUPPORTED},
    ),
    "/v1/responses": (
        '"input": "def f(", "max_output_tokens": 2',
        (requests._OF_RESPONSES | {*requests._RESPONSES_UNSUPPORTED}) - requests._OF_CHATS
        # An answer repeats these.
        | REPEATED_FIELDS,
    ),
}
FIELDS = [
    (path, field) for path, (_, fields) in PATHS.items() for field in [*sorted(fields), r"\ud800"]
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address():
    async with live_rank(context_length=CONTEXT_LENGTH) as address:
        yield address


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(address):
    """A client of a gateway in front of the rank."""
    stop, listening = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = GatewaySettings(
        listen="127.0.0.1:0",
        workers=(address,),
        checkpoint=packaged_checkpoint(),
    )
    task = asyncio.create_task(serve(settings, stop=stop, listening=listening.set_result))
    base_url = f"http://{await asyncio.wait_for(listening, BOUND_S)}"
    async with httpx2.AsyncClient(base_url=base_url, timeout=BOUND_S) as client:
        # Until the rank has reported it, chats without max_tokens are told to try again later.
        async with asyncio.timeout(BOUND_S):
            while not (await served_model(client))["max_model_len"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield client
    stop.set()
    await asyncio.wait_for(task, BOUND_S)


async def served_model(client):
    (model,) = (await client.get("/v1/models")).json()["data"]
    return model


async def check_serves(client):
    body = {"prompt": list(PROMPT), "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"][0]["token_ids"]) == 4


async def post(client, path, fields):
    """Status and text of the answer; in HTTP/1.0, because a library takes longer than the gateway.

    Its end is the end of the connection.
    """
    begin, _ = PATHS[path]
    body = ("{" + ", ".join([begin, *fields]) + "}").encode()
    head = f"POST {path} HTTP/1.0\r\nContent-Type: application/json\r\n"
    async with asyncio.timeout(BOUND_S):
        url = client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    head, _, text = answer.decode().partition("\r\n\r\n")
    status = int(head.split()[1])
    assert status in {200, 400, 404}, (status, body, text)
    if status != 200:
        assert json.loads(text)["error"]["message"]
    elif "content-type: text/event-stream" in head:
        last = text.rstrip().rpartition("\n\n")[2]
        end = "event: response." if path == "/v1/responses" else "data: [DONE]"
        assert last.startswith(end), (body, text)
    return status, text


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty"])
@pytest.mark.parametrize("value", ["1e-300", "1e-38", "5e-324", "1e-46"])
async def test_a_value_that_underflows_in_float32_does_not_end_the_rank(client, field, value):
    status, text = await post(client, "/v1/completions", [f'"{field}": {value}'])
    # Tiny temperatures are raised to the lowest one; there is no such penalty.
    assert status == (200 if field == "temperature" else 400)
    if status == 400:
        error = json.loads(text)["error"]
        assert error["param"] == field
        assert "must be a number from 0.01 to 100" in error["message"]
    await check_serves(client)


@pytest.mark.parametrize(("path", "field"), FIELDS)
async def test_no_value_of_a_field_ends_the_rank_or_the_gateway(client, path, field):
    # Every other one is streamed.
    bodies = [
        [f'"{field}": {value}', *(['"stream": true', '"temperature": 2'] * (number % 2))]
        for number, value in enumerate(VALUES, start=len(field))
    ]
    for first in range(0, len(bodies), 16):
        await asyncio.gather(*(post(client, path, body) for body in bodies[first : first + 16]))
    await check_serves(client)


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/responses", "metadata"), ("/v1/completions", "temperature")]
)
async def test_no_depth_of_nesting_is_an_internal_error(client, path, field):
    """What can just be read may be too deep to be written, in an answer or in an error."""
    for depth in (255, 256, *range(900, 1001, 2)):
        for begin, end in (("[", "]"), ('{"a":', "}")):
            value = begin * depth + ("1" if end == "}" else "") + end * depth
            status, text = await post(client, path, [f'"{field}": {value}'])
            is_repeated = depth == 255 and field == "metadata"
            assert status == (200 if is_repeated else 400)
            assert depth == 255 or "256 levels" in text or "not valid JSON" in text


@pytest.mark.parametrize("field", ["role", "content", "name", "refusal", "reasoning_content"])
async def test_no_value_in_a_message_ends_the_rank_or_the_gateway(client, field):
    bodies = [
        [f'"messages": [{{"role": "user", "content": "a", "{field}": {value}}}]']
        for value in VALUES
    ] + [[f'"messages": [{value}, {MESSAGE}]'] for value in VALUES]
    await asyncio.gather(*(post(client, "/v1/chat/completions", body) for body in bodies))
    await check_serves(client)


NUM_BODIES = int(os.environ.get("EQUIPOISE_FUZZ_BODIES", "500"))
"""`make fuzz` sends a million."""
NUM_SENDERS = 8
GROWTH_MIB = 48


async def test_no_random_body_ends_the_rank_or_the_gateway_and_memory_stays_flat(client):
    """Every answer is whole: a success, a fault of the client's, or a queue that is full."""
    seed = int(os.environ.get("EQUIPOISE_FUZZ_SEED", "0"))
    dice, counts, sizes = random.Random(seed), Counter(), []
    bodies = (random_body(dice) for _ in range(NUM_BODIES))

    async def send():
        async with connected(client.base_url) as post:
            for path, body in bodies:
                status, text = await post(path, body)
                counts[status] += 1
                check_answer(status, text, sent=(path, body))
                if sum(counts.values()) in (NUM_BODIES // 4, NUM_BODIES):
                    sizes.append(psutil.Process().memory_info().rss / 2**20)

    await asyncio.gather(*(send() for _ in range(NUM_SENDERS)))
    await check_serves(client)
    began, ended = sizes
    print(f"{NUM_BODIES} bodies: {dict(counts)}; {began:.0f} MiB after a quarter, {ended:.0f} then")
    assert sum(counts.values()) == NUM_BODIES
    assert counts[200] > NUM_BODIES / 10
    assert counts[400] > NUM_BODIES / 10
    assert ended < began + GROWTH_MIB


def check_answer(status, text, *, sent):
    assert status in {200, 400, 404, 429, 503}, (status, sent, text)
    if status == 200:
        assert "internal error" not in text, (sent, text)
        return
    error = json.loads(text)["error"]
    assert error["message"], sent
    assert status != 503 or error["code"] in {"queue_full", "queue_timeout"}, (sent, text)


@asynccontextmanager
async def connected(url):
    """Post over one kept connection; gives a function for it. A library takes longer than that."""
    reader, writer = await asyncio.open_connection(url.host, url.port)

    async def post_kept(path, body):
        """Status and text of the answer."""
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        async with asyncio.timeout(BOUND_S):
            writer.write(head.encode() + body)
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            data = b""
            if "transfer-encoding: chunked" in head:
                while size := int(await reader.readuntil(b"\r\n"), 16):
                    data += (await reader.readexactly(size + 2))[:-2]
                await reader.readexactly(2)
            else:
                (size,) = re.findall(r"content-length: (\d+)", head)
                data = await reader.readexactly(int(size))
        return int(head.split()[1]), data.decode()

    try:
        yield post_kept
    finally:
        writer.close()
        await writer.wait_closed()


FLOATS = [0.0, -0.0, 1.0, 5e-324, 1e-300, 1e-38, 0.01, 1e38, 1e308, float("nan"), float("inf")]
WORKER_FIELDS = [
    (field.name, value)
    for field in pb.Sampling.DESCRIPTOR.fields
    for value in (
        [*FLOATS, *(-value for value in FLOATS)]
        if field.type == field.TYPE_DOUBLE
        else [0, 1, 20, 21, 2**32 - 1]
    )
]


async def test_no_sampling_value_over_grpc_ends_the_rank(address):
    async with grpc.aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.InferenceStub(channel)
        for name, value in WORKER_FIELDS:
            sampling = pb.Sampling(**{"temperature": 1.0, name: value})
            call = stub.Generate(
                pb.GenerateRequest(prompt=PROMPT, max_tokens=2, sampling=sampling), timeout=BOUND_S
            )
            tokens, rejection = await tokens_or_rejection(call)
            if rejection is None:
                assert len(tokens) == 2, (name, value)
                continue
            assert rejection.code() is grpc.StatusCode.INVALID_ARGUMENT, (name, value, rejection)
            assert f"sampling.{name} = " in rejection.details()
            assert "it must be" in rejection.details()


async def tokens_or_rejection(call):
    try:
        return [token async for response in call for token in response.tokens], None
    except grpc.aio.AioRpcError as error:
        return None, error
