"""A real balancer with two serving pools, `a` and `b`, for messages at their limits."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import grpc
from google.protobuf.json_format import MessageToDict

from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.settings.fields import ranges_of
from equipoise.trust.credentials import Credentials
from equipoise.trust.tokens import BALANCER
from equipoise.wire.balancer_messages import JoinEpoch
from equipoise.wire.convert import to_balancer
from equipoise.wire.layouts import layout_to_proto
from equipoise_api.v1 import (
    admin_pb2,
    gateway_link_pb2,
    status_pb2,
    status_pb2_grpc,
    worker_link_pb2_grpc,
)
from tests.support.authority import write_keys
from tests.support.balancer_links import Link, is_serving
from tests.support.balancers import serving
from tests.support.limits import assert_one_line
from tests.support.scripted_worker import MODEL, ScriptedWorker, make_hello

IDENTITIES = ("worker/a/*", "worker/b/*", "gateway", "reader", "admin/ann")
WAIT_S = 60.0
# Nothing happens by itself: no plan is due, and nobody is silent for too long.
POLICY = Policy(
    interval_s=3600.0,
    report_interval_s=0.1,
    heartbeat_interval_s=1800.0,
    report_timeout_s=3600.0,
    reform_timeout_s=0.2,
    join_settle_s=0.0,
)
_MOVING = {"revision", "silentS", "windowAgeS", "uptimeS"}
_REJECTED = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "too large",
    grpc.StatusCode.PERMISSION_DENIED: "denied",
}
_UNUSABLE = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED}


class LimitFleet:
    """Calls to the balancer by any identity, and what it knows of each pool."""

    def __init__(self, address, keys, store) -> None:
        self._address = address
        self._store = store
        self._credentials = {who: Credentials(signing_key=key) for who, key in keys.items()}
        self.channel = grpc.aio.insecure_channel(address)
        self.workers = {
            pool: [ScriptedWorker(make_hello(f"{pool}-{number}", pool=pool)) for number in range(4)]
            for pool in ("a", "b")
        }
        self._links = {}
        self._boots = 0

    def metadata(self, who):
        return self._credentials[who].metadata(audience=BALANCER)

    async def serve(self, pool):
        """All workers of a pool as new processes: links to them, in rank order."""
        self.stop(pool)
        await self._until(
            pool, lambda status: "connected" not in {one.state for one in status.ranks}
        )
        self._boots += 1
        links = self._links[pool] = []
        for worker in self.workers[pool]:
            worker.hello = replace(worker.hello, boot_id=f"boot-{self._boots}")
            worker.join_epoch = worker.layout = worker.staged = None
            links.append(Link(self.channel, worker, metadata=self.metadata(f"worker/{pool}/*")))
            await links[-1].send(worker.hello)
        for link in links:
            await link.receive_until(JoinEpoch)
        for link in links:
            await link.send(link.worker.serving())
        await self._until(pool, is_serving)
        return sorted(links, key=lambda link: link.worker.rank)

    def stop(self, pool):
        """End the streams of a pool's workers."""
        for link in self._links.pop(pool, ()):
            link.call.cancel()

    async def _until(self, pool, condition):
        stub = status_pb2_grpc.StatusStub(self.channel)
        metadata = self.metadata("reader")
        if pool not in (await self.shared_state())["pools"]:
            return
        async with asyncio.timeout(WAIT_S):
            while True:
                request = status_pb2.GetStatusRequest(pool=pool)
                answer = await stub.GetStatus(request, metadata=metadata)
                if condition(answer.status):
                    return
                await asyncio.sleep(0.05)

    async def call(self, who, method, request):
        """The code and details of a call; a stream is left after its first message."""
        name = f"/{method.containing_service.full_name}/{method.name}"
        kind = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        call = kind(
            name,
            request_serializer=method.input_type._concrete_class.SerializeToString,
            response_deserializer=method.output_type._concrete_class.FromString,
        )(request, timeout=WAIT_S, metadata=self.metadata(who))
        try:
            await (call.read() if method.server_streaming else call)
        except grpc.aio.AioRpcError as error:
            self._check(method, error)
            return error.code()
        finally:
            call.cancel()
        return grpc.StatusCode.OK

    def _check(self, method, error):
        details = error.details() or ""
        assert error.code() not in _UNUSABLE, (method.full_name, details[:300])
        assert_one_line(details, method.full_name)

    async def hello(self, who, message):
        """Send a first message and a heartbeat; the kind of the answer."""
        call = worker_link_pb2_grpc.WorkerLinkStub(self.channel).Connect(
            metadata=self.metadata(who)
        )
        try:
            await call.write(message)
            await call.write(to_balancer(ScriptedWorker(make_hello()).heartbeat()))
            async with asyncio.timeout(WAIT_S):
                answer = await call.read()
        except asyncio.InvalidStateError:
            return "crossed"  # The heartbeat met the end of the stream.
        except grpc.aio.AioRpcError as error:
            if "Internal error from Core" in error.details():
                return "crossed"  # The client library's word for the same.
            if error.code() not in _REJECTED:
                raise
            return _REJECTED[error.code()]
        finally:
            call.cancel()
        return "closed" if answer is grpc.aio.EOF else answer.WhichOneof("message")

    async def state(self, pool):
        """What may change in a pool and beside it: status, layout, decisions, audit, the store."""
        stub, metadata = status_pb2_grpc.StatusStub(self.channel), self.metadata("admin/ann")
        status = await stub.GetStatus(status_pb2.GetStatusRequest(pool=pool), metadata=metadata)
        layout = await stub.GetLayout(status_pb2.GetLayoutRequest(pool=pool), metadata=metadata)
        return {
            "status": _still(MessageToDict(status.status)),
            "layout": MessageToDict(layout),
            "decisions": await self._store.decisions(pool, limit=100),
            "audit": await self._store.audit(pool, limit=100),
            "next generation": (await self._store.recall(pool)).next_generation,
        }

    async def shared_state(self):
        """What all pools share: their names, the term, and who leads."""
        stub = status_pb2_grpc.StatusStub(self.channel)
        listed = await stub.ListPools(
            status_pb2.ListPoolsRequest(), metadata=self.metadata("reader")
        )
        return {
            "pools": [one.pool for one in listed.pools],
            "not ready": listed.not_ready,
            "term": await self._store.highest_term(),
            "stored": sorted(await self._store.pools()),
        }


def _still(part):
    """A status without what moves by itself."""
    if isinstance(part, dict):
        return {key: _still(value) for key, value in part.items() if key not in _MOVING}
    return [_still(one) for one in part] if isinstance(part, list) else part


@asynccontextmanager
async def limit_fleet(tmp_path):
    """Both pools serve; the streams of pool `b` stay open."""
    keys, accepted = write_keys(tmp_path / "keys", *IDENTITIES)
    store = SqliteStore(tmp_path / "state.sqlite")
    async with AsyncExitStack() as opened:
        opened.push_async_callback(store.close)
        port = await opened.enter_async_context(
            serving(
                store,
                listen="127.0.0.1:0",
                accepted_keys=str(accepted),
                policies=PolicyBook(POLICY),
                drain_timeout_s=1.0,
            )
        )
        fleet = LimitFleet(f"127.0.0.1:{port}", keys, store)
        opened.push_async_callback(fleet.channel.close)
        for pool in ("a", "b"):
            await fleet.serve(pool)
            opened.callback(fleet.stop, pool)
        yield fleet


def base_of(method):
    """A request to pool `a`, with valid values where the empty ones end every check at once."""
    values = {
        "pool": "a",
        "pools": ["a"],
        "boot_id": "gateway-1",
        "policy": {name: getattr(POLICY, name) for name in ranges_of(Policy)},
        "layout": layout_to_proto(
            contiguous_layout(
                num_layers=MODEL.num_layers,
                num_experts=MODEL.num_experts,
                num_ranks=4,
                slots_per_rank=10,
                generation=1,
            )
        ),
    }
    known = method.input_type.fields_by_name
    return method.input_type._concrete_class(
        **{field: value for field, value in values.items() if field in known}
    )


METHODS = [
    method
    for module in (status_pb2, admin_pb2, gateway_link_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
