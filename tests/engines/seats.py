"""Seats of all ranks in one process, on collectives in memory."""

import time

import numpy as np
import torch

from equipoise.engines.lockstep import LockstepError
from equipoise.engines.model import EngineModel
from equipoise.engines.seat import EngineSeat
from equipoise.engines.slots import EngineSlots
from equipoise.engines.tables import replica_tables
from equipoise.planning.topology import ModelShape

BOUND_S = 20.0


class Rendezvous:
    """What ranks contributed to their n-th collective."""

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self.rows = {}
        self.broken = set()
        """Ranks whose collectives fail."""


class MemoryLockstep:
    """As `Lockstep`; a result is read after all ranks have contributed."""

    def __init__(self, rendezvous, rank):
        self._rendezvous, self.rank, self.num_ranks = rendezvous, rank, rendezvous.num_ranks
        self._number = 0

    def _begin(self, row, combine):
        self._number += 1
        rows = self._rendezvous.rows.setdefault(self._number, {})
        rows[self.rank] = row.clone()
        rendezvous, rank = self._rendezvous, self.rank

        class Pending:
            def result(self):
                if rank in rendezvous.broken:
                    raise LockstepError("not all ranks answered")
                assert len(rows) == rendezvous.num_ranks, "a rank would wait here"
                return combine([rows[number] for number in range(rendezvous.num_ranks)])

        return Pending()

    def gather(self, row):
        return self._begin(row, torch.stack)

    def sum(self, values):
        return self._begin(values, lambda rows: torch.stack(rows).sum(0))


class Ranks:
    """Ranks of an engine that count one assignment for each slot and pass."""

    def __init__(
        self,
        table,
        *,
        num_experts,
        num_ranks=2,
        seed_of=lambda layer, expert: 0,
        names="w",
        on_ready=None,
        lockstep_of=None,
        counted_rows=None,
    ):
        self.table = np.asarray(table, dtype=np.int32)
        self.num_ranks = num_ranks
        self.rendezvous = Rendezvous(num_ranks)
        self.names = names
        self.ready, self.committed = [], {rank: [] for rank in range(num_ranks)}
        self.switched, self.stopped, self.rejected, self.based = [], [], [], []
        self.tensors = {rank: self._tensors(rank, seed_of) for rank in range(num_ranks)}
        self.lockstep_of = lockstep_of or (lambda rank: MemoryLockstep(self.rendezvous, rank))
        self.on_ready = on_ready or self.ready.append
        self.counted_rows = counted_rows or range(len(self.table))
        self.seats = [self._seat(rank, num_experts) for rank in range(num_ranks)]

    def _own(self, rank):
        num = self.table.shape[1] // self.num_ranks
        return slice(rank * num, (rank + 1) * num)

    def _tensors(self, rank, seed_of):
        return [
            [
                torch.tensor([[e, layer, seed_of(layer, e)] for e in row], dtype=torch.bfloat16),
                torch.tensor([[float(e)] for e in row]),
            ]
            for layer, row in enumerate(self.table[:, self._own(rank)].tolist())
        ]

    def _seat(self, rank, num_experts):
        slots = [EngineSlots(tensors) for tensors in self.tensors[rank]]
        seat = EngineSeat(
            EngineModel(
                engine="test 1",
                shape=ModelShape(
                    num_layers=len(slots),
                    num_experts=num_experts,
                    num_groups=1,
                    expert_bytes=slots[0].expert_bytes,
                ),
                expert_of_slot=self.table,
                slots=slots,
                tables=lambda layout: replica_tables(layout, max_replicas=8),
                commit=self.committed[rank].append,
                max_replicas=8,
                counted_rows=self.counted_rows,
            ),
            self.lockstep_of(rank),
            worker=f"{self.names}-{rank}",
            on_ready=self.on_ready,
            round_passes=1,
            load_rounds=2,
            first_pause_s=0.02,
        )
        seat.on_switch = lambda switch: self.switched.append((rank, switch))
        seat.on_baseline = lambda: self.based.append(rank)
        seat.on_stop = lambda reason: self.stopped.append((rank, reason))
        seat.on_reject = lambda rejected: self.rejected.append((rank, rejected))
        return seat

    def step(self, passes=1, *, load=None):
        for _ in range(passes):
            for seat in self.seats:
                counted = torch.ones(self.table.shape, dtype=torch.int32)
                seat.count(counted if load is None else load)
                seat.on_step()

    def until_ready(self, *, load=None):
        end_s = time.monotonic() + BOUND_S
        while len(self.ready) < self.num_ranks and time.monotonic() < end_s:
            self.step(load=load)
            if any(seat.stopped for seat in self.seats):
                return self
            time.sleep(0.001)
        return self

    def layout(self, table, *, after=1):
        seat = self.seats[0]
        return seat.held.contents.layout.with_placement(
            np.asarray(table, dtype=np.int32), generation=seat.epoch + after
        )

    def staged(self, rank, layout):
        """A generation with the bytes that the other ranks have."""
        seat = self.seats[rank]
        base, own = seat.held.contents, layout.own_slots(rank)
        changed = np.argwhere(
            layout.expert_of_slot[:, own] != base.layout.expert_of_slot[:, own]
        ).tolist()
        payloads, sums = {}, {}
        for layer, slot in changed:
            expert = int(layout.expert_of_slot[layer, own][slot])
            holder = int(np.flatnonzero(base.layout.expert_of_slot[layer] == expert)[0])
            source = self.seats[holder // base.layout.slots_per_rank]
            payloads[layer, slot] = source.held.read(layer=layer, expert=expert)
            sums[layer, slot] = seat.table[layer, expert].tobytes()
        return seat.held.prepare(base, base.changed(layout, sums), payloads)

    def experts(self, rank):
        """What the slots of a rank hold by their own bytes, [layers, slots]."""
        return [tensors[1][:, 0].int().tolist() for tensors in self.tensors[rank]]
