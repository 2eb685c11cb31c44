"""The balancer's port under certificates and tokens: who gets in, where to, and as whom."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from equipoise.balancer.service import worker_link
from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.policy.book import PolicyBook
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise.trust.settings import Tls
from equipoise.trust.tokens import BALANCER, worker_audience
from equipoise.wire.convert import to_balancer
from equipoise.wire.messages import Heartbeat
from equipoise.wire.seal import seal
from equipoise_api.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    worker_link_pb2,
    worker_link_pb2_grpc,
)
from tests.support.authority import Authority, write_key, write_keys
from tests.support.balancer_links import POLICY, WAIT_S, opened
from tests.support.balancers import serving

BEAT = Heartbeat(epoch=0, generation=0, staged_generation=0, sequence=7)

IDENTITIES = (
    "worker/tiny/worker-0",
    "worker/tiny/worker-1",
    "gateway",
    "reader",
    "admin/ann",
)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "certificates")


@pytest.fixture
def accepted(tmp_path):
    return write_keys(tmp_path / "keys", *IDENTITIES)[1]


def showing(tmp_path, who, *, tls=None):
    """Credentials with the signing key of an identity."""
    return Credentials(tls, signing_key=str(tmp_path / "keys" / f"{who.replace('/', '-')}.pem"))


async def ask(address, credentials, *, what="status"):
    """The code and words with which a service answers; OK for an answer of its own."""
    while True:
        code, words = await _ask_once(address, credentials, what)
        # A client whose write crosses the end of the stream hears this of its own library.
        if code is not grpc.StatusCode.INTERNAL:
            return code, words


async def _ask_once(address, credentials, what):
    async with credentials.balancer_channel(address) as channel:
        metadata = credentials.metadata(audience=BALANCER)
        try:
            async with asyncio.timeout(WAIT_S):
                await _CALLS[what](channel, metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                # It was let in, and there is no pool.
                return grpc.StatusCode.OK, ""
            return error.code(), credentials.explain(error.details())
    return grpc.StatusCode.OK, ""


async def _link(channel, metadata):
    call = worker_link_pb2_grpc.WorkerLinkStub(channel).Connect(metadata=metadata)
    await call.write(seal(worker_link_pb2.ConnectRequest(heartbeat=worker_link_pb2.Heartbeat())))
    answer = await call.read()
    if answer is grpc.aio.EOF:
        raise AssertionError("the stream ended without a word")
    assert "Hello" in answer.rejection.reason


async def _reflect(channel, metadata):
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    await stub.ServerReflectionInfo(iter([asked]), metadata=metadata).read()


_CALLS = {
    "link": _link,
    "status": lambda channel, metadata: status_pb2_grpc.StatusStub(channel).ListPools(
        status_pb2.ListPoolsRequest(), metadata=metadata
    ),
    "admin": lambda channel, metadata: admin_pb2_grpc.AdminStub(channel).Pause(
        admin_pb2.PauseRequest(), metadata=metadata
    ),
    "reflection": _reflect,
    "health": lambda channel, metadata: health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(), metadata=metadata
    ),
}


MATRIX = {
    "worker/tiny/worker-0": {"link", "reflection", "health"},
    "gateway": {"status", "reflection", "health"},
    "reader": {"status", "reflection", "health"},
    "admin/ann": {"status", "admin", "reflection", "health"},
}


async def expect_rights(address, who, credentials):
    for what in _CALLS:
        code, words = await ask(address, credentials, what=what)
        if what in MATRIX[who]:
            assert code is grpc.StatusCode.OK, (who, what, words)
        else:
            assert code is grpc.StatusCode.PERMISSION_DENIED, (who, what)
            assert who in words
            assert "may not call" in words


async def test_each_role_gets_where_it_belongs_by_its_token(tmp_path, accepted):
    async with opened(tmp_path, accepted_keys=accepted) as address:
        for who in MATRIX:
            await expect_rights(address, who, showing(tmp_path, who))


async def test_each_role_gets_where_it_belongs_by_its_certificate(tmp_path, authority):
    async with opened(tmp_path, tls=authority.issue("balancer")) as address:
        for who in MATRIX:
            await expect_rights(address, who, Credentials(authority.issue(who)))


async def test_a_certificates_uri_names_the_role(tmp_path, authority):
    tls = authority.issue("pod-7", uri="spiffe://cluster.local/equipoise/admin/ann")
    async with opened(tmp_path, tls=authority.issue("balancer")) as address:
        await expect_rights(address, "admin/ann", Credentials(tls))


async def test_a_missing_token_is_an_error_that_names_the_option(tmp_path, accepted):
    async with opened(tmp_path, accepted_keys=accepted) as address:
        for what in sorted(set(_CALLS) - {"health"}):
            code, words = await ask(address, Credentials(), what=what)
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert words == "this port requires a token: set --signing-key or EQUIPOISE_SIGNING_KEY"


async def test_a_malformed_request_is_an_invalid_argument_of_who_may_call(tmp_path, accepted):
    expected = {
        ("admin/ann", "/equipoise_api.v1.Admin/Pause"): grpc.StatusCode.INVALID_ARGUMENT,
        ("reader", "/equipoise_api.v1.Admin/Pause"): grpc.StatusCode.PERMISSION_DENIED,
        ("reader", "/equipoise_api.v1.Status/GetStatus"): grpc.StatusCode.INVALID_ARGUMENT,
        ("reader", "/grpc.health.v1.Health/Check"): grpc.StatusCode.INVALID_ARGUMENT,
    }
    async with opened(tmp_path, accepted_keys=accepted) as address:
        for (who, method), code in expected.items():
            credentials = showing(tmp_path, who)
            metadata = credentials.metadata(audience=BALANCER)
            async with credentials.balancer_channel(address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(method)(b"\xff\xff", metadata=metadata)
            assert caught.value.code() is code, caught.value.details()
            if code is grpc.StatusCode.INVALID_ARGUMENT:
                assert "the request is malformed: " in caught.value.details()


async def test_a_wrong_token_is_unauthenticated(tmp_path, accepted):
    wrong = Credentials(signing_key=write_key(tmp_path, "wrong")[0])
    async with opened(tmp_path, accepted_keys=accepted) as address:
        code, words = await ask(address, wrong)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "the token is rejected: its key is not accepted" in words


async def test_a_token_that_a_rank_captured_is_rejected(tmp_path, accepted):
    captured = showing(tmp_path, "gateway").metadata(audience=worker_audience("tiny", "worker-0"))
    async with (
        opened(tmp_path, accepted_keys=accepted) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _CALLS["status"](channel, captured)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "it is for worker/tiny/worker-0, but this is balancer" in caught.value.details()


async def test_tokens_are_taken_up_and_withdrawn_while_the_port_is_open(tmp_path, accepted):
    async with opened(tmp_path, accepted_keys=accepted) as address:
        reader = showing(tmp_path, "reader")
        assert (await ask(address, reader))[0] is grpc.StatusCode.OK
        new_key, line = write_key(tmp_path, "admin/ann")
        accepted.write_text(line)
        assert (await ask(address, reader))[0] is grpc.StatusCode.UNAUTHENTICATED
        ann = Credentials(signing_key=new_key)
        assert (await ask(address, ann, what="admin"))[0] is grpc.StatusCode.OK


async def test_faults_of_certificates_have_clear_errors(tmp_path, authority):
    stranger = Authority(tmp_path / "stranger")
    mine = authority.issue("reader")
    not_mine = Tls(tls_ca=str(stranger.ca_file))
    async with opened(tmp_path, tls=authority.issue("balancer")) as address:
        for credentials, expected in (
            (Credentials(not_mine), "its certificate is not signed by this process's tls_ca"),
            (Credentials(Tls(tls_ca=mine.tls_ca)), "it may require a certificate"),
            (Credentials(), "it may require TLS: set tls_ca here"),
            (Credentials(authority.issue("nobody")), "names no role"),
        ):
            code, words = await ask(address, credentials)
            assert code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED}
            assert expected in words, words


async def test_a_foreign_certificate_is_rejected(tmp_path, authority):
    theirs = Authority(tmp_path / "stranger").issue("admin")
    # He trusts our authority, whose certificate is no secret.
    credentials = Credentials(theirs)
    credentials._certificates = replace(
        credentials._certificates, ca=authority.ca_file.read_bytes()
    )
    async with opened(tmp_path, tls=authority.issue("balancer")) as address:
        code, words = await ask(address, credentials, what="admin")
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "it may not trust the authority of this process's tls_cert" in words


async def test_tls_to_a_plain_text_port_is_a_clear_error(tmp_path, authority):
    async with opened(tmp_path) as address:
        _, words = await ask(address, Credentials(authority.issue("reader")))
    assert "it uses plain text but this process uses TLS" in words


async def test_a_host_that_is_not_in_the_certificate_is_rejected(tmp_path, authority):
    tls = authority.issue("balancer", hosts=("elsewhere.example",))
    async with opened(tmp_path, tls=tls) as address:
        code, words = await ask(address, Credentials(authority.issue("reader")))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "does not have the expected name of its role" in words


async def test_a_renewed_certificate_serves_from_the_next_connection_on(tmp_path, authority):
    reader = Credentials(authority.issue("reader"))
    async with (
        opened(tmp_path, tls=authority.issue("balancer")) as address,
        reader.balancer_channel(address) as held,
    ):
        assert (await ask(address, reader))[0] is grpc.StatusCode.OK
        await _CALLS["status"](held, reader.metadata(audience=BALANCER))
        authority.issue("balancer", hosts=("elsewhere.example",))
        assert (await ask(address, reader))[0] is grpc.StatusCode.UNAVAILABLE
        # Connections stay: a renewed certificate restarts nothing.
        await _CALLS["status"](held, reader.metadata(audience=BALANCER))
        authority.issue("balancer")
        assert (await ask(address, reader))[0] is grpc.StatusCode.OK


async def test_with_both_a_certificate_and_a_token_both_must_allow(tmp_path, authority, accepted):
    tls = authority.issue("balancer")
    async with opened(tmp_path, tls=tls, accepted_keys=accepted) as address:
        for certificate, token, code in (
            ("admin/ann", "admin/ann", grpc.StatusCode.OK),
            ("reader", "admin/ann", grpc.StatusCode.PERMISSION_DENIED),
            ("admin/ann", "reader", grpc.StatusCode.PERMISSION_DENIED),
            # A certificate of the fleet that names no role leaves it to the token.
            ("pod-7", "admin/ann", grpc.StatusCode.OK),
        ):
            shown = showing(tmp_path, token, tls=authority.issue(certificate))
            assert (await ask(address, shown, what="admin"))[0] is code, (certificate, token)
        no_token = Credentials(authority.issue("admin/ann"))
        assert (await ask(address, no_token))[0] is grpc.StatusCode.UNAUTHENTICATED
        no_certificate = showing(tmp_path, "admin/ann", tls=Tls(tls_ca=tls.tls_ca))
        assert (await ask(address, no_certificate))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_port_for_other_machines_is_not_opened_in_plain_text(tmp_path):
    store = SqliteStore(tmp_path / "state.sqlite")
    with pytest.raises(TrustError, match="other machines can reach"):
        async with serving(
            store,
            credentials=Credentials(),
            listen="0.0.0.0:0",
            policies=PolicyBook(POLICY),
            drain_timeout_s=1.0,
        ):
            pass
    await store.close()


@asynccontextmanager
async def hello_answered(address, credentials, hello):
    """The first answer to a Hello."""
    async with credentials.balancer_channel(address) as channel:
        call = worker_link_pb2_grpc.WorkerLinkStub(channel).Connect(
            metadata=credentials.metadata(audience=BALANCER)
        )
        await call.write(to_balancer(hello))
        reading = asyncio.create_task(call.read())
        yield call, reading
        reading.cancel()
        call.cancel()


async def test_the_message_of_another_worker_is_not_converted(
    tmp_path, accepted, hello_of, monkeypatch
):
    """Its conversion may cost a tenth of a second, and callers may send many at once."""
    converted = []
    monkeypatch.setattr(worker_link, "from_worker", lambda message, **of: converted.append(message))
    async with opened(tmp_path, accepted_keys=accepted) as address:
        shown = showing(tmp_path, "worker/tiny/worker-0")
        async with hello_answered(address, shown, hello_of("worker-1")) as (_, reading):
            answer = await asyncio.wait_for(reading, WAIT_S)
    assert "may not speak for worker" in answer.rejection.reason
    assert not converted


async def test_a_worker_speaks_for_its_own_pool_and_name_only(tmp_path, accepted, hello_of):
    async with opened(tmp_path, accepted_keys=accepted) as address:
        shown = showing(tmp_path, "worker/tiny/worker-0")
        for hello in (hello_of("worker-1"), hello_of("worker-0", pool="other")):
            async with hello_answered(address, shown, hello) as (_, reading):
                answer = await asyncio.wait_for(reading, WAIT_S)
            assert answer.rejection.fatal
            assert "worker/tiny/worker-0 at" in answer.rejection.reason
            assert "may not speak for worker" in answer.rejection.reason
        reader = showing(tmp_path, "reader")
        async with (
            hello_answered(address, shown, hello_of("worker-0")),
            reader.balancer_channel(address) as channel,
        ):
            status = status_pb2_grpc.StatusStub(channel)
            pools = await until_known(status, reader.metadata(audience=BALANCER))
    assert pools == ["tiny"], "no other caller created a pool"


async def test_a_worker_with_an_identity_of_its_own_may_restart_before_its_stream_ends(
    tmp_path, accepted, hello_of
):
    hello = hello_of("worker-0", num_ranks=4)
    shown = showing(tmp_path, "worker/tiny/worker-0")
    async with (
        opened(tmp_path, accepted_keys=accepted) as address,
        hello_answered(address, shown, hello) as (call, reading),
    ):
        await call.write(to_balancer(BEAT))
        assert (await asyncio.wait_for(reading, WAIT_S)).heartbeat_ack.sequence == 7
        restarted = replace(hello, boot_id="the next")
        async with hello_answered(address, shown, restarted) as (newer, later):
            await newer.write(to_balancer(BEAT))
            assert (await asyncio.wait_for(later, WAIT_S)).heartbeat_ack.sequence == 7
            assert await asyncio.wait_for(call.read(), WAIT_S) is grpc.aio.EOF


async def until_known(status, metadata):
    """Names of the pools, once there is one."""
    async with asyncio.timeout(WAIT_S):
        while True:
            listed = await status.ListPools(status_pb2.ListPoolsRequest(), metadata=metadata)
            if listed.pools:
                return [pool.pool for pool in listed.pools]
            await asyncio.sleep(0.01)


async def test_requests_are_recorded_under_the_callers_name(tmp_path, accepted, hello_of):
    worker, ann = showing(tmp_path, "worker/tiny/worker-0"), showing(tmp_path, "admin/ann")
    async with (
        opened(tmp_path, accepted_keys=accepted) as address,
        hello_answered(address, worker, hello_of("worker-0")),
        ann.balancer_channel(address) as channel,
    ):
        metadata = ann.metadata(audience=BALANCER)
        await until_known(status_pb2_grpc.StatusStub(channel), metadata)
        admin = admin_pb2_grpc.AdminStub(channel)
        await admin.Pause(admin_pb2.PauseRequest(), metadata=metadata)
        listed = await admin.ListAudit(admin_pb2.ListAuditRequest(), metadata=metadata)
    (entry,) = listed.entries
    assert entry.who.startswith("admin/ann at ipv4:127.0.0.1:")


def is_heard_by(channel):
    """Whether a client without an event loop hears a balancer."""
    with channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=WAIT_S
            )
        except grpc.RpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE
    return True


@pytest.mark.parametrize("who", ["worker/tiny/worker-0", "gateway", "reader", "admin/ann"])
async def test_no_other_role_can_serve_as_a_balancer(tmp_path, authority, who):
    reader = Credentials(authority.issue("pod-9", uri="spiffe://cluster.local/equipoise/reader"))
    async with opened(tmp_path, tls=authority.issue(who)) as address:
        code, words = await ask(address, reader)
        assert not await asyncio.to_thread(is_heard_by, reader.blocking_channel(address))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "its certificate does not have the expected name of its role" in words


async def test_balancers_are_verified_by_their_common_name_whatever_was_dialled(
    tmp_path, authority
):
    tls = authority.issue("balancer", hosts=("balancer.of.the.fleet",))
    reader = authority.issue("reader")
    async with opened(tmp_path, tls=tls) as address:
        named = Credentials(reader, balancer_name="balancer.of.the.fleet")
        assert await asyncio.to_thread(is_heard_by, named.blocking_channel(address))
        async with named.balancer_channel(address) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=WAIT_S
            )
        for name in ("another.of.the.fleet", "127.0.0.1"):
            wrong = Credentials(reader, balancer_name=name)
            assert not await asyncio.to_thread(is_heard_by, wrong.blocking_channel(address))
