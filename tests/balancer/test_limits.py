"""Every message of every role at its limits, at a real balancer with two pools.

The messages come from the contract's descriptors. A twentieth of them here; `make fuzz` sends all:
EQUIPOISE_LIMITS_SHARE is the share, EQUIPOISE_FUZZ_SEED says which.
"""

import asyncio
import logging
import os
import random
from collections import Counter

import grpc
import pytest

from equipoise.balancer.service import worker_link
from equipoise.wire.balancer_messages import HeartbeatAck
from equipoise.wire.checks import MAX_COUNT
from equipoise.wire.convert import to_balancer
from equipoise.wire.messages import GroupLost, LayoutRejected, Leaving, Staged
from equipoise.wire.seal import seal
from equipoise_api.v1 import worker_link_pb2 as pb
from tests.support.limit_fleet import METHODS, WAIT_S, base_of, limit_fleet
from tests.support.limits import field_names, variants
from tests.support.scripted_worker import ScriptedWorker, make_hello

SHARE = float(os.environ.get("EQUIPOISE_LIMITS_SHARE", "0.05"))
SEED = int(os.environ.get("EQUIPOISE_FUZZ_SEED", "1"))
AT_ONCE = 8
A_STREAM = 60
"""Messages after which all ranks of the pool begin again."""

pytestmark = pytest.mark.timeout(7200)


@pytest.fixture
async def fleet(tmp_path):
    async with limit_fleet(tmp_path) as fleet:
        yield fleet


def chosen(named, *, share=None):
    """The share of the variants that is played; never none."""
    named = list(named)
    count = max(1, round(len(named) * (SHARE if share is None else share)))
    return random.Random(SEED).sample(named, min(count, len(named)))


def no_errors(caplog):
    return [
        record.getMessage()[:500] for record in caplog.records if record.levelno >= logging.ERROR
    ] == []


async def at_once(coroutines):
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(coroutine):
        async with turns:
            return await coroutine

    return Counter(await asyncio.gather(*map(one, coroutines)))


@pytest.mark.parametrize("who", ["worker/a/*", "gateway", "reader"])
async def test_who_may_only_read_changes_nothing(fleet, caplog, who):
    before = [await fleet.state("a"), await fleet.state("b"), await fleet.shared_state()]
    for method in METHODS:
        if who == "gateway" and method.containing_service.name == "GatewayLink":
            continue
        requests = [
            request for _, request in chosen([("", base_of(method)), *variants(base_of(method))])
        ]
        codes = await at_once(fleet.call(who, method, request) for request in requests)
        is_reader = who != "worker/a/*" and method.containing_service.name == "Status"
        if not is_reader:
            assert set(codes) == {grpc.StatusCode.PERMISSION_DENIED}, method.full_name
    after = [await fleet.state("a"), await fleet.state("b"), await fleet.shared_state()]
    assert after == before
    assert no_errors(caplog)


async def test_a_gateway_changes_only_its_count(fleet, caplog):
    before = [await fleet.state("a"), await fleet.state("b"), await fleet.shared_state()]
    (method,) = [one for one in METHODS if one.containing_service.name == "GatewayLink"]
    for _, request in chosen(variants(base_of(method)), share=1):
        await fleet.call("gateway", method, request)
    after = [await fleet.state("a"), await fleet.state("b"), await fleet.shared_state()]
    assert int(after[0]["status"].pop("poisonRequests")) > 0
    assert after == before
    assert no_errors(caplog)


async def test_a_gateway_that_starts_without_end_leaves_all_pools_readable(fleet, caplog):
    """Each process counts from zero; `pool/test_reported_sums.py` has what ranks add up."""
    (method,) = [one for one in METHODS if one.containing_service.name == "GatewayLink"]
    reports = [
        method.input_type._concrete_class(
            pool="b", boot_id=f"gateway-{number}", poison_requests=MAX_COUNT
        )
        for number in range(2**64 // MAX_COUNT + 2)
    ]
    codes = await at_once(fleet.call("gateway", method, report) for report in reports)
    assert set(codes) == {grpc.StatusCode.OK}
    assert int((await fleet.state("b"))["status"]["poisonRequests"]) == MAX_COUNT
    assert (await fleet.state("a"))["status"]["pool"] == "a"
    assert (await fleet.shared_state())["pools"] == ["a", "b"]
    assert no_errors(caplog)


async def test_an_operator_changes_only_the_pool_that_is_named(fleet, caplog):
    before = [await fleet.state("b"), await fleet.shared_state()]
    audited = (await fleet.state("a"))["audit"]
    for method in METHODS:
        for name, request in chosen(variants(base_of(method)), share=4 * SHARE):
            if method.name == "RebalanceAll" and not request.pools:
                continue  # It means all pools.
            await fleet.call("admin/ann", method, request)
            assert [await fleet.state("b"), await fleet.shared_state()] == before, name
    assert (await fleet.state("a"))["audit"] != audited, "some were carried out"
    assert no_errors(caplog)


@pytest.mark.parametrize("who", ["gateway", "reader", "admin/ann"])
async def test_only_workers_open_a_link(fleet, who):
    before = [await fleet.state("a"), await fleet.state("b"), await fleet.shared_state()]
    answers = {await fleet.hello(who, message) for _, message in chosen(hellos())}
    assert "denied" in answers
    assert answers <= {"denied", "crossed", "too large"}
    after = [await fleet.state("a"), await fleet.state("b"), await fleet.shared_state()]
    assert after == before


def hellos():
    """First messages of every kind; some claim to be of another pool or worker."""
    hello = to_balancer(make_hello("a-9", pool="a"))
    yield from variants(hello)
    for pool, worker in (("b", "b-0"), ("b", "new"), ("c", "c-0"), ("a/b", "b-0"), ("*", "*")):
        yield f"{pool}/{worker}", to_balancer(make_hello(worker, pool=pool))


async def test_no_first_message_of_a_worker_moves_another_pool(fleet, caplog):
    before = [await fleet.state("b"), await fleet.shared_state()]
    answers = Counter()
    for name, message in chosen(hellos(), share=2 * SHARE):
        answers[await fleet.hello("worker/a/*", message)] += 1
        assert [await fleet.state("b"), await fleet.shared_state()] == before, name
    assert answers["rejection"] > 10
    rejected = [record for record in caplog.records if "rejected (hello_" in record.getMessage()]
    assert len(rejected) < 150, "who retries does not flood the log"
    assert no_errors(caplog)


async def test_a_link_that_believes_every_name_would_be_noticed(fleet, monkeypatch):
    monkeypatch.setattr(worker_link, "_check_identity", lambda caller, hello: None)
    before = [await fleet.state("b"), await fleet.shared_state()]
    for worker, pool in (("new", "b"), ("c-0", "c")):
        await fleet.hello("worker/a/*", to_balancer(make_hello(worker, pool=pool)))
        now = [await fleet.state("b"), await fleet.shared_state()]
        assert now != before
        before = now


def said_by(link):
    """A valid message of every kind that the rank of `link` could send; at least an empty one."""
    worker = link.worker
    place = {"epoch": worker.epoch, "rank": worker.rank}
    generation = worker.layout.generation + 1
    held = worker.own(worker.layout.expert_of_slot)
    answer = {"peer_bytes": 0, "checkpoint_bytes": 0, "duration_us": 1}
    known = [
        to_balancer(value)
        for value in (
            worker.reconnecting(),
            worker.serving(),
            worker.report(),
            worker.heartbeat(),
            Staged(**place, generation=generation, **answer),
            LayoutRejected(**place, generation=generation, reason="it differs"),
            GroupLost(epoch=worker.epoch, reason="a rank died", expert_of_slot=held),
            Leaving(reason="enough"),
        )
    ]
    covered = {message.WhichOneof("message") for message in known}
    return known + [
        pb.ConnectRequest(**{field.name: field.message_type._concrete_class()})
        for field in pb.ConnectRequest.DESCRIPTOR.oneofs_by_name["message"].fields
        if field.name not in covered
    ]


def messages_of(link):
    """Variants of the message of each kind, by kind; fields of other kinds are left alone."""
    for message in said_by(link):
        kind = message.WhichOneof("message")
        for name, changed in variants(getattr(message, kind)):
            yield f"{kind}.{name}", seal(pb.ConnectRequest(**{kind: changed}))


async def send(link, message):
    """Whether the stream goes on after `message`."""
    try:
        await link.call.write(message)
        await link.send(link.worker.heartbeat(sequence=7))
        async with asyncio.timeout(WAIT_S):
            while not isinstance(value := await link.receive(), HeartbeatAck):
                if value is None:
                    return False
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        return False
    return True


async def test_no_message_of_a_rank_moves_another_pool(fleet, caplog):
    before = [await fleet.state("b"), await fleet.shared_state()]
    outcomes = Counter()
    names = [name for name, _ in messages_of((await fleet.serve("a"))[0])]
    todo = random.Random(SEED).sample(names, round(len(names) * min(1.0, 2 * SHARE)))
    while todo:
        links = await fleet.serve("a")
        for link in links[:3]:
            messages = dict(messages_of(link))
            for _ in range(min(len(todo), A_STREAM // 3)):
                name = todo.pop()
                if name not in messages:
                    continue  # A number next to one that has changed since.
                goes_on = await send(link, messages[name])
                outcomes[goes_on] += 1
                assert [await fleet.state("b"), await fleet.shared_state()] == before, name
                if not goes_on:
                    break
    assert outcomes[True] > 10
    assert no_errors(caplog)


def test_every_field_of_every_message_has_variants():
    link = type("Seat", (), {"worker": ScriptedWorker(make_hello())})()
    for method in METHODS:
        base = base_of(method)
        covered = {name.partition("=")[0] for name, _ in variants(base)}
        assert covered == field_names(base.DESCRIPTOR), method.full_name
    covered = {name.partition("=")[0] for name, _ in variants(to_balancer(link.worker.hello))}
    assert covered == field_names(pb.ConnectRequest.DESCRIPTOR)
