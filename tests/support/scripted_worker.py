"""`ScriptedWorker`: a worker's side of the link, without a process, a group or a model."""

import hashlib
from dataclasses import replace
from functools import cache

import numpy as np

from equipoise.planning.arrays import EMPTY
from equipoise.planning.counters import LoadReport
from equipoise.planning.moves import checksums_digest
from equipoise.planning.node_traffic import NodeCounts
from equipoise.planning.shares import WHOLE
from equipoise.planning.topology import ModelShape
from equipoise.wire.balancer_messages import Abort, JoinEpoch, Stage
from equipoise.wire.messages import (
    Heartbeat,
    Hello,
    LayoutRejected,
    RankStats,
    Report,
    RunningState,
    Serving,
    Staged,
    Switched,
)

MODEL = ModelShape(num_layers=3, num_experts=32, num_groups=8, expert_bytes=1000)


def expert_checksum(layer: int, expert: int) -> bytes:
    if expert == EMPTY:
        return bytes(16)
    return hashlib.blake2b(f"{layer}/{expert}".encode(), digest_size=16).digest()


@cache
def expert_table(model: ModelShape):
    """The checksums of all experts in the checkpoint, uint8 [layers, experts, 16]."""
    table = [
        [list(expert_checksum(layer, expert)) for expert in range(model.num_experts)]
        for layer in range(model.num_layers)
    ]
    return np.array(table, dtype=np.uint8)


def grown(counts: NodeCounts | None, per_step: NodeCounts, *, steps: int) -> NodeCounts:
    """Counts after some more steps."""
    rows = (0,) * len(per_step.rows_by_nodes) if counts is None else counts.rows_by_nodes
    added = zip(rows, per_step.rows_by_nodes, strict=True)
    return NodeCounts(
        rows_by_nodes=tuple(before + steps * more for before, more in added),
        **{
            name: (getattr(counts, name) if counts else 0) + steps * getattr(per_step, name)
            for name in ("remote_nodes", "direct_rows", "sent_rows", "sent_outputs")
        },
    )


def rows_of_a_step(*, is_two_hop):
    """A row reaches 3 or 4 nodes, and needs 6 ranks of others."""
    return NodeCounts(
        rows_by_nodes=(0, 0, 0, 1, 1),
        remote_nodes=5,
        direct_rows=12,
        sent_rows=5 if is_two_hop else 12,
        sent_outputs=12,
    )


def make_hello(name="worker-0", *, node="node-0", boot_id="boot-1", **changes) -> Hello:
    values = {
        "pool": "tiny",
        "worker": name,
        "boot_id": boot_id,
        "node": node,
        "address": f"{name}:1",
        "rendezvous_address": f"{name}:2",
        "model": MODEL,
        "slots_per_rank": 10,
        "num_ranks": 4,
        "checkpoint_fingerprint": "abc",
        "experts_digest": checksums_digest(expert_table(changes.get("model", MODEL))),
        "device": "cuda:0 (NVIDIA H200)",
        "kernels": "triton, gemm_large=deep_gemm",
        "cache_token_bytes": 70_272,
    }
    return Hello(**{**values, **changes})


class ScriptedWorker:
    """Answers the balancer's messages as a worker does, one message at a time."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.join_epoch: JoinEpoch | None = None
        self.layout = None
        self.staged: Stage | None = None
        self.assignments = None
        self.steps = 0
        self.busy_us = 0
        self.busy_us_a_step = 100
        self.step_us = self.step_us_a_step = 0
        self.nodes_a_step = None
        self.nodes = None
        self.is_lopsided = False

    @property
    def rank(self) -> int:
        return self.join_epoch.rank

    @property
    def epoch(self) -> int:
        return self.join_epoch.epoch

    def take(self, message) -> None:
        match message:
            case JoinEpoch():
                if self.join_epoch is None or self.join_epoch.epoch != message.epoch:
                    self.run(message.layout)
                self.join_epoch = message
            case Stage():
                self.staged = message
            case Abort():
                if self.staged is not None and self.staged.layout.generation == message.generation:
                    self.staged = None

    def run(self, layout) -> None:
        self.layout = layout
        self.staged = None
        self.assignments = np.zeros((layout.num_layers, layout.slots_per_rank), dtype=np.uint64)

    def own(self, table):
        first = self.rank * self.layout.slots_per_rank
        return table[:, first : first + self.layout.slots_per_rank]

    def checksums(self):
        experts = self.own(self.layout.expert_of_slot)
        checksums_of_slots = [
            [list(expert_checksum(layer, int(e))) for e in row] for layer, row in enumerate(experts)
        ]
        return np.array(checksums_of_slots, dtype=np.uint8)

    def expert_checksums(self):
        return None if self.rank else expert_table(self.hello.model)

    def serving(self) -> Serving:
        return Serving(
            epoch=self.epoch,
            rank=self.rank,
            generation=self.layout.generation,
            checksums=self.checksums(),
            steps="captured; rows by deep_ep",
            expert_checksums=self.expert_checksums(),
        )

    def serve_traffic(self, expert_load) -> None:
        """Receive this rank's share of [layers, experts] assignments, as replicas serve them."""
        table = self.layout.expert_of_slot
        share = expert_load / self.layout.replica_counts()
        per_slot = np.take_along_axis(share, table, axis=1)
        if self.layout.share_of_slot is not None:
            per_slot = np.take_along_axis(expert_load, table, axis=1)
            per_slot = per_slot * self.layout.share_of_slot / WHOLE
        if self.is_lopsided:
            # The first replica gets all, whatever the layout was made for.
            first = np.stack(
                [
                    np.isin(np.arange(len(row)), np.unique(row, return_index=True)[1])
                    for row in table
                ]
            )
            per_slot = np.take_along_axis(expert_load, table, axis=1) * first
        per_slot = per_slot * (table != EMPTY)
        self.assignments = self.assignments + self.own(per_slot).round().astype(np.uint64)
        self.steps += 10
        self.busy_us += 10 * self.busy_us_a_step
        self.step_us += 10 * self.step_us_a_step
        if self.nodes_a_step is not None:
            self.nodes = grown(self.nodes, self.nodes_a_step, steps=10)

    def report(self) -> Report:
        return Report(
            load=LoadReport(
                boot_id=self.hello.boot_id,
                epoch=self.epoch,
                rank=self.rank,
                generation=self.layout.generation,
                phase=self.hello.phase,
                assignments=self.assignments.copy(),
            ),
            stats=RankStats(
                steps=self.steps,
                tokens_processed=7,
                tokens_generated=5,
                median_step_us=900,
                active_requests=3,
                queued_requests=1,
                busy_us=self.busy_us,
                step_us=self.step_us,
                nodes=self.nodes,
            ),
        )

    def answer_staged(self) -> Staged:
        return Staged(
            epoch=self.epoch,
            rank=self.rank,
            generation=self.staged.layout.generation,
            peer_bytes=0,
            checkpoint_bytes=0,
            duration_us=1,
        )

    def reject(self, reason: str) -> LayoutRejected:
        return LayoutRejected(
            epoch=self.epoch,
            rank=self.rank,
            generation=self.staged.layout.generation,
            reason=reason,
        )

    def switch(self, *, step: int = 70) -> Switched:
        self.run(self.staged.layout)
        return Switched(
            epoch=self.epoch,
            rank=self.rank,
            generation=self.layout.generation,
            step=step,
            stall_us=100 + self.rank,
            median_step_us=900,
            checksums=self.checksums(),
        )

    def heartbeat(self, sequence: int = 1) -> Heartbeat:
        return Heartbeat(
            epoch=self.epoch if self.join_epoch else 0,
            generation=self.layout.generation if self.layout else 0,
            staged_generation=self.staged.layout.generation if self.staged else 0,
            sequence=sequence,
        )

    def reconnecting(self, **changes) -> Hello:
        """The Hello of a new stream of the same process."""
        running = RunningState(
            epoch=self.epoch,
            rank=self.rank,
            workers=tuple(peer.worker for peer in self.join_epoch.peers),
            staged_generation=self.staged.layout.generation if self.staged else 0,
            layout=self.layout,
            checksums=self.checksums(),
            expert_checksums=self.expert_checksums(),
        )
        return replace(self.hello, running=running, **changes)
