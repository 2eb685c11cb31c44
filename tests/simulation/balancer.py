"""`SimBalancer`: the real seat, elector, pools and services in one simulated process."""

import asyncio
from collections.abc import Callable
from typing import Any
from zlib import crc32

from opentelemetry.trace import NoOpTracer

from equipoise.balancer.leadership.elector import Elector
from equipoise.balancer.leadership.lease import Candidate
from equipoise.balancer.readiness import Readiness
from equipoise.balancer.seat import Seat
from equipoise.balancer.server import _take_part
from equipoise.balancer.service.admin_service import AdminService
from equipoise.balancer.service.worker_link import WorkerLinkService
from equipoise.planning.proposal import Proposal, ProposalRequest, propose
from equipoise.policy.book import PolicyBook
from equipoise.trust.identity import Caller
from equipoise_api.v1 import admin_pb2
from tests.simulation.leases import TIMING
from tests.simulation.loop import Process, outside
from tests.simulation.network import ServerContext
from tests.simulation.register import LEASES, SimRegister
from tests.simulation.store import NAME, Link, SimStore

UNIX_S = 1.7e9
PLAN_S = (0.01, 0.3)
RETRY_S = 0.1

OPERATIONS = {
    "Pause": admin_pb2.PauseRequest,
    "Resume": admin_pb2.ResumeRequest,
    "Pin": admin_pb2.PinRequest,
    "Unpin": admin_pb2.UnpinRequest,
    "TriggerRebalance": admin_pb2.TriggerRebalanceRequest,
    "Rollback": admin_pb2.RollbackRequest,
}


class StoreLink(Link):
    """The network between a balancer and the store, or the lease's server, on the machine `name`.

    What is on its way when a cut begins, or the server hangs, arrives afterwards, although its
    sender no longer waits: a timeout does not take a request back.
    """

    def __init__(self, world: Any, process: Process, *, name: str) -> None:
        self._world, self._process, self._name = world, process, name

    def carry(self, request: Callable[[], None]) -> None:
        self._later(lambda: self._arrive(request, self._process.name, self._name))

    def answer(self, deliver: Callable[[], None]) -> None:
        self._later(lambda: self._arrive(deliver, self._name, self._process.name))

    def _later(self, function: Callable[[], None], after_s: float | None = None) -> None:
        loop = self._world.loop
        delay_s = self._world.network.delay_s() if after_s is None else after_s
        loop.call_later(delay_s, function, context=outside())

    def _arrive(self, function: Callable[[], None], source: str, target: str) -> None:
        hangs = target == NAME and self._world.store.hangs
        if hangs:
            self._world.effects.add("store_hangs")
        if hangs or self._world.network.stops(source, target):
            self._later(lambda: self._arrive(function, source, target), RETRY_S)
        else:
            function()


class SimPlanner:
    """The real planner, in this process; a plan takes a while, or for ever while it hangs."""

    def __init__(self, world: Any) -> None:
        self._world = world

    async def propose(
        self, request: ProposalRequest, *, pool: str, begins: Callable[[], None]
    ) -> Proposal:
        begins()
        if self._world.planner_hangs:
            self._world.effects.add("planner_hangs")
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(self._world.rng.uniform(*PLAN_S))
        self._world.observer.proposed(pool, request)
        return propose(request)


class SimBalancer:
    """One start of a balancer process."""

    def __init__(self, world: Any, process: Process, address: str, *, boot: int) -> None:
        self.world, self.process, self.address, self.serial = world, process, address, boot
        self.suspended_s = 0.0
        """Seconds for which its machine was suspended: a monotonic clock does not count them."""
        self.suspended_at_s: float | None = None
        """When its machine was suspended, if it still is."""
        self.woke_s = 0.0
        """When it resumed after that, by its own clock."""
        name = f"{process.name}-{boot}"
        term_offset = 1 + crc32(name.encode()) % 10_000
        self.store = SimStore(world.store, StoreLink(world, process, name=NAME))
        leases_at = NAME if world.leases is world.store else LEASES
        self.policies = PolicyBook(world.policy)
        if world.policy_text:
            self.offer_policy(world.policy_text)
        self.elector = Elector(
            SimRegister(world.leases, StoreLink(world, process, name=leases_at)),
            candidate=Candidate(name=name, address=address, term_offset=term_offset),
            timing=TIMING,
            clock=self.monotonic_s,
        )
        skew_s = world.rng.uniform(-0.5, 0.5) + world.clock_offset_s.get(process.name, 0.0)
        self.clock = lambda: UNIX_S + skew_s + world.loop.time()
        self.seat = Seat(
            store=self.store,
            policies=self.policies,
            clock=self.clock,
            elector=self.elector,
            readiness=Readiness(),
            planner=SimPlanner(world),
            tracer=NoOpTracer(),
        )
        world.observer.watch_elector(self)

    def monotonic_s(self) -> float:
        """The clock of its election."""
        return float(self.world.loop.time() - self.suspended_s)

    @property
    def leads_by_clock_alone(self) -> bool:
        """Whether it leads only because its clock stood still: it has renewed nothing since."""
        return 0.0 < self.elector.state.renewed_s < self.woke_s

    async def run(self) -> None:
        """Serve until killed; raises StoreError if the store cannot be read at the start."""
        await self.seat.open()
        service = WorkerLinkService(self.seat, caller=_caller)
        admin = AdminService(self.seat, store=self.store, caller=lambda _context: "admin/op")
        handlers: dict[str, Any] = {"Connect": service.connect}
        for name, request in OPERATIONS.items():
            handlers[name] = _unary(getattr(admin, name), request)
        self.world.network.listen(self.process, self.address, handlers)
        await _take_part(self.seat, self.elector)

    def offer_policy(self, text: str) -> None:
        """A policy file was edited."""
        self.policies.offer(text, source="policy.yaml", now=self.world.loop.time())


def _caller(context: ServerContext) -> Caller:
    return Caller(peer="simulated", identities=context.identity or ())


def _unary(method: Any, request_type: Any) -> Any:
    async def handle(requests: Any, context: Any) -> None:
        request = request_type.FromString(await requests.get())
        context.set_trailing_metadata = lambda _metadata: None
        response = await method(request, context)
        await context.write(response.SerializeToString())

    return handle
