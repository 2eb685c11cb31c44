"""Configurations of the exchange's kernels, and what these compile to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.all_to_all.peer_kernels import (
    order_pairs_kernel,
    receive_rows_kernel,
    send_rows_kernel,
    sum_answers_kernel,
    wait_flags_kernel,
)
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.jit import next_power_of_two
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.specialization import Specialization

VECTOR_WORDS = 4
"""Words that a thread copies at once, at most."""
ORDER_PAIRS = 1024
"""Pairs that a program orders at a time."""
ORDER_WARPS = 4
"""Warps of that program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllConfig:
    """Work of a program."""

    parts: int
    """Programs that share a slot's rows."""
    block: int
    """Words or columns that a program copies at a time."""
    num_warps: int
    """Warps per program."""


CONFIG_SPACE = tuple(
    AllToAllConfig(parts=parts, block=block, num_warps=num_warps)
    for parts, block, num_warps in product((1, 2, 4, 8), (1024, 2048, 4096), (4, 8))
)


def specializations(config: AllToAllConfig, shape: EpShape) -> list[Specialization]:
    """Specialisations of a configuration, for a buffer of one shape."""
    name = f"all_to_all {config} {shape.payload.value}"
    slots = {"NUM_RANKS": shape.num_ranks, "NUM_SLOTS": shape.slots_per_rank}
    sizes = slots | {"CAPACITY": shape.pair_rows}
    copying = configurations.options(config)
    words = {"dispatch": shape.row_words, "combine": shape.answer_words}
    order = Specialization(
        kernel=order_pairs_kernel,
        name=f"all_to_all order {shape.payload.value}",
        types={
            "slots_ptr sequence_ptr generation_ptr flag_ptr": "*i64",
            "tokens_ptr places_ptr table_ptr unknown_ptr": "*i32",
        },
        options={
            "NUM_SLOTS": shape.slots_per_rank,
            "CAPACITY": shape.pair_rows,
            "TOP_K": shape.top_k,
            "PAIRS": ORDER_PAIRS,
            "num_warps": ORDER_WARPS,
        },
    )
    waits = [
        Specialization(
            kernel=wait_flags_kernel,
            name=f"all_to_all wait for {what}",
            types={
                "addresses_ptr flag_ptr faults_ptr seen_ptr": "*i64",
                "polls_ptr table_ptr rows_ptr": "*i32",
                "flags_offset counts_offset": "i64",
            },
            multiples_of_16="flags_offset counts_offset",
            options=slots
            | {
                "PADDED_RANKS": next_power_of_two(shape.num_ranks),
                "PADDED_SLOTS": next_power_of_two(shape.slots_per_rank),
                "IS_DISPATCH": what == "dispatch",
                "num_warps": 1,
            },
            flags="acquire",
        )
        for what in words
    ]
    sends = [
        Specialization(
            kernel=send_rows_kernel,
            name=f"{name} {what}",
            types={
                "addresses_ptr flag_ptr": "*i64",
                "words_ptr tokens_ptr table_ptr unknown_ptr done_ptr": "*i32",
                "slab_offset counts_offset flags_offset": "i64",
            },
            multiples_of_16="slab_offset counts_offset flags_offset",
            options=sizes
            | copying
            | {
                "PADDED": next_power_of_two(shape.num_slots),
                "MAX_TOKENS": shape.max_tokens,
                "WORDS": num_words,
                "VECTOR": math.gcd(num_words, VECTOR_WORDS),
                "IS_DISPATCH": what == "dispatch",
            },
            flags="release",
        )
        for what, num_words in words.items()
    ]
    return [
        order,
        *sends,
        *waits,
        Specialization(
            kernel=receive_rows_kernel,
            name=f"{name} receive",
            types={
                "addresses_ptr flag_ptr": "*i64",
                "out_ptr table_ptr": "*i32",
                "slab_offset": "i64",
            },
            multiples_of_16="slab_offset",
            options=sizes | copying | {"WORDS": shape.row_words},
        ),
        Specialization(
            kernel=sum_answers_kernel,
            name=f"{name} sum",
            types={
                "addresses_ptr flag_ptr": "*i64",
                "places_ptr": "*i32",
                "weights_ptr out_ptr": "*fp32",
                "slab_offset": "i64",
            },
            multiples_of_16="slab_offset",
            options={
                "NUM_RANKS": shape.num_ranks,
                "CAPACITY": shape.pair_rows,
                "num_warps": config.num_warps,
                "BLOCK": config.block,
                "DIM": shape.dim,
                "TOP_K": shape.top_k,
                "IS_BF16": shape.payload.answer_dtype is torch.bfloat16,
                "IS_WEIGHTED": True,
            },
            fuses_products=False,
        ),
    ]


ALL_TO_ALL: KernelOperation[Callable[..., None], AllToAllConfig] = KernelOperation(
    name="all_to_all",
    backends={},  # `opening` opens buffers, and ranks agree on a backend there
    configs=CONFIG_SPACE,
    specializations=specializations,
)
