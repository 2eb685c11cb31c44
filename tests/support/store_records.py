"""Layouts and records to put into stores and to find there again."""

from dataclasses import replace

import numpy as np

from equipoise.planning.layout import contiguous_layout
from equipoise.planning.shares import WHOLE
from equipoise.pool.records import AuditRecord, AverageRecord, DecisionRecord


def layout_of(generation, *, shift=0):
    first = contiguous_layout(
        num_layers=2, num_experts=6, num_ranks=2, slots_per_rank=4, generation=generation
    )
    relabelled = (first.expert_of_slot + shift) % first.num_experts
    return first.with_placement(relabelled, generation=generation)


def weighted(layout):
    """The same placement, with the first slot of each layer serving almost nothing."""
    shares = layout.shares().copy()
    for row, experts in zip(shares, layout.expert_of_slot, strict=True):
        other = int(np.flatnonzero(experts == experts[0])[-1])
        row[[0, other]] = [7, WHOLE - 7]
    return replace(layout, share_of_slot=shares)


def same(a, b):
    return a is not None and a.generation == b.generation and a.same_placement(b)


A_DECISION = DecisionRecord(
    time_unix_s=1.5e9,
    accepted=True,
    reason="balance grows from 0.61 to 0.93 on 12,000 assignments",
    base_generation=3,
    balancedness_current=0.61,
    balancedness_proposed=0.93,
    moves=17,
    bytes=2**33,
    algorithm="global",
    plan_ms=1.25,
    shift_detected=False,
)

ONES = AverageRecord(half_life_s=5.0, time_unix_s=9.0, weight_s=1.0, decayed_load=np.ones((2, 6)))

AN_ORDER = AuditRecord(
    time_unix_s=1.5e9, who="ann", what="pause (for the night)", accepted=True, outcome="paused"
)
