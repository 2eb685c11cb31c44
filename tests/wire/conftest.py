"""A valid message of each kind, and its conversion. Tests corrupt them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from equipoise.planning.counters import LoadReport
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.moves import CheckpointSource, Move, RankSource
from equipoise.planning.node_traffic import NodeCounts
from equipoise.planning.phase import Phase
from equipoise.planning.topology import ModelShape
from equipoise.wire.balancer_messages import (
    Abort,
    HeartbeatAck,
    JoinEpoch,
    Peer,
    Rejection,
    Stage,
    TermConfirmed,
)
from equipoise.wire.convert import from_balancer, from_worker
from equipoise.wire.messages import (
    GroupLost,
    Heartbeat,
    Hello,
    LayoutRejected,
    Leaving,
    RankStats,
    Report,
    RunningState,
    Serving,
    Staged,
    Switched,
)

MODEL = ModelShape(num_layers=3, num_experts=8, num_groups=4, expert_bytes=4096)
HELLO = Hello(
    pool="decode",
    worker="worker-1",
    boot_id="boot-7",
    node="node-0",
    address="10.0.0.7:7071",
    rendezvous_address="worker-1.pool:29500",
    model=MODEL,
    slots_per_rank=5,
    num_ranks=2,
    checkpoint_fingerprint="0badcafe",
    experts_digest=bytes(range(16)),
    host="machine-17",
    zone="zone-b",
    device="cuda:0 (NVIDIA H200)",
    kernels="triton, gemm_large=scaled_mm",
    engine="vLLM 0.33.0",
    max_replicas=1023,
    weights_version=2,
    cache_token_bytes=40_016,
    backends=("gemm=triton|reference", "gemm_large=scaled_mm|triton|reference"),
    highest_epoch=58,
    highest_generation=9,
    phase=Phase.DECODE,
    latent_form="v1/0badcafe/61x576:bfloat16/64/fast",
    block_tokens=64,
)
LAYOUT = contiguous_layout(num_layers=3, num_experts=8, num_ranks=2, slots_per_rank=5, generation=4)
RUNS = replace(LAYOUT, generation=3, expert_of_slot=LAYOUT.expert_of_slot[:, ::-1])
"""The layout that the worker runs, from which a stage may send a change."""
WAVE = RUNS.expert_of_slot.copy()
WAVE[1, [2, 5]] = WAVE[1, [5, 2]]
CHECKSUMS = np.arange(3 * 5 * 16, dtype=np.uint8).reshape(3, 5, 16)
STATS = RankStats(
    steps=9,
    tokens_processed=100,
    tokens_generated=40,
    median_step_us=12_000,
    active_requests=3,
    queued_requests=1,
    max_requests=128,
    pending_prompt_tokens=5_000,
    pending_prompt_pairs=12_500_000,
    parity_tokens=14_800,
    nodes=NodeCounts(
        rows_by_nodes=(0, 40, 7), remote_nodes=30, direct_rows=60, sent_rows=30, sent_outputs=55
    ),
)
REPORT = Report(
    load=LoadReport(
        boot_id="boot-7",
        epoch=1,
        rank=1,
        generation=4,
        phase=Phase.MIXED,
        assignments=np.arange(15, dtype=np.uint64).reshape(3, 5),
    ),
    stats=STATS,
)
RUNNING = RunningState(
    epoch=2,
    rank=1,
    workers=("worker-0", "worker-1"),
    staged_generation=5,
    layout=LAYOUT,
    checksums=CHECKSUMS,
    steps="captured; rows by triton",
)
EXPERT_CHECKSUMS = np.arange(3 * 8 * 16, dtype=np.uint16).astype(np.uint8).reshape(3, 8, 16)
SERVING = Serving(
    epoch=1,
    rank=0,
    generation=4,
    checksums=CHECKSUMS,
    steps="captured",
    expert_checksums=EXPERT_CHECKSUMS,
)
STAGED = Staged(
    epoch=1, rank=1, generation=5, peer_bytes=8192, checkpoint_bytes=4096, duration_us=77
)
SWITCHED = Switched(
    epoch=1,
    rank=1,
    generation=5,
    step=0,
    stall_us=800,
    median_step_us=12_000,
    checksums=CHECKSUMS,
)
JOIN_EPOCH = JoinEpoch(
    epoch=1,
    rank=1,
    peers=(
        Peer(rank=0, address="10.0.0.6:7071", node="node-0", worker="worker-0"),
        Peer(rank=1, address="10.0.0.7:7071", node="node-0", worker="worker-1"),
    ),
    rendezvous_address="10.0.0.6:29500",
    layout=LAYOUT,
    report_interval_s=1.0,
    heartbeat_interval_s=0.5,
    term=3,
    join_timeout_s=90.0,
)
STAGE = Stage(
    epoch=1,
    layout=LAYOUT,
    base_generation=3,
    moves=(
        Move(
            layer=2,
            slot=5,
            expert=5,
            checksum=b"0123456789abcdef",
            sources=(RankSource(rank=0), CheckpointSource()),
        ),
    ),
    timeout_s=30.0,
    term=3,
    traceparent=f"00-{1:032x}-{2:016x}-01",
)

GROUP_LOST = GroupLost(
    epoch=2,
    reason="worker-0 died",
    expert_of_slot=np.arange(15, dtype=np.int32).reshape(3, 5) % 8,
    generation=4,
    unreached=("worker-0", "worker-2"),
)
HEARTBEAT = Heartbeat(
    epoch=1,
    generation=4,
    staged_generation=5,
    sequence=12,
    draining=True,
    idle=True,
    weights_version=3,
)

CHANGE = Stage(
    epoch=1,
    layout=replace(RUNS, generation=4, expert_of_slot=WAVE),
    base_generation=3,
    base=RUNS,
    moves=(),
    timeout_s=30.0,
    term=3,
)

FROM_WORKERS = [
    HELLO,
    replace(HELLO, running=RUNNING, highest_term=3),
    SERVING,
    REPORT,
    replace(REPORT, heartbeat=HEARTBEAT),
    STAGED,
    LayoutRejected(epoch=1, rank=0, generation=5, reason="expert 3 of layer 1: checksum differs"),
    LayoutRejected(epoch=1, rank=0, generation=5, reason="epoch 58 was before", highest_epoch=58),
    SWITCHED,
    HEARTBEAT,
    Heartbeat(epoch=0, generation=0, staged_generation=0, sequence=0),
    Leaving(reason="Ctrl-C"),
    Leaving(reason="step 7 failed", failed=True),
    GROUP_LOST,
    replace(HELLO, group_lost=GROUP_LOST, highest_term=3),
]
FROM_BALANCER = [
    JOIN_EPOCH,
    replace(JOIN_EPOCH, moves=STAGE.moves, meet_timeout_s=12.5),
    STAGE,
    replace(STAGE, moves=()),
    CHANGE,
    Abort(epoch=1, generation=5, reason="rank 0 rejected", term=3),
    TermConfirmed(term=3, replaced_term=2**31 - 1),
    HeartbeatAck(sequence=12),
    Rejection(reason="the pool is complete", fatal=True),
    Rejection(reason="it follows", fatal=True, not_leading=True, leader_address="10.0.0.9:7070"),
]


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


def received_by_balancer(message):
    hello = None if message.HasField("hello") else HELLO
    return from_worker(over_the_wire(message), hello=hello)


def received_by_worker(message):
    return from_balancer(over_the_wire(message), hello=HELLO, running=RUNS)


@pytest.fixture(params=FROM_WORKERS, ids=lambda value: type(value).__name__)
def said_by_worker(request):
    return request.param


@pytest.fixture(params=FROM_BALANCER, ids=lambda value: type(value).__name__)
def said_by_balancer(request):
    return request.param


@pytest.fixture(scope="session")
def good():
    """The values by name, and both ends of the wire."""
    return SimpleNamespace(
        hello=HELLO,
        reconnecting=replace(HELLO, running=RUNNING),
        running=RUNNING,
        layout=LAYOUT,
        serving=SERVING,
        report=REPORT,
        staged=STAGED,
        switched=SWITCHED,
        heartbeat=HEARTBEAT,
        join_epoch=JOIN_EPOCH,
        group_lost=GROUP_LOST,
        stage=STAGE,
        change=CHANGE,
        from_workers=FROM_WORKERS,
        from_balancer=FROM_BALANCER,
        received_by_balancer=received_by_balancer,
        received_by_worker=received_by_worker,
    )
