"""A worker's port with certificates: each identity may call only its own services."""

import grpc
import pytest

from equipoise.planning.moves import CheckpointSource, Move, RankSource
from equipoise.rank.transfer import ExpertTransferService
from equipoise.trust.credentials import Credentials
from equipoise.trust.guard import Guard
from equipoise.trust.tokens import BALANCER, worker_audience
from equipoise.worker.lifecycle import _LATENTS, _RIGHTS
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc
from equipoise_model.experts import checksum
from tests.support.authority import Authority, write_keys
from tests.support.worker_parts import join_epoch_of, puller_of

WORKER_NAME = "worker.of.the.fleet"
AUDIENCE = worker_audience("blue", "worker-1")


class Echo(worker_pb2_grpc.InferenceServicer):
    async def Generate(self, request, context):  # noqa: N802 - named by the contract
        await context.write(pb.GenerateResponse(tokens=request.prompt))


class NoLatents(worker_pb2_grpc.LatentTransferServicer):
    """Admits every call that the guard admits."""

    async def Fetch(self, request, context):  # noqa: N802
        yield pb.LatentTransferFetchResponse(index=7)

    async def Release(self, request, context):  # noqa: N802
        return pb.LatentTransferReleaseResponse()


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "certificates")


@pytest.fixture
async def listen(rank_of_one):
    """Opens the guarded port of a worker that holds all experts."""
    servers = []

    async def opened(tls, *, accepted_keys=""):
        guard = Guard(
            tls,
            accepted_keys=accepted_keys,
            audience=AUDIENCE,
            rights=_RIGHTS,
            pool="blue",
            peer_pools=("green",),
            for_peers=(_LATENTS,),
        )
        transfer = ExpertTransferService(caller=guard.caller)
        transfer.open(rank_of_one()[1], epoch=1)
        server = grpc.aio.server(interceptors=[guard])
        worker_pb2_grpc.add_ExpertTransferServicer_to_server(transfer, server)
        worker_pb2_grpc.add_InferenceServicer_to_server(Echo(), server)
        worker_pb2_grpc.add_LatentTransferServicer_to_server(NoLatents(), server)
        port = Credentials(tls).bind(server, "127.0.0.1:0")
        await server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield opened
    for server in servers:
        await server.stop(None)


@pytest.fixture
def pull(rank_of_one, checkpoint):
    """Pulls an expert; returns the number of bytes that came from the worker at an address."""
    core, held = rank_of_one()
    move = Move(
        layer=1,
        slot=3,
        expert=2,
        checksum=checksum(checkpoint.read_expert(1, 2)),
        sources=(RankSource(rank=1), CheckpointSource()),
    )

    async def pulled(address, credentials):
        join_epoch = join_epoch_of(address, address)
        puller = puller_of(core, held, join_epoch, credentials=credentials)
        try:
            return (await puller.pull([move])).peer_bytes
        finally:
            await puller.close()

    return pulled


async def generate(address, credentials, *, audience=AUDIENCE):
    async with credentials.worker_channel(address) as channel:
        call = worker_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(prompt=[1, 2]), metadata=credentials.metadata(audience=audience)
        )
        return [token async for response in call for token in response.tokens]


async def test_a_peer_of_the_pool_may_pull_without_its_address_in_a_certificate(
    authority, listen, pull
):
    address = await listen(authority.issue("worker/blue/w-1", hosts=(WORKER_NAME,)))
    own = authority.issue("worker/blue/w-0", hosts=(WORKER_NAME,))
    assert await pull(address, Credentials(own, worker_name=WORKER_NAME)) > 0


@pytest.mark.parametrize(
    ("who", "may_fetch", "may_release"),
    [
        ("worker/blue/w-0", True, True),
        ("worker/green/w-0", True, True),
        ("worker/red/w-0", False, False),
        ("gateway", False, True),
        ("reader", False, False),
        ("admin/ann", False, False),
    ],
)
async def test_only_workers_of_the_pool_and_its_peers_get_latents(
    authority, listen, who, may_fetch, may_release
):
    address = await listen(authority.issue("worker/blue/w-1", hosts=(WORKER_NAME,)))
    own = Credentials(authority.issue(who), worker_name=WORKER_NAME)
    async with own.worker_channel(address) as channel:
        stub = worker_pb2_grpc.LatentTransferStub(channel)

        async def fetch():
            return [part.index async for part in stub.Fetch(pb.LatentTransferFetchRequest())]

        for call, may in ((fetch, may_fetch), (release_with(stub), may_release)):
            if may:
                await call()
            else:
                with pytest.raises(grpc.aio.AioRpcError, match=who):
                    await call()


def release_with(stub):
    async def release():
        return await stub.Release(pb.LatentTransferReleaseRequest())

    return release


async def test_a_worker_of_a_peer_pool_gets_no_expert(authority, listen, pull):
    address = await listen(authority.issue("worker/blue/w-1", hosts=(WORKER_NAME,)))
    assert await pull(address, Credentials(authority.issue("worker/green/w-0"))) == 0


@pytest.mark.parametrize("who", ["balancer", "gateway", "reader"])
async def test_no_other_role_can_serve_as_a_worker(authority, listen, pull, caplog, who):
    address = await listen(authority.issue(who))
    assert await pull(address, Credentials(authority.issue("worker/blue/w-0"))) == 0
    assert "its certificate does not have the expected name of its role" in caplog.text


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ("worker/red/w-0", "worker/red/w-0 at ipv4:127.0.0.1"),
        ("gateway", "may not call ExpertTransfer: allowed roles are worker"),
        ("admin/ann", "may not call ExpertTransfer"),
    ],
)
async def test_other_identities_get_no_expert_and_the_checkpoint_serves_it(
    authority, listen, pull, caplog, who, words
):
    address = await listen(authority.issue("worker/blue/w-1"))
    assert await pull(address, Credentials(authority.issue(who))) == 0
    assert "PERMISSION_DENIED" in caplog.text
    assert words in caplog.text


async def test_a_peer_with_a_certificate_of_another_authority_is_explained(
    authority, listen, pull, caplog, tmp_path
):
    stranger = Authority(tmp_path / "stranger")
    address = await listen(stranger.issue("worker/blue/w-1"))
    assert await pull(address, Credentials(authority.issue("worker/blue/w-0"))) == 0
    assert "its certificate is not signed by this process's tls_ca" in caplog.text


async def test_gateways_may_generate_and_workers_may_not(authority, listen):
    address = await listen(authority.issue("worker/blue/w-1"))
    assert await generate(address, Credentials(authority.issue("gateway"))) == [1, 2]
    with pytest.raises(grpc.aio.AioRpcError, match="may not call Inference: allowed roles"):
        await generate(address, Credentials(authority.issue("worker/blue/w-0")))


async def test_a_token_for_this_worker_suffices_without_a_certificate(listen, tmp_path):
    keys, accepted = write_keys(tmp_path, "gateway")
    address = await listen(Credentials().tls, accepted_keys=str(accepted))
    assert await generate(address, Credentials(signing_key=keys["gateway"])) == [1, 2]
    with pytest.raises(grpc.aio.AioRpcError, match="this port requires a token"):
        await generate(address, Credentials())


async def test_a_peer_pulls_with_a_token_for_the_worker_that_it_names(listen, pull, tmp_path):
    keys, accepted = write_keys(tmp_path, "worker/blue/w-0")
    address = await listen(Credentials().tls, accepted_keys=str(accepted))
    assert await pull(address, Credentials(signing_key=keys["worker/blue/w-0"])) > 0


@pytest.mark.parametrize("audience", [BALANCER, worker_audience("blue", "worker-0")])
async def test_a_token_for_others_is_worthless_here(listen, tmp_path, audience):
    keys, accepted = write_keys(tmp_path, "gateway")
    address = await listen(Credentials().tls, accepted_keys=str(accepted))
    with pytest.raises(grpc.aio.AioRpcError, match=f"it is for {audience}, but this is worker/bl"):
        await generate(address, Credentials(signing_key=keys["gateway"]), audience=audience)


async def test_experts_are_not_fetched_from_other_machines_in_plain_text(pull, caplog):
    assert await pull("10.9.8.7:1", Credentials()) == 0
    assert "is on another machine: add --tls-ca" in caplog.text
