"""`Operators`: requests over the simulated network, and what their answers promise."""

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc

from equipoise.pool.counters import answer_timeout_s
from equipoise.pool.records import Hold
from equipoise_api.v1 import admin_pb2
from tests.simulation.balancer import OPERATIONS
from tests.simulation.fleet import POOL
from tests.simulation.loop import Process
from tests.simulation.network import END
from tests.simulation.store import Data

SLACK_S = 3.0


@dataclass
class _Request:
    operation: str
    reason: str
    to: Process
    asked_s: float
    answer: Any = None
    failed: str = ""


class Operators:
    """An operator on a machine of its own, which nothing happens to.

    What the store loses of its requests has to be kept by each leader that knew it at the time, as
    leader or as follower. The hold that follows from them gives way to what a leader that did not
    know them has recorded, since or before.
    """

    def __init__(self, world: Any) -> None:
        self._world = world
        self._process = Process(world.loop, "operator")
        self._requests: list[_Request] = []
        self._paused: bool | None = None
        self._pinned: bool | None = None
        # Requests that the store has lost, by their reason, and the processes that knew them then.
        self._lost: dict[str, frozenset[Process]] = {}
        # Those of them whose hold gives way to what the store has or gets instead.
        self._overruled: set[str] = set()

    def ask(self, operation: str) -> None:
        """Send a request to the balancer that leads."""
        leader = self._world.leader()
        if leader is None:
            return
        self._process.spawn(self._ask(operation, leader))

    async def _ask(self, operation: str, leader: Any) -> None:
        world = self._world
        reason = f"request {len(self._requests)}"
        request = _Request(operation, reason, leader.process, world.loop.time())
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

    def note_loss(self, before: Data, after: Data) -> None:
        """The store has lost contents."""
        for reason in self._recorded(before) - self._recorded(after):
            knowing = [one for one in self._world.living_balancers() if self._knows(one, reason)]
            witnesses = frozenset(one.process for one in knowing)
            self._lost[reason] = self._lost.get(reason, witnesses) & witnesses
            if any(self._knows_less(one, after) for one in knowing):
                self._overruled.add(reason)

    def note_records(self, after: Data) -> None:
        """The store has recorded requests, or has them again."""
        recorded = self._recorded(after)
        writers = [
            one.process
            for one in self._world.living_balancers()
            if one.elector.state.term == after["term"]
        ]
        for reason in self._lost.keys() & recorded:
            del self._lost[reason]
        for reason, witnesses in self._lost.items():
            if witnesses.isdisjoint(writers):
                self._overruled.add(reason)

    def _recorded(self, data: Data) -> set[str]:
        """Reasons of the requests that a store has a record of."""
        text = "".join(one.what for one in data.get(("audit", POOL), ()))
        return {one.reason for one in self._requests if f"({one.reason})" in text}

    def _knows(self, balancer: Any, reason: str) -> bool:
        """Whether a process has a record of a request, as leader or as follower."""
        pools = balancer.seat.pools
        if POOL not in pools.names():
            return False
        records = pools.find(POOL).pool.journal.audit
        return any(f"({reason})" in one.what for one in records)

    def _knows_less(self, balancer: Any, data: Data) -> bool:
        """Whether a store has an accepted request that a balancer does not know."""
        accepted = "".join(one.what for one in data.get(("audit", POOL), ()) if one.accepted)
        return any(
            f"({one.reason})" in accepted and not self._knows(balancer, one.reason)
            for one in self._requests
        )

    def _is_excused(self, reason: str) -> bool:
        """Whether a request may be lost: the leader did not know it when the store lost it."""
        leader = self._world.leader()
        return reason in self._lost and (leader is None or leader.process not in self._lost[reason])

    def unsettled(self, pool: Any) -> str:
        """What an operator was promised and the leader does not keep."""
        hold = pool.journal.hold
        if any(
            one.reason in self._overruled or self._is_excused(one.reason) for one in self._requests
        ):
            return ""
        if self._paused is not None and bool(hold.paused) != self._paused:
            return (
                f"the hold is lost: an operator's pause is {self._paused}, the pool's {hold.paused}"
            )
        if self._pinned and hold.pin is None:
            return "the hold is lost: an operator's pin is gone"
        return ""

    def check(self) -> None:
        """Every request was answered, or its connection ended, in time.

        The connection to a machine that is lost ends with the timeout of the client.
        """
        world = self._world
        bound_s = answer_timeout_s(world.policy) + SLACK_S
        for request in self._requests:
            if request.answer is None and not request.failed and request.to.alive:
                waited_s = world.loop.time() - request.asked_s
                if waited_s > bound_s:
                    world.observer.violate(
                        "request-unanswered", f"{request.operation} after {waited_s:.0f} s"
                    )
        self._check_records()
        self._check_hold()

    def _check_hold(self) -> None:
        """The hold follows from the accepted requests on record, if no store has lost any."""
        world, paused, pinned = self._world, False, False
        for one in world.store.data.get(("audit", POOL), ()):
            match one.what.split()[0] if one.accepted else "":
                case "pause" | "roll":
                    paused = True
                case "resume":
                    paused = False
                case "pin":
                    pinned = True
                case "unpin":
                    pinned = False
        hold = world.store.data.get(("hold", POOL), Hold())
        follows = (bool(hold.paused), bool(hold.pinned)) == (paused, pinned)
        if not world.store.num_losses and not follows:
            world.observer.violate(
                "hold-unrecorded",
                f"by its audit the pool is {'' if paused else 'not '}paused and "
                f"{'' if pinned else 'not '}pinned, but it is {hold.reason or 'neither'}",
            )

    def _check_records(self) -> None:
        """The store has an audit record of every accepted request, unless that may be lost."""
        world = self._world
        recorded = self._recorded(world.store.data)
        for request in self._requests:
            is_accepted = request.answer is not None and request.answer.accepted
            is_missing = is_accepted and request.reason not in recorded
            if is_missing and not self._is_excused(request.reason):
                world.observer.violate(
                    "audit-lost", f"{request.operation} was accepted, and no store has its record"
                )
