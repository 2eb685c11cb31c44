"""A whole worker in this process with a scripted balancer: from its start to its shutdown."""

import asyncio
import dataclasses
import gc
import logging
import threading
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from equipoise.planning.layout import contiguous_layout
from equipoise.planning.phase import Phase
from equipoise.rank.errors import GroupError, PeerLeftError, WorkerError
from equipoise.rank.held import HeldExperts
from equipoise.wire.balancer_messages import Rejection
from equipoise.wire.block_keys import keys_of
from equipoise.wire.messages import (
    GroupLost,
    LayoutRejected,
    Leaving,
    Report,
    Serving,
    Staged,
    Switched,
    Wait,
)
from equipoise.worker.core import ModelCore
from equipoise.worker.engine import Engine
from equipoise.worker.errors import RejectedError
from equipoise.worker.grammars import Grammars
from equipoise.worker.health import LIVE
from equipoise.worker.lifecycle import Worker, serve
from equipoise.worker.location import find_location
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc
from equipoise_kernels.plain.row_invariance import RowVarianceError
from equipoise_model.experts import checksum
from tests.support.small_models import SMALL as CONFIG

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


class Rig:
    def __init__(self, worker, stop, task):
        self.worker, self.stop, self.task = worker, stop, task


@asynccontextmanager
async def running(settings):
    stop = asyncio.Event()
    worker = Worker(settings, core=ModelCore.load(settings), location=await find_location(settings))
    task = asyncio.create_task(worker.run(stop))
    try:
        yield Rig(worker, stop, task)
    finally:
        stop.set()
        await asyncio.wait([task], timeout=60)
        assert task.done()


async def join(balancer, join_epoch, layout, **changes):
    link = await balancer.link()
    link.say(join_epoch([link.hello], layout, **changes))
    return link, await link.until(Serving)


async def generate(address, max_tokens=8, prompt=PROMPT):
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(prompt=prompt, max_tokens=max_tokens), timeout=60
        )
        return [token async for response in call for token in response.tokens]


async def health_of(address, service=""):
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=60
        )
        return answer.status


async def test_a_worker_introduces_itself_waits_for_its_rank_and_serves(
    balancer, settings, join_epoch, random_layout, solo, checkpoint, monkeypatch
):
    layout, loaded = random_layout(5), []
    monkeypatch.setattr(Grammars, "load", lambda _: loaded.append(True))
    async with running(settings(balancer=balancer.address, worker="w-7", pool="blue")) as rig:
        link = await balancer.link()
        hello = link.hello
        assert loaded == [True], "before it serves, because no step runs meanwhile"
        assert (hello.worker, hello.pool, hello.node) == ("w-7", "blue", "node-0")
        assert (hello.slots_per_rank, hello.num_ranks, hello.running) == (12, 1, None)
        assert hello.checkpoint_fingerprint == checkpoint.fingerprint
        assert (hello.kernels, hello.backends) == ("torch", ("model=torch",))
        latents = checkpoint.config.num_hidden_layers * checkpoint.config.latent_dim
        assert hello.cache_token_bytes == 4 * latents
        assert (hello.phase, hello.block_tokens) == (Phase.MIXED, 16)
        layers, width = checkpoint.config.num_hidden_layers, checkpoint.config.latent_dim
        form = f"{layers}x{width}:float32/16/invariant"
        assert hello.latent_form == f"v1/{checkpoint.fingerprint[:32]}/{form}"
        assert hello.model.expert_bytes == checkpoint.config.expert_bytes
        assert await health_of(hello.address) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health_of(hello.address, LIVE) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="no rank yet"):
            await generate(hello.address)
        assert rig.worker.runs == {}, "log lines have no rank yet"
        link.say(join_epoch([hello], layout))
        serving = await link.until(Serving)
        assert rig.worker.runs == {"rank": 0, "epoch": 1, "generation": 5}
        assert (serving.epoch, serving.rank, serving.generation) == (1, 0, 5)
        for layer, slot in np.ndindex(layout.expert_of_slot.shape):
            payload = checkpoint.read_expert(layer, int(layout.expert_of_slot[layer, slot]))
            assert serving.checksums[layer, slot].tobytes() == checksum(payload)
        assert await generate(rig.worker.address, 20) == solo(PROMPT, 20)
        assert await health_of(hello.address) == health_pb2.HealthCheckResponse.SERVING
        assert (await link.until_heartbeat(lambda beat: beat.epoch == 1)).generation == 5


async def test_loads_are_reported_for_this_generation_and_a_last_time_for_the_previous_one(
    balancer, settings, join_epoch, random_layout, stage_to
):
    first, second = random_layout(1), random_layout(2)
    async with running(settings(balancer=balancer.address)) as rig:
        link, _ = await join(balancer, join_epoch, first)
        await generate(rig.worker.address, 4)
        tokens = len(PROMPT) + 4 - 1
        report = await link.until(
            Report, lambda report: report.load.assignments.sum() == tokens * 2 * first.num_layers
        )
        assert (report.load.epoch, report.load.rank, report.load.generation) == (1, 0, 1)
        assert report.load.phase is Phase.MIXED
        assert report.load.boot_id == link.hello.boot_id
        assert report.stats.tokens_processed == tokens
        assert report.stats.tokens_generated == 4
        assert report.stats.steps >= 4

        link.say(stage_to(first, second))
        await link.until(Switched)
        await generate(rig.worker.address, 3)
        await link.until(Report, lambda report: report.load.generation == 2)
        # The final report precedes the first of the next generation, and is not sent forever.
        reports = link.of(Report)
        first_new = next(n for n, one in enumerate(reports) if one.load.generation == 2)
        old = reports[first_new - 1]
        assert old.load.generation == 1
        np.testing.assert_array_equal(old.load.assignments, report.load.assignments)


async def test_a_stage_leads_to_staged_and_switched_and_no_token_changes(
    balancer, settings, join_epoch, random_layout, stage_to, solo, checkpoint
):
    layouts = [random_layout(generation) for generation in range(1, 7)]
    async with running(settings(balancer=balancer.address)) as rig:
        link, _ = await join(balancer, join_epoch, layouts[0])
        generating = asyncio.create_task(generate(rig.worker.address, 80))
        for running_layout, layout in pairwise(layouts):
            link.say(stage_to(running_layout, layout))
            staged = await link.until(Staged, lambda said: said.generation == layout.generation)  # noqa: B023
            assert staged.checkpoint_bytes > 0
            switched = await link.until(
                Switched,
                lambda said: said.generation == layout.generation,  # noqa: B023
            )
            expert = int(layout.expert_of_slot[0, 3])
            expected = checksum(checkpoint.read_expert(0, expert))
            assert switched.checksums[0, 3].tobytes() == expected
        assert await generating == solo(PROMPT, 80)


async def test_a_switch_reports_what_the_slots_hold_and_not_what_was_ordered(
    balancer, settings, join_epoch, random_layout, stage_to, monkeypatch
):
    def miss(held, staged):
        """Switch, and leave one changed slot with the bytes of another expert."""
        before = held._slots[layer].read(slot)
        switch(held, staged)
        held._slots[layer].write(slot, before)

    first, second = random_layout(1), random_layout(2)
    layer, slot = np.argwhere(first.expert_of_slot != second.expert_of_slot)[0].tolist()
    switch = HeldExperts.switch
    async with running(settings(balancer=balancer.address, scrub_mib_per_s=0)) as rig:
        link, serving = await join(balancer, join_epoch, first)
        monkeypatch.setattr(HeldExperts, "switch", miss)
        link.say(stage_to(first, second))
        switched = await link.until(Switched)
        reported = switched.checksums[layer, slot].tobytes()
        assert reported == serving.checksums[layer, slot].tobytes()
        (move,) = [
            one for one in stage_to(first, second).moves if (one.layer, one.slot) == (layer, slot)
        ]
        assert reported != move.checksum
        assert rig.worker.hello().running.checksums[layer, slot].tobytes() == reported


async def test_a_heartbeat_during_a_switch_is_valid(
    balancer, settings, join_epoch, random_layout, stage_to, monkeypatch
):
    def switch_and_beat(held, staged):
        switch(held, staged)
        beats.append(rig.worker.heartbeat(1))
        states.append(rig.worker.rank.state())

    beats, states = [], []
    switch = HeldExperts.switch
    first, second = random_layout(1), random_layout(2)
    async with running(settings(balancer=balancer.address)) as rig:
        link, _ = await join(balancer, join_epoch, first)
        monkeypatch.setattr(HeldExperts, "switch", switch_and_beat)
        link.say(stage_to(first, second))
        await link.until(Switched)
    for state in (*beats, *states):
        assert (state.generation, state.staged_generation) == (2, 0)
    assert len(beats) == len(states) == 1


async def test_serving_continues_without_the_balancer_and_the_state_is_reported_on_reconnect(
    balancer, settings, join_epoch, random_layout, stage_to, solo
):
    first, second = random_layout(1), random_layout(2)
    async with running(settings(balancer=balancer.address)) as rig:
        link, _ = await join(balancer, join_epoch, first)
        link.say(stage_to(first, second))
        switched = await link.until(Switched)
        await balancer.stop()
        assert await generate(rig.worker.address, 20) == solo(PROMPT, 20)
        await balancer.start()
        link = await balancer.link()
        state = link.hello.running
        assert (state.epoch, state.rank, state.generation) == (1, 0, 2)
        assert state.staged_generation == 0
        assert state.layout.same_placement(second)
        np.testing.assert_array_equal(state.checksums, switched.checksums)
        link.say(join_epoch([link.hello], second))
        assert (await link.until(Serving)).generation == 2
        assert (await link.until(Switched)).step == switched.step
        assert await generate(rig.worker.address, 5) == solo(PROMPT, 5)


async def test_a_later_epoch_is_taken_up_and_open_requests_continue(
    balancer, settings, join_epoch, random_layout, solo
):
    async with running(settings(balancer=balancer.address)) as rig:
        link, _ = await join(balancer, join_epoch, random_layout(1))
        generating = asyncio.create_task(generate(rig.worker.address, 80))
        for epoch in (2, 3, 4):
            link.say(join_epoch([link.hello], random_layout(epoch), epoch=epoch))
            serving = await link.until(Serving, lambda said: said.epoch == epoch)  # noqa: B023
            expert = int(random_layout(epoch).expert_of_slot[0, 3])
            expected = checksum(rig.worker.rank.held.read(layer=0, expert=expert))
            assert serving.checksums[0, 3].tobytes() == expected
        link.say(join_epoch([link.hello], random_layout(2), epoch=2))
        link.say(Rejection(reason="you are excluded", fatal=True))
        assert await generating == solo(PROMPT, 80)
        assert rig.worker.rank.state().epoch == 4
        assert not rig.task.done()


async def test_a_worker_that_meets_no_rank_reports_it_and_takes_up_the_next_epoch(
    balancer, settings, join_epoch, random_layout, solo
):
    chosen = settings(balancer=balancer.address, num_ranks=2, slots_per_rank=8)
    async with running(chosen) as rig:
        link = await balancer.link()
        two = random_layout(1, num_ranks=2, slots_per_rank=8)
        other = dataclasses.replace(link.hello, worker="absent")
        link.say(join_epoch([link.hello, other], two, meet_timeout_s=0.2))
        lost = await link.until(GroupLost)
        assert lost.epoch == 1
        assert "2 ranks of epoch 1 did not all reach" in lost.reason
        assert lost.expert_of_slot is None
        link.hang_up()
        link = await balancer.link()
        assert link.hello.group_lost.reason == lost.reason
        link.say(join_epoch([link.hello], random_layout(2, slots_per_rank=8), epoch=2))
        await link.until(Serving)
        assert await generate(rig.worker.address, 5) == solo(PROMPT, 5)


@pytest.mark.parametrize("out_of_reach", ["rendezvous_address", "address"])
async def test_three_ranks_that_do_not_meet_name_the_peer_that_they_cannot_connect_to(
    balancer, settings, join_epoch, out_of_reach
):
    """The host of a rendezvous that is out of reach, or a rank that arrived at none."""
    layout = contiguous_layout(
        num_layers=CONFIG.num_moe_layers, num_experts=8, num_ranks=3, slots_per_rank=8
    )
    links = []
    async with AsyncExitStack() as rigs:
        for name in ("w-0", "w-1", "w-2"):
            chosen = settings(balancer=balancer.address, worker=name, num_ranks=3, slots_per_rank=8)
            await rigs.enter_async_context(running(chosen))
            links.append(await balancer.link())
        hellos = [link.hello for link in links]
        culprit = 0 if out_of_reach == "rendezvous_address" else 2
        hellos[culprit] = dataclasses.replace(hellos[culprit], **{out_of_reach: "127.0.0.1:1"})
        present = links if culprit == 0 else links[:2]
        for rank, link in enumerate(present):
            link.say(join_epoch(hellos, layout, rank=rank, meet_timeout_s=0.5))
        for rank, link in enumerate(present):
            lost = await link.until(GroupLost)
            unreached = () if rank == culprit else (f"w-{culprit}",)
            assert lost.unreached == unreached
            assert lost.reason.endswith(f"; no connection to w-{culprit}") == bool(unreached)


@pytest.mark.parametrize(
    ("meet_timeout_s", "reason"),
    [(0.2, "the 2 ranks of epoch 2 did not all reach"), (60.0, "this rank left its group")],
)
async def test_requests_end_with_the_reason_if_no_group_forms_in_time(
    balancer, settings, join_epoch, random_layout, meet_timeout_s, reason
):
    chosen = settings(
        balancer=balancer.address, num_ranks=2, slots_per_rank=8, outage_timeout_s=0.3
    )
    async with running(chosen) as rig:
        link, _ = await join(balancer, join_epoch, random_layout(1, slots_per_rank=8))
        async with grpc.aio.insecure_channel(rig.worker.address) as channel:
            call = worker_pb2_grpc.InferenceStub(channel).Generate(
                pb.GenerateRequest(prompt=PROMPT, max_tokens=80), timeout=60
            )
            assert (await call.read()).tokens
            other = dataclasses.replace(link.hello, worker="absent")
            two = random_layout(2, num_ranks=2, slots_per_rank=8)
            late = join_epoch([link.hello, other], two, epoch=2, meet_timeout_s=meet_timeout_s)
            link.say(late)
            match = rf"did not re-form a group within 0\.3 s: {reason}"
            with pytest.raises(grpc.aio.AioRpcError, match=match):
                await _read_to_end(call)
        with pytest.raises(grpc.aio.AioRpcError, match="did not re-form"):
            await generate(rig.worker.address, 5)
        link.say(join_epoch([link.hello], random_layout(3, slots_per_rank=8), epoch=3))
        await link.until(Serving, lambda said: said.epoch == 3)
        assert len(await generate(rig.worker.address, 5)) == 5


async def test_a_worker_that_stops_first_finishes_the_requests_it_has(
    balancer, settings, join_epoch, random_layout, solo
):
    chosen = settings(balancer=balancer.address, worker="w-7", drain_timeout_s=60.0)
    async with running(chosen) as rig:
        link, _ = await join(balancer, join_epoch, random_layout(1))
        async with grpc.aio.insecure_channel(rig.worker.address) as channel:
            call = worker_pb2_grpc.InferenceStub(channel).Generate(
                pb.GenerateRequest(prompt=PROMPT, max_tokens=80), timeout=60
            )
            tokens = list((await call.read()).tokens)
            rig.stop.set()
            # The balancer is notified while the requests continue.
            await link.until_heartbeat(lambda beat: beat.draining)
            with pytest.raises(grpc.aio.AioRpcError, match="w-7 is shutting down"):
                await generate(rig.worker.address, 5)
            while (response := await call.read()) is not grpc.aio.EOF:
                tokens += response.tokens
        assert tokens == solo(PROMPT, 80)


async def _held(channel):
    """A prompt of one block, whose latents are held for another pool."""
    call = worker_pb2_grpc.InferenceStub(channel).Generate(
        pb.GenerateRequest(prompt=PROMPT * 2, max_tokens=1, hold_latents=True), timeout=60
    )
    (*_, last) = [response async for response in call]
    assert last.held.hold
    return last.held


async def test_a_worker_that_stops_waits_until_its_latents_are_fetched(
    balancer, settings, join_epoch, random_layout, caplog
):
    caplog.set_level("INFO")
    chosen = settings(balancer=balancer.address, worker="w-7", phase=Phase.PREFILL, hold_s=60.0)
    async with running(chosen) as rig:
        link, _ = await join(balancer, join_epoch, random_layout(1))
        async with grpc.aio.insecure_channel(rig.worker.address) as channel:
            held = [await _held(channel), await _held(channel)]
            stub = worker_pb2_grpc.LatentTransferStub(channel)
            rig.stop.set()
            await link.until_heartbeat(lambda beat: beat.draining)
            with pytest.raises(grpc.aio.AioRpcError, match="w-7 is shutting down"):
                await _held(channel)
            await stub.Release(
                pb.LatentTransferReleaseRequest(boot_id=held[0].boot_id, hold=held[0].hold)
            )
            await asyncio.sleep(0.5)
            assert not rig.task.done()
            request = pb.LatentTransferFetchRequest(
                form=link.hello.latent_form,
                boot_id=held[1].boot_id,
                hold=held[1].hold,
                keys=list(keys_of((*PROMPT, *PROMPT, 0), block_tokens=16)),
            )
            sent = [len(part.data) async for part in stub.Fetch(request)]
            assert sum(sent) == 16 * link.hello.cache_token_bytes
        await asyncio.wait_for(asyncio.shield(rig.task), 20)
    assert "2 prompts are held for other pools: waiting until they are fetched" in caplog.text
    assert "were not fetched" not in caplog.text


async def test_a_worker_that_stops_waits_no_longer_than_its_holds_last(
    balancer, settings, join_epoch, random_layout, caplog
):
    chosen = settings(balancer=balancer.address, worker="w-7", phase=Phase.PREFILL, hold_s=1.0)
    async with running(chosen) as rig:
        await join(balancer, join_epoch, random_layout(1))
        async with grpc.aio.insecure_channel(rig.worker.address) as channel:
            await _held(channel)
        rig.stop.set()
        await asyncio.wait_for(asyncio.shield(rig.task), 20)
    assert (
        "1 of 1 prompts were not fetched within 1 s: other ranks prefill them again" in caplog.text
    )


async def test_a_fatal_rejection_at_the_start_ends_the_worker_with_the_reason(balancer, settings):
    async with running(settings(balancer=balancer.address, worker="w-7")) as rig:
        link = await balancer.link()
        link.say(Rejection(reason="this pool serves another model", fatal=True))
        with pytest.raises(RejectedError, match="rejects w-7: this pool serves another model"):
            await asyncio.wait_for(asyncio.shield(rig.task), 60)


async def test_an_invalid_stage_is_rejected_with_the_reason(
    balancer, settings, join_epoch, random_layout, stage_to
):
    other = random_layout(2, slots_per_rank=10)
    async with running(settings(balancer=balancer.address)):
        link, _ = await join(balancer, join_epoch, random_layout(1))
        link.say(stage_to(random_layout(1, slots_per_rank=10), other))
        rejected = await link.until(LayoutRejected)
        assert (rejected.epoch, rejected.rank, rejected.generation) == (1, 0, 2)
        assert "10" in rejected.reason


async def test_a_shutdown_ends_requests_with_the_reason_and_announces_itself(
    balancer, settings, join_epoch, random_layout
):
    chosen = settings(balancer=balancer.address, worker="w-7", drain_timeout_s=0.01)
    async with running(chosen) as rig:
        link, _ = await join(balancer, join_epoch, random_layout(1))
        async with grpc.aio.insecure_channel(rig.worker.address) as channel:
            call = worker_pb2_grpc.InferenceStub(channel).Generate(
                pb.GenerateRequest(prompt=PROMPT, max_tokens=80), timeout=60
            )
            assert (await call.read()).tokens
            rig.stop.set()
            with pytest.raises(grpc.aio.AioRpcError, match="w-7 is shutting down"):
                await _read_to_end(call)
        await asyncio.wait_for(rig.task, 60)
        assert link.heard[-1] == Leaving(reason="w-7 is shutting down")
        (drain,) = (bound for bound in link.heard[-2].stats.timeouts if bound.name == Wait.DRAIN)
        assert (drain.timeout_s, drain.reached) == (0.01, 1)
        assert drain.latest == "w-7 returned its open requests to the gateways"


async def _read_to_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_shutdown_while_waiting_for_a_balancer_or_other_ranks_is_quick(
    balancer, settings, join_epoch, random_layout
):
    async with running(settings(balancer="127.0.0.1:1")):
        pass
    alone = settings(balancer=balancer.address, num_ranks=2, slots_per_rank=6)
    async with running(alone) as rig:
        link = await balancer.link()
        layout = random_layout(1, num_ranks=2, slots_per_rank=6)
        link.say(join_epoch([link.hello, link.hello], layout))
        await link.until_heartbeat()
        rig.stop.set()
        await asyncio.wait_for(rig.task, 60)
    assert isinstance(link.heard[-1], Leaving)


async def test_a_port_in_use_and_a_missing_checkpoint_are_one_line_errors(settings, tmp_path):
    with pytest.raises(WorkerError, match=r"config\.json"):
        await serve(settings(checkpoint=tmp_path), stop=asyncio.Event())
    with pytest.raises(WorkerError, match="context_length 300 is more than the model's 256"):
        await serve(settings(context_length=300), stop=asyncio.Event())
    taken = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    port = taken.add_insecure_port("127.0.0.1:0")
    await taken.start()
    with pytest.raises(WorkerError, match=rf"cannot listen on .*:{port}"):
        await serve(settings(listen=f"127.0.0.1:{port}"), stop=asyncio.Event())
    await taken.stop(None)


def test_a_machine_that_cannot_compute_batch_invariantly_fails_before_serving(
    settings, monkeypatch
):
    def verify_rows(model, cache):
        raise RowVarianceError("batch-invariant mode is not available here: serve without it")

    monkeypatch.setattr("equipoise.worker.core.verify_rows", verify_rows)
    with pytest.raises(WorkerError, match="serve without it"):
        ModelCore.load(settings())
    assert ModelCore.load(settings(batch_invariant=False)).model.row_block is None


@pytest.mark.parametrize(
    ("error", "level"), [(PeerLeftError, logging.INFO), (GroupError, logging.WARNING)]
)
async def test_a_peer_that_left_is_no_warning_and_one_that_failed_is(
    balancer, settings, join_epoch, random_layout, monkeypatch, caplog, error, level
):
    def ends(headers, *, names):
        raise error("w-1 is not there")

    async with running(settings(balancer=balancer.address)):
        link, _ = await join(balancer, join_epoch, random_layout(1))
        with caplog.at_level(logging.INFO, "equipoise.worker.epochs"):
            monkeypatch.setattr("equipoise.worker.engine.check_group", ends)
            await link.until(GroupLost)
        (line,) = (one for one in caplog.records if "epoch 1 ended" in one.getMessage())
        assert line.levelno == level


async def test_peers_that_leave_while_a_rank_stops_leave_no_error_in_its_log(
    balancer, settings, join_epoch, random_layout, monkeypatch, caplog
):
    calls, leave, stepping = threading.Semaphore(0), Engine.leave, threading.Event()

    def leaves(engine):
        leave(engine)
        calls.release()

    def ends(headers, *, names):
        stepping.set()
        for _ in range(2):  # It is told to leave, then cancelled, while its header is out.
            calls.acquire(timeout=60)
        raise PeerLeftError("w-1 left the pool")

    async with running(settings(balancer=balancer.address)) as rig:
        await join(balancer, join_epoch, random_layout(1))
        monkeypatch.setattr(Engine, "leave", leaves)
        monkeypatch.setattr("equipoise.worker.engine.check_group", ends)
        assert await asyncio.to_thread(stepping.wait, 60)
        rig.stop.set()
        await rig.task
    del rig
    gc.collect()
    await asyncio.sleep(0)
    assert [one.getMessage() for one in caplog.records if one.levelno > logging.INFO] == []
