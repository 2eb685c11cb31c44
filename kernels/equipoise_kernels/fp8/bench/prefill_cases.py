"""Gate D4: attention of prompts, one from its start and several that continue cached prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise_kernels.fp8.attention.mla_prefill import (
    MlaPrefillConfig,
    PrefillInputs,
    mla_prefill_triton,
)
from equipoise_kernels.fp8.bench.bench import Bench, num_copies
from equipoise_kernels.fp8.bench.checks import backend_faults, repeat_faults, result_faults
from equipoise_kernels.fp8.bench.mla_inputs import HEADS, ROTARY
from equipoise_kernels.fp8.bench.report import Sample
from equipoise_kernels.fp8.bench.timing import TimedCall

_PLAIN = _VALUE = 128
_SCALE = (_PLAIN + ROTARY) ** -0.5

Prompt = tuple[int, int]
"""Queries, and positions with those before the first query."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompts:
    """Inputs of `mla_prefill`, with several sets of keys; each call uses one."""

    shape: Sequence[Prompt]
    """The prompts, one segment each."""
    inputs: Sequence[PrefillInputs]
    """By call."""
    out_THv: Tensor
    """Poisoned results, which all calls share."""
    lse_TH: Tensor
    """Poisoned logarithms of sums."""

    @property
    def flop(self) -> int:
        """Operations of both products over pairs of a query and a key that it sees."""
        pairs = sum(q * (length - q) + q * (q + 1) // 2 for q, length in self.shape)
        return 2 * pairs * self.lse_TH.shape[1] * (_PLAIN + ROTARY + _VALUE)

    def calls(self, config: MlaPrefillConfig | None = None) -> list[TimedCall]:
        """One launch per set of keys."""
        return [
            lambda one=one: mla_prefill_triton(  # type: ignore[misc]
                one, scale=_SCALE, out_THv=self.out_THv, lse_TH=self.lse_TH, config=config
            )
            for one in self.inputs
        ]

    def exact(self, place: int) -> Tensor:
        """Float64 results of one call, [T, H, v], one head at a time."""
        one, first_query, first_key, results = self.inputs[place], 0, 0, []
        for num_queries, length in self.shape:
            keys = slice(first_key, first_key + length)
            queries = slice(first_query, first_query + num_queries)
            own_Q = torch.arange(length - num_queries, length, device=self.lse_TH.device)
            theirs_K = torch.arange(length, device=self.lse_TH.device)
            heads = []
            for head in range(self.lse_TH.shape[1]):
                key, value = one.keys_values_NHw[keys, head].double().split(_PLAIN, dim=1)
                scores_QK = one.plain_THn[queries, head].double() @ key.T
                rotary = one.rotary_THP[queries, head].double()
                scores_QK += rotary @ one.key_rotary_NP[keys].double().T
                scores_QK.mul_(_SCALE).masked_fill_(theirs_K > own_Q[:, None], float("-inf"))
                heads.append(scores_QK.softmax(dim=1) @ value)
            results.append(torch.stack(heads, dim=1))
            first_query, first_key = first_query + num_queries, first_key + length
        return torch.cat(results)


def prompts(shape: Sequence[Prompt], generator: torch.Generator, *, heads: int = HEADS) -> Prompts:
    """Random queries, keys and values; keys that a query must not see are as large as others."""
    device = generator.device
    num_queries, num_keys = (sum(sizes) for sizes in zip(*shape, strict=True))
    queries = torch.randn(num_queries, heads, _PLAIN + ROTARY, generator=generator, device=device)
    segments, first_query, first_key = [], 0, 0
    for count, length in shape:
        segments.append([first_query, count, length - count, first_key, length, 0])
        first_query, first_key = first_query + count, first_key + length
    key_shape = (num_keys, heads, _PLAIN + _VALUE)
    inputs = [
        PrefillInputs(
            plain_THn=queries.bfloat16()[..., :_PLAIN],
            rotary_THP=queries.bfloat16()[..., _PLAIN:],
            keys_values_NHw=torch.randn(key_shape, generator=generator, device=device).bfloat16(),
            key_rotary_NP=torch.randn(
                num_keys, ROTARY, generator=generator, device=device
            ).bfloat16(),
            segments_S6=torch.tensor(segments, dtype=torch.int32, device=device),
            most_queries=max(count for count, _ in shape),
        )
        for _ in range(num_copies(2 * num_keys * heads * (_PLAIN + _VALUE)))
    ]
    out_THv = torch.full((num_queries, heads, _VALUE), float("nan"), device=device)
    lse_TH = out_THv.new_full((num_queries, heads), float("nan"))
    return Prompts(shape=tuple(shape), inputs=inputs, out_THv=out_THv, lse_TH=lse_TH)


def attention(
    bench: Bench, *, shapes: Sequence[Sequence[Prompt]] | None = None, heads: int = HEADS
) -> list[Sample]:
    """D4: by default a prompt, one that continues a long prefix, and several that are drawn."""
    if shapes is None:
        drawn = [
            (count, count + bench.rng.randrange(2048))
            for count in (bench.rng.randrange(200, 1200) for _ in range(4))
        ]
        shapes = [[(4096, 4096)], [(1024, 4096)], drawn]
    samples = []
    for place, shape in enumerate(shapes):
        given = prompts(shape, bench.generator, heads=heads)
        calls = given.calls()
        timing = bench.timer.interleaved({"mla_prefill": calls})["mla_prefill"]
        # The timed run's own outputs are checked; the last call wrote them.
        faults = result_faults(given.out_THv.flatten(0, 1), given.exact(-1).flatten(0, 1))
        faults += repeat_faults(calls[0], given.out_THv)
        faults += backend_faults(bench.timer.kernel_names(calls[0]), "mla_prefill_kernel")
        tflops = given.flop / timing.median_us / 1e6
        samples.append(
            Sample(
                gate="D4",
                shape=", ".join(f"{count} of {length}" for count, length in shape),
                value=tflops / bench.machine.bf16_tflops,
                raw={"us": timing.median_us, "spread": timing.spread, "tflops": tflops},
                faults=faults,
                is_held_out=place == 2,
            )
        )
    return samples
