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
from equipoise_api.v1 import worker_pb2_grpc
from tests.support.lone_engine import lone_engine
from tests.support.worker_parts import inference_of


@asynccontextmanager
async def a_rank(core, held, *, boot_id, peer_pools=("prefill",), tamper=None, hold_s=30.0):
    """A pool of one rank that serves inference and latents; `tamper` changes what it sends."""
    loop = asyncio.get_running_loop()
    store = LatentStore(cache=core.cache, form="v1/small", boot_id=boot_id)
    puller = LatentPuller(
        store,
        peer_pools=peer_pools,
        credentials=Credentials(),
        waits=Waits({Wait.LATENTS: 3.0}),
        timeout_s=3.0,
    )
    inference = inference_of(boot_id=boot_id, latents=puller)
    scheduler = Scheduler(
        blocks=core.block_pool(), max_requests=4, max_queued=4, max_step_tokens=12, hold_s=hold_s
    )
    engine = lone_engine(
        core,
        held,
        lambda result: loop.call_soon_threadsafe(inference.deliver, result),
        scheduler=scheduler,
    )
    latents = LatentTransferService(store, visit=inference.visit)
    server = grpc.aio.server()
    worker_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    served = latents if tamper is None else Tampering(latents, tamper)
    worker_pb2_grpc.add_LatentTransferServicer_to_server(served, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    inference.open(engine)
    stepping = asyncio.create_task(asyncio.to_thread(engine.run))
    address = f"127.0.0.1:{port}"
    async with grpc.aio.insecure_channel(address) as channel:
        yield SimpleNamespace(
            address=address,
            core=core,
            boot_id=boot_id,
            engine=engine,
            scheduler=scheduler,
            puller=puller,
            service=latents,
            inference=worker_pb2_grpc.InferenceStub(channel),
            latents=worker_pb2_grpc.LatentTransferStub(channel),
        )
    engine.leave()
    await asyncio.wait_for(stepping, 60)
    await server.stop(None)


class Tampering(worker_pb2_grpc.LatentTransferServicer):
    """Changes each message on its way out."""

    def __init__(self, latents, tamper):
        self.latents, self.tamper = latents, tamper

    async def Fetch(self, request, context):  # noqa: N802
        class Writer:
            async def write(_, message):  # noqa: N805
                for one in self.tamper(message):
                    await context.write(one)

            abort, peer = context.abort, context.peer

        await self.latents.Fetch(request, Writer())

    async def Release(self, request, context):  # noqa: N802
        return await self.latents.Release(request, context)
