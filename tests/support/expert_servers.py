"""A port that serves experts."""

from contextlib import asynccontextmanager

import grpc

from equipoise_api.v1 import worker_pb2_grpc


@asynccontextmanager
async def served(servicer):
    server = grpc.aio.server()
    worker_pb2_grpc.add_ExpertTransferServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
