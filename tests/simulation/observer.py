"""`Observer`: the invariants, checked where state changes: at each step, write, message and term.

It sees what no process sees: true bytes, all processes at once, and what was said to whom. A
violation is recorded with the time, and ends the schedule.
"""

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from equipoise.balancer.leadership.leader_state import LeaderRole
from equipoise.planning.arrays import EMPTY
from equipoise.planning.layout import Layout
from equipoise.wire.balancer_messages import Abort, JoinEpoch, Stage
from tests.simulation.experts import expert_bytes
from tests.simulation.fleet import POOL
from tests.simulation.leases import TIMING

MAX_REMEMBERED = 4096

HARMLESS = frozenset(
    {
        "kill_leader",
        "pause_leader",
        "reset",
        "shift",
        "operator",
        "planner_hangs",
        "store_full",
        "lose_store_behind_leader",
        "set_store_back_behind_leader",
    }
)
"""Kinds of faults through which ranks serve on in their epoch."""


class ViolationError(Exception):
    """An invariant does not hold; `kind` is its constant name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Observer:
    """Watches one world."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.violation: ViolationError | None = None
        self.log: list[tuple[float, str]] = []
        self._obeyed: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._steps: dict[Any, tuple[bytes, str]] = {}
        self._used: dict[str, dict[int, tuple[bytes, Any]]] = {}
        self._proposed: dict[tuple[int, bytes], None] = {}
        self._groups: WeakKeyDictionary[Any, tuple[int, Any]] = WeakKeyDictionary()
        self.num_steps = self.num_switches = self.num_plans = self.num_epochs = self.num_terms = 0
        self.num_opened = 0
        """Epochs of the pool that the store has recorded, whether or not their ranks served."""

    # What is recorded ---------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """A line of the story."""
        self.log.append((self._world.elapsed_s, text))

    def violate(self, kind: str, text: str) -> None:
        """An invariant does not hold; the first violation of a schedule counts."""
        if self.violation is None:
            self.violation = ViolationError(kind, text)
            self.note(f"VIOLATION {kind}: {text}")

    # Terms --------------------------------------------------------------------------------------

    def watch_elector(self, balancer: Any) -> None:
        """Check every change of an elector's state."""
        elector, apply = balancer.elector, balancer.elector._apply

        def checked(event: Any) -> Any:
            before = elector.state
            request = apply(event)
            if elector.state is not before:
                self._check_term(balancer, before, elector.state)
            return request

        elector._apply = checked

    def _check_term(self, balancer: Any, before: Any, after: Any) -> None:
        name = f"{balancer.process.name}#{balancer.serial}"
        if after.highest_term < before.highest_term:
            self.violate("term-falls", f"{name}: {before.highest_term} to {after.highest_term}")
        if after.role is not LeaderRole.LEADING or before.role is LeaderRole.LEADING:
            if before.role is LeaderRole.LEADING and after.role is not LeaderRole.LEADING:
                self.note(f"{name} no longer leads: {after.reason}")
            return
        self.num_terms += 1
        self.note(f"{name} leads in term {after.term}")
        # A lost lease is noticed at the next renewal. Until then the incarnation of the store, not
        # the term, keeps the older leader from writing if the new one had never seen a lease.
        world, since_s = self._world, self._world.loop.time() - TIMING.duration_s
        can_be_lost = world.leases is world.store and world.lost_s >= since_s
        is_blind = can_be_lost and after.term == after.candidate.term_offset
        for other in self._world.living_balancers():
            state = other.elector.state
            if other is balancer or state.role is not LeaderRole.LEADING:
                continue
            # A clock that stood still keeps a leader for a moment: the fence holds, and the term.
            is_real = not other.process.paused and not other.leads_by_clock_alone
            if other.elector.leads() and is_real and not is_blind:
                self.violate("two-leaders", f"{name} and {other.process.name} lead at once")
            if state.term == after.term:
                self.violate("term-twice", f"{name} and {other.process.name}: term {after.term}")

    # Steps --------------------------------------------------------------------------------------

    def engine_started(self, engine: Any) -> None:
        """A rank begins an epoch."""
        mesh = engine._mesh
        if mesh.rank != 0:
            return
        self.num_epochs += 1
        if "w4" in mesh.names:
            self._world.effects.add("join_worker")
        self.note(f"epoch {mesh.epoch}: {', '.join(mesh.names)} serve")
        if self._world.has_served and self._world.kinds <= HARMLESS:
            self.violate(
                "serving-interrupted",
                f"epoch {mesh.epoch} begins, although nothing has happened to a worker: "
                f"{', '.join(sorted(self._world.kinds))}",
            )

    def exchanged(self, mesh: Any, headers: Any) -> None:
        """A rank has every header of a round; it is about to switch or step."""

    def stepped(self, engine: Any) -> None:
        """A rank has run a step: on which layout, and on which bytes?"""
        self.num_steps += 1
        held, mesh = engine._held, engine._mesh
        layout = held.contents.layout
        digest = content_of(layout) + content_of(engine._experts.layout)
        group = mesh.peers[0].serial
        key = (group, mesh.epoch, engine._num_steps)
        known = self._steps.setdefault(key, (digest, mesh.process.name))
        if known[0] != digest:
            self.violate(
                "layouts-differ-in-a-step",
                f"step {engine._num_steps} of epoch {mesh.epoch}: {known[1]} and "
                f"{mesh.process.name} run different layouts as generation {layout.generation}",
            )
        if len(self._steps) > 4096:
            self._steps.clear()
        self._check_bytes(engine, layout)
        self._use("generation", layout.generation, content_of(layout), mesh.process)
        generation = self._groups.get(mesh.process)
        if generation != (group, layout.generation):
            if generation is not None and generation[0] == group:
                self.num_switches += mesh.rank == 0
                text = f"{mesh.process.name} switched to generation {layout.generation}"
                self.note(text)
                self._world.gaps.switched(text)
                if layout.generation < generation[1]:
                    self.violate(
                        "generation-falls",
                        f"{mesh.process.name}: {generation[1]} to {layout.generation}",
                    )
            self._groups[mesh.process] = (group, layout.generation)
            used, places = layout.used_places[mesh.rank], mesh.process.worker.places
            if 0 < places < used:
                text = f"{mesh.process.name} has {places} places, and uses {used} in generation"
                self.violate("places-exceeded", f"{text} {layout.generation}")

    def _check_bytes(self, engine: Any, layout: Layout) -> None:
        """A rank whose own disk is good never computes with wrong bytes."""
        worker = engine._mesh.process.worker
        if worker.core.checkpoint.damaged:
            return
        for layer, wanted in enumerate(bytes_of(layout, engine._held.rank)):
            contents = worker.core.slots[layer].contents
            if contents == wanted:
                continue
            own = layout.expert_of_slot[layer, layout.own_slots(engine._held.rank)]
            for slot, expert in enumerate(own.tolist()):
                if contents[slot] != wanted[slot]:
                    if self._world.rot.explains(worker.process, layer, slot, contents[slot]):
                        continue
                    self.violate(
                        "wrong-bytes",
                        f"{engine._mesh.process.name} computes expert {expert} of layer {layer} "
                        f"with wrong bytes in generation {layout.generation}",
                    )
                    return

    def _use(self, what: str, number: int, content: bytes, process: Any) -> None:
        """A living process uses a number for something: no other may use it for something else."""
        users = self._used.setdefault(what, {})
        known = users.get(number)
        if known is not None and known[0] != content:
            if any(one.alive and self._uses(one, what, number) for one in known[1]):
                self.violate(
                    f"{what}-twice",
                    f"{what} {number} is one thing for {known[1][0].name} and another for "
                    f"{process.name}",
                )
            known = None
        if known is None:
            _remember(users, number, (content, [process]))
        elif process not in known[1]:
            known[1].append(process)

    def _uses(self, process: Any, what: str, number: int) -> bool:
        """Whether a living worker still holds to a number."""
        worker = process.worker
        if worker is None:
            return False
        rank = worker.rank
        if what == "generation":
            return rank is not None and rank.engine.generation == number
        # A balancer whose store forgot cannot know what a worker holds that it has not heard.
        return worker.is_answered and worker.epochs.state.highest_epoch == number

    # Messages -----------------------------------------------------------------------------------

    def received(self, worker: Any, message: Any) -> None:
        """A worker takes a message from a balancer."""
        match message:
            case JoinEpoch():
                self._check_obeyed(worker, message)
                peers = "/".join(peer.worker for peer in message.peers).encode()
                if worker.epochs.state.is_newest(message):
                    self._use("epoch", message.epoch, peers, worker.process)
            case Stage():
                self._check_obeyed(worker, message)
                self._check_staged(worker, message)
            case Abort():
                self._check_obeyed(worker, message)

    def obeyed(self, worker: Any) -> int:
        """The highest term of what a worker was sent and took."""
        return self._obeyed.get(worker.process, 0)

    def _check_obeyed(self, worker: Any, message: Any) -> None:
        """A worker obeys no term before another; a store that forgot may have begun again."""
        highest = self.obeyed(worker)
        if message.term < highest and not self._world.leases.num_losses:
            self.violate(
                "old-term-obeyed",
                f"{worker.process.name} takes a {type(message).__name__} of term {message.term} "
                f"after one of term {highest}",
            )
        self._obeyed[worker.process] = max(highest, message.term)

    def _check_staged(self, worker: Any, stage: Stage) -> None:
        generation = stage.layout.generation
        content = content_of(stage.layout)
        if (generation, content) not in self._proposed:
            self.violate(
                "staged-before-written",
                f"{worker.process.name} is to stage generation {generation}, which no store has",
            )

    # The store ----------------------------------------------------------------------------------

    def written(self, before: Any, after: Any) -> None:
        """The store has changed."""
        if after.get("term", 0) < before.get("term", 0):
            self.violate("fence-falls", f"{before['term']} to {after.get('term', 0)}")
        for key, value in after.items():
            if before.get(key) is value:
                continue
            if key[0] == "layout":
                _remember(self._proposed, (value.generation, content_of(value)), None)
            elif key[0] == "committed":
                self._check_commit(key[1], value, after)
            elif key == ("audit", POOL):
                self._world.operators.note_records(after)
            elif key[0] == "decisions" and not value[-1].reason:
                self.violate("decision-unexplained", f"decision {value[-1].sequence} of {key[1]}")
            elif key[0] == "members":
                self._check_members(key[1], before.get(key), value, term=after["term"])

    def _check_members(self, pool: str, known: Any, stored: Any, *, term: int) -> None:
        self.note(f"epoch {stored.epoch} of {pool} is stored: {', '.join(stored.workers)}")
        if pool == POOL:
            self._world.watch.accepted(term, stored)
            self.num_opened += known is None or known.epoch != stored.epoch
        if known is not None and known.epoch > stored.epoch:
            self.violate("epoch-falls", f"{known.epoch} to {stored.epoch} in the store")

    def _check_commit(self, pool: str, generation: int, after: Any) -> None:
        layout = after.get(("layout", pool, generation))
        if layout is None:
            self.violate("committed-unknown", f"generation {generation} of {pool}")
            return
        experts = [row[row != EMPTY] for row in layout.expert_of_slot]
        covered = all(len(np.unique(row)) == layout.num_experts for row in experts)
        if not covered:
            self.violate("expert-missing", f"generation {generation} of {pool}")
        self.note(f"generation {generation} of {pool} is committed")

    def proposed(self, pool: str, _request: Any) -> None:
        """The planner makes a plan."""
        self.num_plans += 1


def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep the newest entries only: an old number that is used again is below those in use."""
    table[key] = value
    if len(table) > MAX_REMEMBERED:
        del table[next(iter(table))]


@lru_cache(maxsize=256)
def bytes_of(layout: Layout, rank: int) -> list[list[bytes]]:
    """What the slots of a rank must hold, by layer."""
    own = layout.expert_of_slot[:, layout.own_slots(rank)].tolist()
    return [[expert_bytes(layer, expert) for expert in row] for layer, row in enumerate(own)]


@lru_cache(maxsize=256)
def content_of(layout: Layout) -> bytes:
    """What a layout says, without its number."""
    shares = b"" if layout.share_of_slot is None else layout.share_of_slot.tobytes()
    return layout.expert_of_slot.tobytes() + shares
