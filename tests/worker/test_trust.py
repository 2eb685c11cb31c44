"""A worker's port under certificates: peers of its pool and gateways, each where they belong."""

import grpc
import pytest

from equipoise.planning.moves import CheckpointSource, Move, RankSource
from equipoise.trust.credentials import Credentials
from equipoise.trust.guard import Guard
from equipoise.worker.errors import TransferError
from equipoise.worker.lifecycle import _RIGHTS
from equipoise.worker.transfer import ExpertTransferService
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc
from equipoise_model.experts import checksum
from tests.support.authority import Authority, write_token
from tests.support.worker_parts import join_epoch_of, puller_of

WORKER_NAME = "worker.of.the.fleet"
TOKEN = "token-of-the-gateway"


class Echo(worker_pb2_grpc.InferenceServicer):
    async def Generate(self, request, context):  # noqa: N802 - named by the contract
        await context.write(pb.GenerateResponse(tokens=request.prompt))


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "certificates")


@pytest.fixture
async def listen(rank_of_one):
    """Opens a worker's port with its guard; it holds all experts."""
    servers = []

    async def opened(tls, *, tokens=""):
        transfer = ExpertTransferService()
        transfer.open(rank_of_one()[1], epoch=1)
        guard = Guard(tls, tokens=tokens, rights=_RIGHTS, pool="blue")
        server = grpc.aio.server(interceptors=[guard])
        worker_pb2_grpc.add_ExpertTransferServicer_to_server(transfer, server)
        worker_pb2_grpc.add_InferenceServicer_to_server(Echo(), server)
        port = Credentials(tls).bind(server, "127.0.0.1:0")
        await server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield opened
    for server in servers:
        await server.stop(None)


@pytest.fixture
def pull(rank_of_one, checkpoint):
    """Pulls an expert from the worker at an address; gives bytes that came from there."""
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


async def generate(address, credentials):
    async with credentials.worker_channel(address) as channel:
        call = worker_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(prompt=[1, 2]), metadata=credentials.metadata()
        )
        return [token async for response in call for token in response.tokens]


async def test_a_peer_of_the_pool_pulls_although_the_address_is_in_no_certificate(
    authority, listen, pull
):
    address = await listen(authority.issue("worker/blue/w-1", hosts=(WORKER_NAME,)))
    own = authority.issue("worker/blue/w-0", hosts=(WORKER_NAME,))
    assert await pull(address, Credentials(own, worker_name=WORKER_NAME)) > 0


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ("worker/red/w-0", "worker/red/w-0 at ipv4:127.0.0.1"),
        ("gateway", "may not call ExpertTransfer: allowed roles are worker"),
        ("admin/ann", "may not call ExpertTransfer"),
    ],
)
async def test_others_get_no_expert_and_the_checkpoint_has_it(
    authority, listen, pull, caplog, who, words
):
    address = await listen(authority.issue("worker/blue/w-1"))
    assert await pull(address, Credentials(authority.issue(who))) == 0
    assert "PERMISSION_DENIED" in caplog.text
    assert words in caplog.text


async def test_a_peer_with_a_certificate_of_another_authority_is_told_of_in_words(
    authority, listen, pull, caplog, tmp_path
):
    stranger = Authority(tmp_path / "stranger")
    address = await listen(stranger.issue("worker/blue/w-1"))
    assert await pull(address, Credentials(authority.issue("worker/blue/w-0"))) == 0
    assert "its certificate is not signed by this process's tls_ca" in caplog.text


async def test_gateways_have_tokens_made_and_workers_do_not(authority, listen):
    address = await listen(authority.issue("worker/blue/w-1"))
    assert await generate(address, Credentials(authority.issue("gateway"))) == [1, 2]
    with pytest.raises(grpc.aio.AioRpcError, match="may not call Inference: allowed roles"):
        await generate(address, Credentials(authority.issue("worker/blue/w-0")))


async def test_a_token_does_where_there_is_no_certificate(listen, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"gateway {TOKEN}\n")
    address = await listen(Credentials().tls, tokens=str(tokens))
    shown = Credentials(token_file=write_token(tmp_path, "gateway", TOKEN))
    assert await generate(address, shown) == [1, 2]
    with pytest.raises(grpc.aio.AioRpcError, match="this port requires a token"):
        await generate(address, Credentials())


async def test_experts_are_not_asked_of_other_machines_in_plain_text(rank_of_one):
    puller = puller_of(*rank_of_one(), join_epoch_of("w:1", "10.9.8.7:1"))
    with pytest.raises(TransferError, match="is on another machine: add --tls-ca"):
        puller._dial("10.9.8.7:1")
