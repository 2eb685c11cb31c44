"""Every request to a worker at its limits, by every role; the contract's descriptors name them."""

import asyncio
import logging
import os
import random
from collections import Counter

import grpc
import pytest

from equipoise.rank import transfer
from equipoise.rank.transfer import ExpertTransferService
from equipoise.rank.waits import Waits
from equipoise.trust.credentials import Credentials
from equipoise.trust.guard import Guard
from equipoise.trust.settings import Tls
from equipoise.trust.tokens import worker_audience
from equipoise.wire.messages import Wait
from equipoise.worker.latents.puller import LatentPuller
from equipoise.worker.latents.service import LatentTransferService
from equipoise.worker.latents.store import LatentStore
from equipoise.worker.lifecycle import _RIGHTS
from equipoise.worker.scheduler import Scheduler
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc
from tests.support.authority import write_keys
from tests.support.limits import assert_one_line, field_names, variants
from tests.support.lone_engine import lone_engine
from tests.support.worker_parts import inference_of

SHARE = float(os.environ.get("EQUIPOISE_LIMITS_SHARE", "0.25"))
SEED = int(os.environ.get("EQUIPOISE_FUZZ_SEED", "1"))
WAIT_S = 60.0
AUDIENCE = worker_audience("blue", "worker-0")
IDENTITIES = ("worker/blue/worker-1", "worker/red/worker-0", "gateway", "reader", "admin/ann")
BASES = {
    "ExpertTransfer.Fetch": pb.FetchRequest(epoch=1, layer=1, expert=2),
    "Inference.Generate": pb.GenerateRequest(request_id="one", prompt=[3, 1, 4], max_tokens=2),
    "Inference.GetLimits": pb.GetLimitsRequest(),
    "LatentTransfer.Fetch": pb.LatentTransferFetchRequest(
        form="v1/small", boot_id="boot-1", hold=1, keys=[bytes(16)]
    ),
    "LatentTransfer.Release": pb.LatentTransferReleaseRequest(boot_id="boot-1", hold=1),
}
METHODS = {
    f"{service.name}.{method.name}": method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
PEER = "worker/blue/worker-1"
ALLOWED = {
    "ExpertTransfer.Fetch": (PEER,),
    "Inference.Generate": ("gateway",),
    "Inference.GetLimits": ("gateway",),
    "LatentTransfer.Fetch": (PEER,),
    "LatentTransfer.Release": (PEER, "gateway"),
}

pytestmark = pytest.mark.timeout(7200)


@pytest.fixture
async def call(rank_of_one, tmp_path):
    """Calls a real worker's services, which step a real engine, as an identity."""
    core, held = rank_of_one()
    keys, accepted = write_keys(tmp_path, *IDENTITIES)
    credentials = {who: Credentials(signing_key=key) for who, key in keys.items()}
    experts = ExpertTransferService()
    experts.open(held, epoch=1)
    store = LatentStore(cache=core.cache, form="v1/small", boot_id="boot-1")
    waits = Waits({Wait.LATENTS: 1.0})
    puller = LatentPuller(
        store, peer_pools=("pool",), credentials=Credentials(), waits=waits, timeout_s=0.1
    )
    service = inference_of(latents=puller)
    loop = asyncio.get_running_loop()
    engine = lone_engine(
        core,
        held,
        lambda result: loop.call_soon_threadsafe(service.deliver, result),
        scheduler=Scheduler(
            blocks=core.block_pool(), max_requests=2, max_queued=1, max_step_tokens=8
        ),
    )
    service.open(engine)
    stepping = asyncio.create_task(asyncio.to_thread(engine.run))
    guard = Guard(
        Tls(), accepted_keys=str(accepted), audience=AUDIENCE, rights=_RIGHTS, pool="blue"
    )
    server = grpc.aio.server(interceptors=[guard])
    worker_pb2_grpc.add_ExpertTransferServicer_to_server(experts, server)
    worker_pb2_grpc.add_InferenceServicer_to_server(service, server)
    latents = LatentTransferService(store, visit=service.visit)
    worker_pb2_grpc.add_LatentTransferServicer_to_server(latents, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def called(who, method, request):
        stream = channel.unary_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=method.input_type._concrete_class.SerializeToString,
            response_deserializer=method.output_type._concrete_class.FromString,
        )(request, timeout=WAIT_S, metadata=credentials[who].metadata(audience=AUDIENCE))
        try:
            return grpc.StatusCode.OK, [response async for response in stream]
        except grpc.aio.AioRpcError as error:
            assert_one_line(error.details())
            return error.code(), []

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield called
        engine.leave()
        await asyncio.wait_for(stepping, WAIT_S)
        await server.stop(None)


def chosen(name):
    named = list(variants(BASES[name]))
    return random.Random(SEED).sample(named, round(len(named) * SHARE))


@pytest.mark.parametrize("name", METHODS)
async def test_no_request_at_its_limits_breaks_a_rank(call, caplog, monkeypatch, name):
    monkeypatch.setattr(transfer, "_EPOCH_WAIT_S", 0.01)
    method, codes = METHODS[name], Counter()
    _, expected = await call(ALLOWED[name][0], method, BASES[name])
    for what, request in chosen(name):
        code, _ = await call(ALLOWED[name][0], method, request)
        codes[code] += 1
        assert code not in {
            *(grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL),
            *(grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE),
        }, what
    code, answer = await call(ALLOWED[name][0], method, BASES[name])
    assert code is grpc.StatusCode.OK
    assert plain(answer) == plain(expected)
    # Any hold that does not exist has ended.
    assert len(codes) > 1 or not chosen(name) or name == "LatentTransfer.Release"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def plain(answer):
    """Limits, tokens or bytes; not the steps, which go on."""
    if not answer or isinstance(answer[0], pb.GetLimitsResponse | pb.LatentTransferReleaseResponse):
        return answer
    if answer and isinstance(answer[0], pb.FetchResponse):
        return b"".join(one.data for one in answer)
    return [token for one in answer for token in one.tokens]


@pytest.mark.parametrize("who", IDENTITIES)
async def test_no_other_identity_is_let_in_whatever_it_sends(call, who):
    for name, method in METHODS.items():
        if who not in ALLOWED[name]:
            requests = [BASES[name], *(request for _, request in chosen(name)[:8])]
            codes = {(await call(who, method, request))[0] for request in requests}
            assert codes == {grpc.StatusCode.PERMISSION_DENIED}, name


def test_every_field_of_every_request_has_variants():
    assert set(BASES) == set(METHODS), "a new method needs a valid request"
    for name, base in BASES.items():
        covered = {what.partition("=")[0] for what, _ in variants(base)}
        assert covered == field_names(METHODS[name].input_type)
