"""A pool of one rank in this process, whose latents other pools can fetch."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc

from equipoise.rank.waits import Waits
from equipoise.trust.credentials import Credentials
from equipoise.wire.messages import Wait
from equipoise.worker.latents.puller import LatentPuller
from equipoise.worker.latents.service import LatentTransferService
from equipoise.worker.latents.store import LatentStore
from equipoise.worker.scheduler import Scheduler
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc
from tests.support.lone_engine import lone_engine
from tests.support.worker_parts import inference_of


@asynccontextmanager
async def a_rank(
    core,
    held,
    *,
    boot_id,
    peer_pools=("prefill",),
    tamper=None,
    hold_s=30.0,
    pull_s=3.0,
    form="v1/small",
    num_drafts=0,
):
    """A pool of one rank that serves inference and latents; `tamper` changes what it sends."""
    loop = asyncio.get_running_loop()
    store = LatentStore(cache=core.cache, form=form, boot_id=boot_id)
    puller = LatentPuller(
        store,
        peer_pools=peer_pools,
        credentials=Credentials(),
        waits=Waits({Wait.LATENTS: pull_s}),
        timeout_s=pull_s,
    )
    inference = inference_of(
        boot_id=boot_id,
        latents=puller,
        vocab_size=core.checkpoint.config.vocab_size,
        context_length=core.cache.max_len,
    )
    scheduler = Scheduler(
        blocks=core.block_pool(),
        max_requests=4,
        max_queued=4,
        max_step_tokens=12,
        num_drafts=num_drafts,
        hold_s=hold_s,
    )

    def deliver(result):
        loop.call_soon_threadsafe(inference.deliver, result)

    def begin_epoch():
        rank.engine = lone_engine(core, held, deliver, scheduler=scheduler, num_drafts=num_drafts)
        inference.open(rank.engine)
        rank.stepping = asyncio.create_task(asyncio.to_thread(rank.engine.run))

    async def end_epoch():
        rank.engine.leave()
        await asyncio.wait_for(rank.stepping, 60)

    latents = LatentTransferService(store, visit=inference.visit)
    server = grpc.aio.server()
    worker_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    served = latents if tamper is None else Tampering(latents, tamper)
    worker_pb2_grpc.add_LatentTransferServicer_to_server(served, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = f"127.0.0.1:{port}"
    async with grpc.aio.insecure_channel(address) as channel:
        rank = SimpleNamespace(
            address=address,
            core=core,
            held=held,
            boot_id=boot_id,
            begin_epoch=begin_epoch,
            end_epoch=end_epoch,
            scheduler=scheduler,
            puller=puller,
            inference_service=inference,
            service=latents,
            inference=worker_pb2_grpc.InferenceStub(channel),
            latents=worker_pb2_grpc.LatentTransferStub(channel),
        )
        begin_epoch()
        try:
            yield rank
        finally:
            await end_epoch()
            await server.stop(None)


@asynccontextmanager
async def two_pools(
    rank_of_one, *, tamper=None, peer_pools=("prefill",), hold_s=30.0, pull_s=3.0, **decode
):
    async with (
        a_rank(*rank_of_one(), boot_id="reads", tamper=tamper, hold_s=hold_s) as prefill,
        a_rank(
            *rank_of_one(**decode), boot_id="writes", peer_pools=peer_pools, pull_s=pull_s
        ) as one,
    ):
        yield prefill, one


async def answer(rank, prompt, max_tokens, **fields):
    """Tokens, logprobs, the finish reason and the hold of one request on one rank."""
    found = SimpleNamespace(tokens=[], logprobs=[], finish=0, held=None)
    call = rank.inference.Generate(
        pb.GenerateRequest(prompt=prompt, max_tokens=max_tokens, **fields), timeout=60
    )
    async for response in call:
        found.tokens += response.tokens
        found.logprobs += [(one.logprob, tuple(one.top_tokens)) for one in response.logprobs]
        found.finish = response.finish_reason or found.finish
        found.held = response.held if response.HasField("held") else found.held
    return found


def source_of(rank, held, **changes):
    fields = {
        "address": rank.address,
        "pool": "prefill",
        "worker": "worker-0",
        "boot_id": held.boot_id if held else rank.boot_id,
        "hold": held.hold if held else 0,
    }
    return pb.LatentSource(**fields | changes)


async def handed_over(prefill, decode, prompt, max_tokens, sampling=None, **changes):
    """The answer of both legs together."""
    first = await answer(prefill, prompt, 1, hold_latents=True, sampling=sampling)
    rest = await answer(
        decode,
        [*prompt, *first.tokens],
        max_tokens - 1,
        num_replayed=1,
        sampling=sampling,
        latents_from=source_of(prefill, first.held, **changes),
    )
    rest.tokens, rest.logprobs = first.tokens + rest.tokens, first.logprobs + rest.logprobs
    return rest


async def nothing_is_held(*ranks):
    for rank in ranks:
        holds = rank.scheduler.holds
        async with asyncio.timeout(10):
            while rank.scheduler.blocks.num_used or holds.num_open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert holds.num_taken == holds.ended.total()


class Tampering(worker_pb2_grpc.LatentTransferServicer):
    """Changes each message on its way out; an event among the messages is waited for."""

    def __init__(self, latents, tamper):
        self.latents, self.tamper = latents, tamper

    async def Fetch(self, request, context):  # noqa: N802
        class Writer:
            async def write(_, message):  # noqa: N805
                for one in self.tamper(message):
                    if isinstance(one, asyncio.Event):
                        await one.wait()
                    else:
                        await context.write(one)

            abort, peer = context.abort, context.peer

        await self.latents.Fetch(request, Writer())

    async def Release(self, request, context):  # noqa: N802
        return await self.latents.Release(request, context)
