"""How long the first layout of an epoch takes, and its moves, whatever ranks report to hold.

It is one turn of the balancer's event loop. Times are CPU times of one run; asserted is that
nothing takes many times as long as the recovery of the largest published deployment.
"""

import time

import numpy as np
import pytest

from equipoise.planning.layout import contiguous_layout
from equipoise.planning.recovery import recover, recovery_moves
from equipoise.planning.topology import ModelShape, Topology

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(900)]

MOST_TIMES_DEEPSEEK = 4.0


def halves(num_layers, num_ranks, num_slots, num_experts):
    """Half of the ranks hold the first experts twice, half the others."""
    low = np.repeat(np.arange(num_slots // 2, dtype=np.int32), 2) % num_experts
    high = (low + num_slots // 2) % num_experts
    return [np.tile(low if rank % 2 else high, (num_layers, 1)) for rank in range(num_ranks)]


def first_expert(num_layers, num_ranks, num_slots, _num_experts):
    return [np.zeros((num_layers, num_slots), dtype=np.int32)] * num_ranks


def at_random(num_layers, num_ranks, num_slots, num_experts):
    random = np.random.default_rng(0)
    shape = num_layers, num_slots
    return [random.integers(0, num_experts, shape).astype(np.int32) for _ in range(num_ranks)]


def newcomers(num_layers, num_ranks, num_slots, num_experts):
    """Half of the ranks hold a layout of their own, half nothing."""
    before = contiguous_layout(
        num_layers=num_layers,
        num_experts=num_experts,
        num_ranks=num_ranks // 2,
        slots_per_rank=num_slots,
    )
    return [*np.split(before.expert_of_slot, num_ranks // 2, axis=1), *[None] * (num_ranks // 2)]


DEEPSEEK = (first_expert, 58, 320, 1, 256)
CASES = {
    "DeepSeek-V3 on 320 ranks that all hold one expert": DEEPSEEK,
    "DeepSeek-V3 on 320 ranks that hold any experts": (at_random, 58, 320, 1, 256),
    "DeepSeek-V3 grows from 32 to 64 ranks": (newcomers, 58, 64, 9, 256),
    "128 ranks x 1 layer x 64 slots, half hold the same": (halves, 1, 128, 64, 64),
    "128 ranks x 8 layers x 64 slots, half hold the same": (halves, 8, 128, 64, 64),
    "128 ranks x 32 layers x 64 slots, half hold the same": (halves, 32, 128, 64, 64),
    "4,096 ranks x 64 layers x 1 slot, all hold one expert": (first_expert, 64, 4096, 1, 1024),
    "64 ranks x 64 layers x 64 slots, all hold one expert": (first_expert, 64, 64, 64, 64),
    "4,096 ranks x 1 layer x 16 slots, all hold one expert": (first_expert, 1, 4096, 16, 65536),
}


def recovered(hold, num_layers, num_ranks, num_slots, num_experts, *, is_fitting):
    """CPU seconds of the layout and of its moves, and how many these are."""
    committed = contiguous_layout(
        num_layers=num_layers,
        num_experts=num_experts,
        num_ranks=num_ranks if is_fitting else num_experts,
        slots_per_rank=num_slots if is_fitting else 1,
    )
    held = hold(num_layers, num_ranks, num_slots, num_experts)
    topology = Topology(
        node_of_rank=tuple(f"node-{rank // 8}" for rank in range(num_ranks)),
        slots_per_rank=num_slots,
    )
    begin_s = time.thread_time()
    layout = recover(
        held,
        load=np.random.default_rng(1).pareto(1.0, (num_layers, num_experts)),
        model=ModelShape(
            num_layers=num_layers, num_experts=num_experts, num_groups=1, expert_bytes=1
        ),
        topology=topology,
        committed=committed,
        generation=2,
    )
    planned_s = time.thread_time()
    checksums = np.zeros((num_layers, num_experts, 16), dtype=np.uint8)
    moves = recovery_moves(held, target=layout, topology=topology, checksums=checksums)
    ended_s = time.thread_time()
    return planned_s - begin_s, ended_s - planned_s, sum(map(len, moves.values()))


@pytest.mark.parametrize("is_fitting", [True, False], ids=["same ranks", "other ranks"])
def test_no_report_of_what_ranks_hold_takes_many_times_what_a_large_model_does(is_fitting, capsys):
    recovered(*DEEPSEEK, is_fitting=is_fitting)  # Compiles, or loads what is compiled.
    measured = {name: recovered(*case, is_fitting=is_fitting) for name, case in CASES.items()}
    with capsys.disabled():
        print("\nseconds of the layout and of its moves, moves:")
        for name, (layout_s, moves_s, num_moves) in measured.items():
            print(f"  {name:56} {layout_s:6.3f} {moves_s:6.3f} {num_moves:7}")
    yardstick_s = sum(next(iter(measured.values()))[:2])
    for name, (layout_s, moves_s, _) in measured.items():
        assert layout_s + moves_s <= MOST_TIMES_DEEPSEEK * yardstick_s, name
