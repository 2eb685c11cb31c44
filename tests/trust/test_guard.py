"""What callers without an identity can hold of a guarded port: nothing."""

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from equipoise.telemetry.health import HealthChecks
from equipoise.trust import guard
from equipoise.trust.credentials import Credentials
from equipoise.trust.guard import ANYBODY, Guard
from equipoise.trust.identity import Role
from equipoise.trust.settings import Tls
from equipoise_api.v1 import worker_pb2_grpc
from tests.support.authority import write_keys

INFERENCE = "equipoise_api.v1.Inference"


class Limits(worker_pb2_grpc.InferenceServicer):
    async def GetLimits(self, request, context):  # noqa: N802 - named by the contract
        raise AssertionError("no request arrived")


@pytest.fixture
async def dial(tmp_path):
    """Opens a channel to a port that requires tokens, and the metadata of a gateway."""
    keys, accepted = write_keys(tmp_path, "gateway")
    guarded = Guard(
        Tls(insecure=True),
        accepted_keys=str(accepted),
        audience="port",
        rights={INFERENCE: frozenset({Role.GATEWAY}), health.SERVICE_NAME: ANYBODY},
    )
    server = grpc.aio.server(interceptors=[guarded])
    worker_pb2_grpc.add_InferenceServicer_to_server(Limits(), server)
    checks = HealthChecks()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    port = Credentials(Tls(insecure=True)).bind(server, "127.0.0.1:0")
    await server.start()
    credentials = Credentials(signing_key=keys["gateway"])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel, credentials.metadata(audience="port")
    await server.stop(None)


def half_open(channel, method, metadata=()):
    """A call that has no message yet, and may get one at any time."""
    return channel.stream_stream(f"/{method}")(metadata=metadata, timeout=60)


async def test_a_caller_without_identity_is_rejected_before_it_sends_its_request(dial):
    channel, _ = dial
    call = half_open(channel, f"{INFERENCE}/GetLimits")
    assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_request_of_a_call_must_follow_soon(dial, monkeypatch):
    monkeypatch.setattr(guard, "REQUEST_TIMEOUT_S", 0.1)
    channel, metadata = dial
    for method in (f"{INFERENCE}/GetLimits", f"{health.SERVICE_NAME}/Check"):
        call = half_open(channel, method, metadata)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_call_without_a_request_is_malformed(dial):
    channel, metadata = dial
    call = half_open(channel, f"{INFERENCE}/GetLimits", metadata)
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await call.details() == "the request is malformed: there is none"


async def test_health_is_checked_and_not_watched(dial):
    channel, _ = dial
    stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
    answer = await stub.Check(request, timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(request, timeout=60)
    assert await watch.code() is grpc.StatusCode.UNIMPLEMENTED
