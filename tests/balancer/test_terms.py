"""What a worker reports about terms moves no term: not its own pool's leader, and no other pool."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.policy.book import PolicyBook
from equipoise.trust.credentials import Credentials
from equipoise.trust.tokens import BALANCER
from equipoise.wire.balancer_messages import JoinEpoch, Rejection
from equipoise.wire.checks import MAX_TERM
from equipoise.wire.convert import from_balancer, to_balancer
from equipoise.wire.seal import seal
from equipoise_api.v1 import status_pb2, status_pb2_grpc, worker_link_pb2, worker_link_pb2_grpc
from tests.support.authority import write_keys
from tests.support.balancer_links import POLICY, WAIT_S
from tests.support.balancers import serving

MINE, OTHER, READER = "worker/tiny/worker-0", "worker/other/worker-0", "reader"


class Fleet:
    """A balancer with tokens, and a worker of the pool `tiny` that it serves."""

    def __init__(self, keys, store, address, hello) -> None:
        self.keys, self.store, self.address = keys, store, address
        self.hello = hello
        self.stream = None

    @asynccontextmanager
    async def stub(self, who, kind=worker_link_pb2_grpc.WorkerLinkStub):
        """A stub with tokens of `who`; without a name it shows none."""
        key = str(self.keys / f"{who.replace('/', '-')}.pem") if who else ""
        credentials = Credentials(signing_key=key)
        async with credentials.balancer_channel(self.address) as channel:
            yield kind(channel), credentials.metadata(audience=BALANCER)

    async def answers(self, who, hello, *, until=JoinEpoch, **changes):
        """What a stream answers to a Hello, up to a JoinEpoch or its end; None for its end."""
        async with self.stub(who) as (stub, metadata):
            message = to_balancer(hello)
            for name, value in changes.items():
                setattr(message.hello, name, value)
            call = stub.Connect(metadata=metadata)
            await call.write(seal(message))
            found = []
            while not found or not isinstance(found[-1], until):
                answer = await asyncio.wait_for(call.read(), WAIT_S)
                if answer is grpc.aio.EOF:
                    break
                found.append(from_balancer(answer, hello=hello))
            call.cancel()
            return found

    async def pools(self):
        async with self.stub(READER, status_pb2_grpc.StatusStub) as (stub, metadata):
            listed = await stub.ListPools(status_pb2.ListPoolsRequest(), metadata=metadata)
            return [pool.pool for pool in listed.pools]

    async def rejections(self):
        async with self.stub(READER, status_pb2_grpc.StatusStub) as (stub, metadata):
            answer = await stub.GetStatus(
                status_pb2.GetStatusRequest(pool="tiny"), metadata=metadata
            )
            return [rejection.kind for rejection in answer.status.rejections]

    async def check_undisturbed(self):
        """The first term continues, in the store and on the stream of the pool `tiny`."""
        assert await self.store.highest_term() == 1
        beat = seal(worker_link_pb2.ConnectRequest(heartbeat=worker_link_pb2.Heartbeat(sequence=9)))
        await self.stream.write(beat)
        async with asyncio.timeout(WAIT_S):
            while (answer := await self.stream.read()).heartbeat_ack.sequence != 9:
                assert answer is not grpc.aio.EOF, "the term has ended"
                assert not answer.HasField("rejection"), answer


@pytest.fixture
async def fleet(tmp_path, hello_of):
    keys = tmp_path / "keys"
    _, accepted = write_keys(keys, MINE, OTHER, READER)
    store = SqliteStore(tmp_path / "state.sqlite")
    arrangement = serving(
        store,
        listen="127.0.0.1:0",
        accepted_keys=str(accepted),
        policies=PolicyBook(POLICY),
        drain_timeout_s=1.0,
    )
    hello = hello_of("worker-0", num_ranks=1, slots_per_rank=32)
    async with arrangement as port:
        found = Fleet(keys, store, f"127.0.0.1:{port}", hello)
        async with found.stub(MINE) as (stub, metadata):
            found.stream = stub.Connect(metadata=metadata)
            await found.stream.write(to_balancer(hello))
            first = await asyncio.wait_for(found.stream.read(), WAIT_S)
            assert first.join_epoch.term == 1
            yield found
            found.stream.cancel()
    await store.close()


MAX_TRIES = 20
TERMS = [2, MAX_TERM, 2**31, 2**53, 2**63]


@pytest.mark.parametrize("term", TERMS)
async def test_a_worker_of_another_pool_changes_nothing(fleet, term):
    (answer,) = await fleet.answers(OTHER, fleet.hello, highest_term=term)
    assert answer.fatal
    assert not answer.not_leading
    await fleet.check_undisturbed()
    assert await fleet.rejections() == [], "not even a count, or a warning to the worker it named"


@pytest.mark.parametrize("term", TERMS)
async def test_a_caller_without_a_token_changes_nothing(fleet, term):
    codes = []
    # grpc.aio says INTERNAL if the call has ended before its first message is written.
    while not codes or (codes[-1] is grpc.StatusCode.INTERNAL and len(codes) < MAX_TRIES):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fleet.answers("", fleet.hello, highest_term=term)
        codes.append(caught.value.code())
    assert codes[-1] is grpc.StatusCode.UNAUTHENTICATED
    await fleet.check_undisturbed()


@pytest.mark.parametrize("term", [2, MAX_TERM])
async def test_a_worker_that_obeys_a_higher_term_joins_the_term_of_a_leader_with_a_lease(
    fleet, term
):
    hello = replace(fleet.hello, pool="other", highest_term=term)
    confirmed, join_epoch = await fleet.answers(OTHER, hello)
    assert (confirmed.term, confirmed.replaced_term) == (1, term)
    assert (join_epoch.term, join_epoch.epoch) == (1, 1)
    await fleet.check_undisturbed()


@pytest.mark.parametrize("term", [2**31, 2**53, 2**63])
async def test_a_term_that_no_leader_can_have_is_rejected_by_name(fleet, term):
    hello = replace(fleet.hello, pool="other")
    (answer,) = await fleet.answers(OTHER, hello, highest_term=term)
    assert answer.fatal
    assert answer.reason == f"hello: highest_term must be from 0 to 2147483647, not {term}"
    await fleet.check_undisturbed()
    assert await fleet.pools() == ["tiny"]


async def test_a_hundred_claims_of_the_next_term_end_none(fleet, caplog):
    hello = replace(fleet.hello, pool="other", highest_term=2)
    for _ in range(4):
        for answers in await asyncio.gather(*(fleet.answers(OTHER, hello) for _ in range(25))):
            # All have the same name, so a newer stream may end an older one.
            assert not any(isinstance(answer, Rejection) for answer in answers)
    await fleet.check_undisturbed()
    assert caplog.text.count("worker worker-0 obeys term 2") == 7, "the 1st, 2nd, 4th ... 64th"
