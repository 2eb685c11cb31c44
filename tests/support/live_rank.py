"""A real engine of the tiny checkpoint in this process, behind real gRPC."""

import asyncio
from contextlib import asynccontextmanager

import grpc

from equipoise.formats.packaged import packaged_checkpoint
from equipoise.telemetry.histogram import SHORT_S, Histogram
from equipoise.worker.alone import engine_alone
from equipoise.worker.grammar_compiler import GrammarCompiler
from equipoise.worker.inference import InferenceService
from equipoise.worker.settings import WorkerSettings
from equipoise_api.v1 import worker_pb2_grpc

BOUND_S = 60.0
VOCAB_SIZE = 272


@asynccontextmanager
async def live_rank(*, context_length):
    """The address of the tiny model's engine, alone; its thread must be alive at the end."""
    settings = WorkerSettings(context_length=context_length, max_requests=16)
    loop = asyncio.get_running_loop()
    service = InferenceService(
        vocab_size=VOCAB_SIZE,
        context_length=context_length,
        itl_s=Histogram(SHORT_S),
        boot_id="boot-1",
        latents=None,
        grammars=GrammarCompiler(packaged_checkpoint(), vocab_size=VOCAB_SIZE),
    )
    engine = await asyncio.to_thread(
        engine_alone,
        settings,
        publish=lambda result: loop.call_soon_threadsafe(service.deliver, result),
    )
    service.open(engine)
    stepping = asyncio.create_task(asyncio.to_thread(engine.run))
    server = grpc.aio.server()
    worker_pb2_grpc.add_InferenceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
        assert not stepping.done(), stepping.exception()
    finally:
        engine.leave()
        await server.stop(None)
        await asyncio.wait_for(stepping, BOUND_S)
