"""Tests whether a backend can be used here: its library, the device, and its results.

Every backend but the reference must solve a small problem before `selection` offers it: a library
that imports does not necessarily work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from equipoise_kernels.formats import (
    CODE,
    QuantizedRows,
    QuantizedWeight,
    ScaleFormat,
    empty_rows,
    weight_scale_shape,
)
from equipoise_kernels.fp8 import selection
from equipoise_kernels.fp8.all_to_all import deep_ep, peer
from equipoise_kernels.fp8.all_to_all.buffer import EpBuffer
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.all_to_all.window import virtual_windows
from equipoise_kernels.fp8.attention import libraries as attention_libraries
from equipoise_kernels.fp8.attention.latent_write import LATENT_WRITE
from equipoise_kernels.fp8.attention.latents import PlainLatents
from equipoise_kernels.fp8.attention.mla_decode import MLA_DECODE
from equipoise_kernels.fp8.attention.mla_merge import AttentionOutput
from equipoise_kernels.fp8.attention.mla_prefill import MLA_PREFILL, PrefillInputs
from equipoise_kernels.fp8.gemm.dense import GEMM, GEMM_LARGE
from equipoise_kernels.fp8.gemm.grouped import GROUPED_GEMM
from equipoise_kernels.fp8.gemm.schedule import MaskedRows
from equipoise_kernels.fp8.jit import is_interpreting, triton_version
from equipoise_kernels.fp8.moe.permute import COMBINE, PERMUTE
from equipoise_kernels.fp8.moe.replica_balance import REPLICA_BALANCE
from equipoise_kernels.fp8.moe.route import ROUTE
from equipoise_kernels.fp8.moe.routes import RoutingRule, SlotTables, empty_routes
from equipoise_kernels.fp8.moe.row_order import ROW_ORDER, RowOrder, most_rows
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.quant.group_quant import GROUP_QUANT, group_quant_reference
from equipoise_kernels.fp8.quant.rms_norm_quant import RMS_NORM_QUANT
from equipoise_kernels.fp8.quant.silu_mul_quant import SILU_MUL_QUANT
from equipoise_kernels.fp8.quant.weight_quant import (
    DEQUANTIZE_WEIGHT,
    QUANTIZE_WEIGHT,
    quantize_weight_reference,
)
from equipoise_kernels.fp8.selection import missing_library
from equipoise_kernels.numerics import difference

MAX_DIFFERENCE = 1e-3
HOPPER = (9, 0)
_PATIENCE_S = 30.0

LIBRARIES: Mapping[str, Callable[[], str | None]] = {
    "scaled_mm": partial(
        missing_library,
        "torch",
        "ops.aten._scaled_mm_v2.out",
        "nn.functional.ScalingType",
        "nn.functional.SwizzleType",
    ),
    "deep_gemm": partial(missing_library, "deep_gemm", "fp8_gemm_nt"),
    "deep_ep": partial(missing_library, "deep_ep", "Buffer.low_latency_dispatch"),
    "flash_mla": partial(
        missing_library, "flash_mla", "flash_mla_with_kvcache", "get_mla_metadata"
    ),
    "flashinfer": partial(missing_library, "flashinfer.mla", "BatchMLAPagedAttentionWrapper"),
}


def start_process() -> selection.Selection:
    """Select this process's backends by EQUIPOISE_KERNELS and the self-tests, and start them.

    Raises:
        KernelsUnavailableError: the setting names a backend that does not exist or cannot run.
    """
    chosen = selection.resolve(os.environ.get(selection.VARIABLE, selection.AUTO), obstacle)
    selection.start(chosen)
    return chosen


def obstacle(operation: str, backend: str) -> str | None:
    """Why a backend cannot compute an operation on this process's device, or None."""
    if backend == "reference":
        return None
    reason = _missing_library(backend) or _wrong_device(backend)
    if reason:
        return reason
    if backend == "deep_ep" and not dist.is_initialized():
        # Only all ranks together can try it; they do when they open a buffer.
        return None
    try:
        result, expected = _solve(operation, backend), _solve(operation, "reference")
    except Exception as error:  # noqa: BLE001  libraries fail in their own ways; the reason is kept
        return f"its self-test failed with {type(error).__name__}: {error}"
    apart = difference(result, expected)
    if not apart < MAX_DIFFERENCE:
        return f"its self-test's result is {apart:.1e} away from the reference"
    return None


def _missing_library(backend: str) -> str | None:
    if backend == "triton":
        return None if triton_version() else "triton is not installed (extra `kernels`)"
    return LIBRARIES[backend]()


def _wrong_device(backend: str) -> str | None:
    if backend == "triton" and is_interpreting():
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != HOPPER:
        return f"the device has compute capability {capability}, not {HOPPER}"
    return None


def _device() -> torch.device:
    return torch.device("cpu" if is_interpreting() else "cuda")


def _solve(operation: str, backend: str) -> Tensor:
    """An operation's result on its small problem, always the same."""
    return _PROBLEMS[operation](backend)


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16).to(_device())


def _rows(*shape: int) -> QuantizedRows:
    out = empty_rows(shape, device=_device())
    x = _random(*shape).flatten(0, -2)
    flat = QuantizedRows(codes=out.codes.flatten(0, -2), scales=out.scales.flatten(0, -2))
    group_quant_reference(x, scale_format=ScaleFormat.FP32, out=flat)
    return out


def _weight(*shape: int) -> QuantizedWeight:
    out = _empty_weight(shape)
    quantize_weight_reference(_random(*shape, seed=1), scale_format=ScaleFormat.FP32, out=out)
    return out


def _empty_weight(shape: tuple[int, ...]) -> QuantizedWeight:
    return QuantizedWeight(
        codes=torch.empty(shape, dtype=CODE, device=_device()),
        scales=torch.empty(weight_scale_shape(shape), device=_device()),
    )


def _group_quant(backend: str) -> Tensor:
    out = empty_rows((9, 256), device=_device())
    GROUP_QUANT.backends[backend](_random(9, 256), scale_format=ScaleFormat.UE8M0, out=out)
    return out.dequantized()


def _rms_norm_quant(backend: str) -> Tensor:
    out = empty_rows((3, 256), device=_device())
    RMS_NORM_QUANT.backends[backend](
        _random(3, 256),
        _random(256, seed=1),
        eps=1e-6,
        residual_MD=_random(3, 256, seed=2),
        scale_format=ScaleFormat.FP32,
        out=out,
    )
    return out.dequantized()


def _silu_mul_quant(backend: str) -> Tensor:
    out = empty_rows((9, 256), device=_device())
    SILU_MUL_QUANT.backends[backend](
        _random(9, 512), rows_per_group=None, scale_format=ScaleFormat.FP32, out=out
    )
    return out.dequantized()


def _weight_quant(backend: str) -> Tensor:
    out = _empty_weight((192, 256))
    QUANTIZE_WEIGHT.backends[backend](_random(192, 256), scale_format=ScaleFormat.FP32, out=out)
    values = torch.empty(192, 256, device=_device())
    DEQUANTIZE_WEIGHT.backends[backend](out, out=values)
    return values


def _gemm(backend: str, operation: KernelOperation[Any, Any] = GEMM, num_rows: int = 9) -> Tensor:
    out = torch.empty(num_rows, 256, dtype=torch.bfloat16, device=_device())
    operation.backends[backend](_rows(num_rows, 256), _weight(256, 256), out=out)
    return out


def _grouped_gemm(backend: str) -> Tensor:
    counts = torch.tensor([9, 0], dtype=torch.int32, device=_device())
    slots = torch.tensor([2, 0], dtype=torch.int32, device=_device())
    out = torch.zeros(2, 16, 128, dtype=torch.bfloat16, device=_device())
    GROUPED_GEMM.backends[backend](
        _rows(2, 16, 256),
        _weight(3, 128, 256),
        slots,
        schedule=MaskedRows(rows_of_group=counts),
        out=out,
    )
    return out


def _all_to_all(backend: str) -> Tensor:
    """Send rows through slots that double them: between two virtual ranks, or all real ones."""
    x, slots = _random(3, 256), torch.tensor([[0, 2], [3, 1], [1, -1]], device=_device())
    weights = torch.tensor([[0.5, 0.25], [1.0, 2.0], [3.0, 9.0]], device=_device())
    if backend == "reference":
        return 2 * x.float() * (weights * (slots >= 0)).sum(dim=1, keepdim=True)
    shape = EpShape(
        rank=0, num_ranks=2, slots_per_rank=2, top_k=2, dim=256, max_tokens=3, payload=Payload.BF16
    )
    if backend == "deep_ep":
        return deep_ep.doubled(x, slots, weights)
    buffers = [
        EpBuffer(
            replace(shape, rank=rank),
            peer.PeerBackend(replace(shape, rank=rank), window, timeout_s=_PATIENCE_S),
            device=_device(),
        )
        for rank, window in enumerate(virtual_windows(shape, device=_device()))
    ]
    arriving = [buffer.begin_dispatch(x, slots) for buffer in buffers]
    returning = []
    for buffer, came in zip(buffers, [receive() for receive in arriving], strict=True):
        assert isinstance(came.rows, Tensor)
        returning.append(buffer.begin_combine(2 * came.rows, came.handle, weights_TK=weights))
    return [receive() for receive in returning][1]


def _route(backend: str) -> Tensor:
    device = _device()
    rule = RoutingRule(
        num_experts=16, num_groups=4, top_groups=2, top_k=3, normalize=True, scale=2.5
    )
    slots = torch.arange(32, device=device).view(16, 2)
    rows = torch.zeros(32, dtype=torch.int64, device=device)
    out = empty_routes(9, 3, device=device)
    ROUTE.backends[backend](
        _random(9, 16).float(),
        _random(16, seed=1).float(),
        rule=rule,
        tables=SlotTables(
            slots_of_expert_ER=slots, replica_count_E=torch.full((16,), 2, device=device)
        ),
        token_ids_T=torch.arange(9, device=device),
        layer=3,
        rows_S=rows,
        num_valid=torch.tensor([8], dtype=torch.int32, device=device),
        out=out,
    )
    return torch.cat([rows, out.slots_TK.flatten(), out.weights_TK.flatten()])


def _replica_balance(backend: str) -> Tensor:
    """Balance four experts of several replicas, and one alone, over three ranks; one is padding."""
    device = _device()
    slots = torch.tensor([[0, 4, 8], [1, 5, -1], [6, 9, -1], [2, 10, -1], [3, -1, -1]])
    ends = torch.tensor([[9, 21, 32], [8, 32, 32], [24, 32, 32], [16, 32, 32], [32, 32, 32]])
    ids = torch.tensor([[0, 1], [0, 4], [3, 0], [-1, -1], [2, 0], [0, 1]], device=device)
    counts = torch.tensor([[40, 3, 9, 0, 17], [5, 2, 1, 1, 1], [0, 8, 25, 6, 0]], device=device)
    out = torch.empty_like(ids)
    REPLICA_BALANCE.backends[backend](
        ids,
        counts,
        SlotTables(
            slots_of_expert_ER=slots.to(device),
            replica_count_E=torch.tensor([3, 2, 2, 2, 1], device=device),
            share_ends_ER=(ends << 10).to(device),
        ),
        rank=1,
        slots_per_rank=4,
        out_TK=out,
    )
    return out.float()


def _order(backend: str) -> RowOrder:
    slots = torch.tensor([[0, 2], [2, -1], [1, 2], [5, 0]], device=_device())
    num_rows = most_rows(8, num_slots=3, alignment=4)
    shapes = ((4, 2), (num_rows,), (3,))
    places, pairs, ends = (
        torch.empty(shape, dtype=torch.int32, device=_device()) for shape in shapes
    )
    out = RowOrder(place_of_pair_TK=places, pair_of_row_M=pairs, slot_ends_S=ends)
    ROW_ORDER.backends[backend](slots, alignment=4, out=out)
    return out


def _row_order(backend: str) -> Tensor:
    order = _order(backend)
    return torch.cat([order.place_of_pair_TK.flatten(), order.pair_of_row_M, order.slot_ends_S])


def _permute(backend: str) -> Tensor:
    order = _order("reference")
    x = _random(4, 99).float()
    out = torch.zeros(len(order.pair_of_row_M), 99, device=_device())
    parts, outs = x.split([96, 3], dim=1), out.split([96, 3], dim=1)
    PERMUTE.backends[backend](parts, order, outs=outs)
    return out


def _combine(backend: str) -> Tensor:
    order = _order("reference")
    out = torch.empty(4, 96, dtype=torch.bfloat16, device=_device())
    rows = _random(len(order.pair_of_row_M), 96)
    COMBINE.backends[backend](rows, order, _random(4, 2, seed=1).float(), out=out)
    return out


def _latent_write(backend: str) -> Tensor:
    cache = PlainLatents(latents_BPC=_random(2, 16, 576), rank=512)
    rotated = torch.empty(3, 4, 64, dtype=torch.bfloat16, device=_device())
    angles = _random(3, 32, seed=1).float()
    LATENT_WRITE.backends[backend](
        _random(3, 576, seed=2),
        _random(3, 4, 192, seed=3)[..., 128:],
        cache,
        places_T=torch.tensor([17, -1, 5], device=_device()),
        weight_R=_random(512, seed=4),
        eps=1e-6,
        cos_TF=angles.cos(),
        sin_TF=angles.sin(),
        out_THP=rotated,
    )
    return torch.cat([cache.latents_BPC.flatten(), rotated.flatten()])


def _mla_decode(backend: str) -> Tensor:
    """Attend with queries of two blocks, of none, of one, of a missing block, and of too many.

    Blocks have the size that FlashMLA requires; positions that no query may see are NaN.
    """
    device, nan = _device(), float("nan")
    latents_BPC = _random(4, attention_libraries.FLASH_MLA_BLOCK, 576, seed=2)
    latents_BPC[1, 19:] = nan
    out = AttentionOutput(out_BHR=_random(5, 4, 512), lse_BH=torch.empty(5, 4, device=device))
    MLA_DECODE.backends[backend](
        _random(5, 4, 576, seed=1),
        PlainLatents(latents_BPC=latents_BPC, rank=512),
        tables_BS=torch.tensor(
            [[3, 1], [9, -1], [0, 900], [4, 2], [0, 2]], dtype=torch.int32, device=device
        ),
        lengths_B=torch.tensor([83, 0, 64, 1, 129], dtype=torch.int32, device=device),
        scale=0.05,
        tokens_per_split=None,
        out=out,
    )
    # Finite values of about the others' size, so that neither a wrong number nor a wrong NaN is
    # lost among them.
    both = torch.cat([out.out_BHR.float(), out.lse_BH.unsqueeze(2)], dim=2)
    return both.nan_to_num(nan=0.25, neginf=-0.25)


def _mla_prefill(backend: str) -> Tensor:
    """Attend with a prompt's queries to two stretches of keys, and with another's to one."""
    device = _device()
    queries, latents = _random(9, 2, 192), _random(20, 576, seed=1)
    out_THv = torch.zeros(9, 2, 128, device=device)
    lse_TH = torch.zeros(9, 2, device=device)
    for segments in ([[0, 6, 9, 0, 12, 0], [6, 3, 0, 12, 3, 0]], [[0, 6, 9, 15, 3, 12]]):
        inputs = PrefillInputs(
            plain_THn=queries[..., :128],
            rotary_THP=queries[..., 128:],
            keys_values_NHw=_random(20, 2, 256, seed=2),
            key_rotary_NP=latents[:, 512:],
            segments_S6=torch.tensor(segments, dtype=torch.int32, device=device),
            most_queries=6,
        )
        MLA_PREFILL.backends[backend](inputs, scale=0.05, out_THv=out_THv, lse_TH=lse_TH)
    return torch.cat([out_THv, lse_TH.unsqueeze(2)], dim=2)


_PROBLEMS: Mapping[str, Callable[[str], Tensor]] = {
    "group_quant": _group_quant,
    "rms_norm_quant": _rms_norm_quant,
    "silu_mul_quant": _silu_mul_quant,
    "weight_quant": _weight_quant,
    "gemm": _gemm,
    # No multiple of 4, which cuBLAS requires; the benchmark covers realistic sizes.
    "gemm_large": partial(_gemm, operation=GEMM_LARGE, num_rows=147),
    "grouped_gemm": _grouped_gemm,
    "all_to_all": _all_to_all,
    "route": _route,
    "replica_balance": _replica_balance,
    "row_order": _row_order,
    "permute": _permute,
    "combine": _combine,
    "latent_write": _latent_write,
    "mla_decode": _mla_decode,
    "mla_prefill": _mla_prefill,
}
