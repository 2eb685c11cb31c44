"""Workers' streams at the real server: what it accepts, rejects and survives."""

import asyncio
from dataclasses import replace
from functools import partial

import grpc
import numpy as np
import pytest

from equipoise.balancer.message_limit import MessageLimit
from equipoise.balancer.service import worker_link
from equipoise.wire.balancer_messages import HeartbeatAck, JoinEpoch, Rejection
from equipoise.wire.convert import to_balancer
from equipoise.wire.seal import seal
from equipoise_api.v1 import status_pb2, worker_link_pb2, worker_link_pb2_grpc
from tests.support.balancer_links import WAIT_S, is_serving, linked, served, until


@pytest.mark.parametrize(
    ("kind", "changes", "theirs", "ours"),
    [
        ("hello_slots", {"slots_per_rank": 11}, "11", "10"),
        ("hello_kernels", {"kernels": "torch", "backends": ("model=torch",)}, "torch", "triton"),
    ],
)
async def test_a_worker_that_differs_is_rejected_and_the_pool_continues(
    channel, status, harness, worker_of, hello_of, kind, changes, theirs, ours
):
    for worker in harness.workers.values():
        worker.hello = replace(worker.hello, backends=("gemm=triton|reference",))
    async with served(channel, harness):
        await until(status, is_serving)
        stray = worker_of(hello_of("stray", **changes))
        async with linked(channel, [stray]) as (link,):
            rejection = await link.receive()
            assert rejection.fatal
            assert theirs in rejection.reason
            assert ours in rejection.reason
            assert await link.receive() is None
        pool = await until(status, lambda pool: pool.rejections)
        assert [(each.kind, each.count) for each in pool.rejections] == [(kind, 1)]
        assert is_serving(pool)


async def test_a_bad_report_is_answered_and_counted_and_the_stream_lives_on(
    channel, status, harness
):
    async with served(channel, harness) as links:
        await until(status, is_serving)
        link = links[2]
        report = link.worker.report()
        counters = np.ones((7, 10), dtype=np.uint64)
        await link.send(replace(report, load=replace(report.load, assignments=counters)))
        rejection = await link.receive_until(Rejection)
        assert not rejection.fatal
        assert link.worker.hello.worker in rejection.reason
        await link.send(link.worker.heartbeat(sequence=5))
        assert (await link.receive_until(HeartbeatAck)).sequence == 5
        pool = await until(status, lambda pool: pool.rejections)
        assert is_serving(pool)


async def test_a_heartbeat_that_goes_with_a_report_is_answered_whatever_the_report_is_worth(
    channel, status, harness
):
    async with served(channel, harness) as links:
        await until(status, is_serving)
        link = links[1]
        good = link.worker.report()
        await link.send(replace(good, heartbeat=link.worker.heartbeat(sequence=7)))
        assert (await link.receive_until(HeartbeatAck)).sequence == 7
        of_another = replace(good.load, rank=good.load.rank + 1)
        beat = link.worker.heartbeat(sequence=8)
        await link.send(replace(good, load=of_another, heartbeat=beat))
        assert (await link.receive_until(HeartbeatAck)).sequence == 8
        assert "its rank is" in (await link.receive_until(Rejection)).reason


async def test_a_stream_that_does_not_begin_with_hello_is_closed_with_the_reason(channel):
    stream = worker_link_pb2_grpc.WorkerLinkStub(channel).Connect()
    await stream.write(seal(worker_link_pb2.ConnectRequest(heartbeat=worker_link_pb2.Heartbeat())))
    answer = await asyncio.wait_for(stream.read(), WAIT_S)
    assert "must be Hello" in answer.rejection.reason
    assert not answer.rejection.fatal, "a Hello was lost; the next one may arrive"
    assert await asyncio.wait_for(stream.read(), WAIT_S) is grpc.aio.EOF


async def test_a_broken_stream_is_noticed_and_its_worker_comes_back(channel, status, harness):
    async with served(channel, harness) as links:
        await until(status, is_serving)
        links[1].call.cancel()
        pool = await until(status, lambda pool: not is_serving(pool))
        assert pool.ranks[1].state == "gone"
        assert "rank 1" in pool.health_reason
        returned = links[1].worker
        returned.hello, first = returned.reconnecting(), returned.hello
        async with linked(channel, [returned]) as (link,):
            returned.hello = first
            await link.receive_until(JoinEpoch)
            assert (await until(status, is_serving)).epoch == 1


async def test_a_newer_stream_of_a_worker_ends_the_older(channel, status, harness):
    async with served(channel, harness) as links:
        await until(status, is_serving)
        older = links[0]
        older.worker.hello, first = older.worker.reconnecting(), older.worker.hello
        async with linked(channel, [older.worker]) as (newer,):
            older.worker.hello = first
            await newer.receive_until(JoinEpoch)
            assert await older.receive() is None
            await until(status, is_serving)


async def test_another_process_cannot_take_the_name_of_a_live_worker(
    channel, status, harness, worker_of
):
    async with served(channel, harness) as links:
        await until(status, is_serving)
        live = links[0]
        other = worker_of(replace(live.worker.hello, boot_id="of another process"))
        async with linked(channel, [other]) as (imposter,):
            rejection = await imposter.receive()
            assert isinstance(rejection, Rejection)
            assert not rejection.fatal, "it may be a restart whose old stream is not closed yet"
            assert f"worker {live.worker.hello.worker} is connected" in rejection.reason
        await live.send(live.worker.heartbeat(sequence=7))
        assert isinstance(first := await live.receive(), HeartbeatAck), "the live one hears nothing"
        assert first.sequence == 7
        pool = await until(status, lambda pool: pool.rejections)
        assert [each.kind for each in pool.rejections] == ["hello_name_taken"]
        assert is_serving(pool)
        live.call.cancel()
        await until(status, lambda pool: not is_serving(pool))
        async with linked(channel, [other]) as (restarted,):
            await until(status, lambda pool: "gone" not in {rank.state for rank in pool.ranks})
            assert not restarted.call.done()


async def test_a_worker_that_floods_is_slowed_and_one_that_exaggerates_is_rejected(
    channel, status, worker_of, hello_of, monkeypatch
):
    few = partial(MessageLimit, per_s=0.01, burst=10.0)
    monkeypatch.setattr(worker_link, "message_limit", lambda _policy: few())
    async with linked(channel, [worker_of(hello_of("worker-0"))]) as (link,):
        huge = worker_link_pb2.Leaving(reason="x" * 2_000_000)
        await link.call.write(seal(worker_link_pb2.ConnectRequest(leaving=huge)))
        beat = to_balancer(link.worker.heartbeat(sequence=1))
        for _ in range(20):
            await link.call.write(beat)
        kinds = await until_rejected(status, {"link_rate", "link_size"})
        assert not link.call.done(), "the stream lives on"
    assert "messages per second" in kinds["link_rate"].latest
    assert "at most" in kinds["link_size"].latest


async def test_bytes_that_are_not_a_message_end_the_stream_and_are_counted(
    channel, status, hello_of
):
    connect = channel.stream_stream("/equipoise_api.v1.WorkerLink/Connect")
    answer = worker_link_pb2.ConnectResponse.FromString
    stranger = connect()
    await stranger.write(b"\xff\xff")
    rejection = answer(await stranger.read()).rejection
    assert "2 bytes do not have the digest" in rejection.reason
    assert not rejection.fatal, "the next try may be whole"
    worker = connect()
    await worker.write(to_balancer(hello_of("worker-0")).SerializeToString())
    await worker.write(b"\xff\xff")
    async with asyncio.timeout(WAIT_S):
        while await worker.read() is not grpc.aio.EOF:
            pass
    kinds = await until_rejected(status, {"link_bytes"})
    assert "2 bytes do not have the digest" in kinds["link_bytes"].latest


async def test_a_worker_of_another_release_reads_both_versions_and_the_remedy(
    channel, status, hello_of
):
    old = to_balancer(hello_of("worker-0"))
    old.ClearField("digest")
    old.hello.protocol_version = 2
    stream = channel.stream_stream("/equipoise_api.v1.WorkerLink/Connect")()
    await stream.write(old.SerializeToString())
    rejection = worker_link_pb2.ConnectResponse.FromString(await stream.read()).rejection
    assert rejection.fatal
    assert rejection.reason == (
        "hello: the worker uses protocol version 2, the balancer 3: run the same release on both "
        "sides"
    )
    assert await stream.read() is grpc.aio.EOF


def with_a_byte_changed(message, part):
    """The bytes of a message in which one byte of `part` is another; they still parse."""
    sent = message.SerializeToString()
    assert sent.count(part) == 1
    at = sent.index(part)
    damaged = sent[:at] + bytes([sent[at] ^ 1]) + sent[at + 1 :]
    assert worker_link_pb2.ConnectRequest.FromString(damaged) != message
    return damaged


async def test_a_table_that_was_damaged_in_transit_does_not_quarantine_its_sender(
    channel, status, harness
):
    async with served(channel, harness) as links:
        await until(status, is_serving)
        links[0].call.cancel()
        rank_0 = links[0].worker
        rank_0.hello, first = rank_0.reconnecting(), rank_0.hello
        connect = channel.stream_stream("/equipoise_api.v1.WorkerLink/Connect")
        stream = connect()
        await stream.write(to_balancer(rank_0.hello).SerializeToString())
        rank_0.hello = first
        table = rank_0.expert_checksums().tobytes()
        serving = to_balancer(rank_0.serving())
        await stream.write(with_a_byte_changed(serving, table))
        async with asyncio.timeout(WAIT_S):
            while await stream.read() is not grpc.aio.EOF:
                pass
        kinds = await until_rejected(status, {"link_bytes"})
        assert "do not have the digest" in kinds["link_bytes"].latest
        pool = await until(status, lambda _: True)
        assert not pool.quarantined


@pytest.mark.parametrize("field", ["experts_digest", "checkpoint_fingerprint"])
async def test_a_hello_that_was_damaged_in_transit_is_not_another_checkpoint(
    channel, status, harness, worker_of, hello_of, field
):
    newcomer = worker_of(hello_of("worker-9")).hello
    part = getattr(newcomer, field)
    part = part.encode() if isinstance(part, str) else part
    async with served(channel, harness):
        await until(status, is_serving)
        stream = channel.stream_stream("/equipoise_api.v1.WorkerLink/Connect")()
        await stream.write(with_a_byte_changed(to_balancer(newcomer), part))
        answer = worker_link_pb2.ConnectResponse.FromString(await stream.read())
        assert not answer.rejection.fatal, "the next try may be whole"
        assert "do not have the digest" in answer.rejection.reason
        pool = await until(status, lambda _: True)
        assert not pool.quarantined


async def until_rejected(status, kinds):
    """The pool's rejections by kind, once all of these are among them."""
    async with asyncio.timeout(WAIT_S):
        while True:
            answer = await status.GetStatus(status_pb2.GetStatusRequest())
            found = {rejection.kind: rejection for rejection in answer.status.rejections}
            if kinds <= set(found):
                return found
            await asyncio.sleep(0.01)
