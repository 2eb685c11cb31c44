"""`Operators`: requests over the simulated network, and what their answers promise."""

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc

from equipoise.pool.counters import answer_timeout_s
from equipoise_api.v1 import admin_pb2
from tests.simulation.balancer import OPERATIONS
from tests.simulation.loop import Process
from tests.simulation.network import END

POOL = "main"
SLACK_S = 3.0


@dataclass
class _Request:
    operation: str
    reason: str
    to: str
    asked_s: float
    answer: Any = None
    failed: str = ""
    is_excused: bool = False


class Operators:
    """An operator on a machine of its own, which nothing happens to."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._process = Process(world.loop, "operator")
        self._requests: list[_Request] = []
        self._paused: bool | None = None
        self._pinned: bool | None = None

    def ask(self, operation: str) -> None:
        """Send a request to the balancer that leads."""
        leader = self._world.leader()
        if leader is None:
            return
        self._process.spawn(self._ask(operation, leader))

    async def _ask(self, operation: str, leader: Any) -> None:
        world = self._world
        reason = f"request {len(self._requests)}"
        request = _Request(operation, reason, leader.process.name, world.loop.time())
        self._requests.append(request)
        message = OPERATIONS[operation](pool=POOL, reason=reason)
        if operation == "TriggerRebalance":
            message.force = True
        connection = world.network.connect(self._process, leader.address, operation)
        try:
            if not connection.done:
                connection.send(message.SerializeToString())
                connection.send(END)
            answer = await connection.answers.get()
        except grpc.aio.AioRpcError as error:
            request.failed = str(error.details())
        except (StopAsyncIteration, asyncio.InvalidStateError):
            request.failed = "the connection ended"
        if request.failed:
            self._forget(operation)
            world.observer.note(f"{operation}: no answer: {request.failed[:80]}")
            return
        response = getattr(admin_pb2, f"{operation}Response").FromString(answer)
        request.answer = response.outcome
        world.observer.note(
            f"{operation}: {'accepted' if response.outcome.accepted else 'refused'}: "
            f"{response.outcome.reason[:80]}"
        )
        if response.outcome.accepted:
            world.effects.add("operator")
            self._expect(operation)

    def _expect(self, operation: str) -> None:
        match operation:
            case "Pause":
                self._paused = True
            case "Resume":
                self._paused = False
            case "Pin":
                self._pinned = True
            case "Unpin":
                self._pinned = False
            case "Rollback":
                self._paused = True

    def _forget(self, operation: str) -> None:
        """Whether it was carried out is unknown."""
        if operation in {"Pause", "Resume", "Rollback"}:
            self._paused = None
        if operation in {"Pin", "Unpin"}:
            self._pinned = None

    def forget_answered(self) -> None:
        """Keep only the requests that wait for an answer."""
        self._requests = [one for one in self._requests if not (one.answer or one.failed)]

    def unsettled(self, pool: Any) -> str:
        """What an operator was promised and the leader does not keep."""
        hold = pool.journal.hold
        if self._world.store_and_memory_lost:
            return ""
        if self._paused is not None and bool(hold.paused) != self._paused:
            return (
                f"the hold is lost: an operator's pause is {self._paused}, the pool's {hold.paused}"
            )
        if self._pinned and hold.pin is None:
            return "the hold is lost: an operator's pin is gone"
        return ""

    def check(self) -> None:
        """Every request was answered, or its connection ended, in time."""
        world = self._world
        bound_s = answer_timeout_s(world.policy) + SLACK_S
        for request in self._requests:
            if request.answer is None and not request.failed:
                waited_s = world.loop.time() - request.asked_s
                if waited_s > bound_s:
                    world.observer.violate(
                        "request-unanswered", f"{request.operation} after {waited_s:.0f} s"
                    )
        self._check_records()

    def _check_records(self) -> None:
        """The store has an audit record of every accepted request, unless that may be lost."""
        world = self._world
        if world.store_and_memory_lost:
            return
        recorded = "".join(one.what for one in world.store.data.get(("audit", POOL), ()))
        for request in self._requests:
            is_accepted = request.answer is not None and request.answer.accepted
            if is_accepted and f"({request.reason})" not in recorded:
                world.observer.violate(
                    "audit-lost", f"{request.operation} was accepted, and no store has its record"
                )
