"""Messages queued for a worker: bounded, in order, the newest of each kind."""

import asyncio

import pytest

from equipoise.balancer.mailbox import Mailbox
from equipoise.wire.balancer_messages import Abort, HeartbeatAck, Rejection


def abort(generation):
    return Abort(epoch=1, generation=generation, reason="")


async def all_of(mailbox):
    return [message async for message in mailbox.messages()]


async def test_messages_leave_in_the_order_in_which_they_came():
    mailbox = Mailbox()
    sent = [abort(1), HeartbeatAck(sequence=1), Rejection(reason="x", fatal=False)]
    for message in sent:
        mailbox.post(message)
    mailbox.close()
    assert await all_of(mailbox) == sent


async def test_a_newer_message_of_a_kind_replaces_the_older_and_queues_behind_the_others():
    mailbox = Mailbox()
    mailbox.post(abort(1))
    mailbox.post(HeartbeatAck(sequence=1))
    mailbox.post(abort(2))
    mailbox.close()
    assert await all_of(mailbox) == [HeartbeatAck(sequence=1), abort(2)]


async def test_a_worker_that_does_not_read_costs_one_message_a_kind():
    mailbox = Mailbox()
    for number in range(10_000):
        mailbox.post(HeartbeatAck(sequence=number))
    mailbox.close()
    assert await all_of(mailbox) == [HeartbeatAck(sequence=9_999)]


async def test_a_reader_that_waits_is_woken_by_a_message_and_by_closing():
    mailbox = Mailbox()
    reader = asyncio.create_task(all_of(mailbox))
    await asyncio.sleep(0)
    mailbox.post(abort(1))
    await asyncio.sleep(0)
    mailbox.close()
    assert await asyncio.wait_for(reader, 60) == [abort(1)]


@pytest.mark.parametrize("read_first", [True, False])
async def test_nothing_enters_a_closed_box(read_first):
    mailbox = Mailbox()
    mailbox.close()
    if read_first:
        assert await all_of(mailbox) == []
    mailbox.post(abort(1))
    assert await all_of(mailbox) == []
