"""Times one MoE layer of a config in FP8: gate, routing, routed and shared experts, combination.

A token counts once, although it goes to several experts. Weights are random; every expert is in a
slot of one device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise_kernels.formats import ScaleFormat
from equipoise_kernels.fp8.bench.timing import Timer
from equipoise_kernels.fp8.quant.group_quant import group_quant
from equipoise_model.config import ModelConfig
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.fp8.block import Fp8MoE

DECODE_ROWS = 128
PREFILL_ROWS = 4096

_WEIGHT_SCALE = 0.02 / 448


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTiming:
    """A layer's step: median time in microseconds, and spread over replays."""

    phase: str
    """"decode" or "prefill"."""
    rows: int
    median_us: float
    spread: float

    @property
    def tokens_per_s(self) -> float:
        """Rows through this one layer per second."""
        return self.rows * 1e6 / self.median_us


def time_layer(
    config: ModelConfig, *, timer: Timer, generator: torch.Generator, rows: dict[str, int]
) -> list[LayerTiming]:
    """Time a MoE layer for each phase's number of rows, on the generator's device.

    `config` must have `quantization_config`, and sizes that FP8 supports.
    """
    layer = random_layer(config, generator=generator)
    here = ExpertParallel.local(config, device=generator.device)
    timings = []
    for phase, num_rows in rows.items():
        x_TD = torch.randn(
            num_rows, config.hidden_size, generator=generator, device=generator.device
        ).bfloat16()
        timing = timer.interleaved({phase: [_Step(layer, x_TD, here)]})[phase]
        timings.append(
            LayerTiming(
                phase=phase, rows=num_rows, median_us=timing.median_us, spread=timing.spread
            )
        )
    return timings


def random_layer(config: ModelConfig, *, generator: torch.Generator) -> Fp8MoE:
    """A layer with random codes and a gate that spreads rows over all experts."""
    with generator.device:
        layer = Fp8MoE(config, num_slots=config.num_placed_experts, num_spare=0)
    layer.requires_grad_(requires_grad=False)
    layer.gate.weight.normal_(std=0.02, generator=generator)
    slots, shared = layer.experts, layer.shared_experts
    linear = () if shared is None else (shared.gate_proj, shared.up_proj, shared.down_proj)
    for codes in (slots.gate_up.codes, slots.down.codes, *(one.weight for one in linear)):
        _fill_codes(codes, generator)
    for scales in (
        slots.gate_up.scales,
        slots.down.scales,
        *(one.weight_scale_inv for one in linear),
    ):
        scales.fill_(_WEIGHT_SCALE)
    return layer


class _Step:
    """One step of the layer; its counters are discarded."""

    def __init__(self, layer: Fp8MoE, x_TD: Tensor, experts: ExpertParallel) -> None:
        self._layer = layer
        self._x_TD = x_TD
        self._experts = experts

    @torch.no_grad()
    def __call__(self) -> Tensor:
        rows = group_quant(self._x_TD, scale_format=ScaleFormat.FP32)
        step = self._experts.begin_step(num_tokens=len(self._x_TD))
        y_TD: Tensor = self._layer(self._x_TD, rows, step, num_valid=None)
        return y_TD


def _fill_codes(codes: Tensor, generator: torch.Generator) -> None:
    """Fill with normal numbers in FP8, one expert at a time: a slab may fill most of a device."""
    for part in codes if codes.dim() == 3 else (codes,):
        values = torch.randn(part.shape, generator=generator, device=part.device) * 100
        part.copy_(values.clamp(-448, 448))
