"""Gates C3 to C5: routing and balancing against torch, and moving rows against a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from equipoise_kernels.formats import QuantizedRows, empty_rows
from equipoise_kernels.fp8.bench.bench import Bench, fp8_bytes, num_copies
from equipoise_kernels.fp8.bench.checks import backend_faults, result_faults
from equipoise_kernels.fp8.bench.moe_inputs import RULE, balance_inputs, route_inputs, row_order_of
from equipoise_kernels.fp8.bench.report import Sample
from equipoise_kernels.fp8.bench.timing import TimedCall
from equipoise_kernels.fp8.moe.permute import (
    Parts,
    combine_reference,
    combine_triton,
    permute_reference,
    permute_triton,
)
from equipoise_kernels.fp8.moe.replica_balance import (
    replica_balance_reference,
    replica_balance_triton,
)
from equipoise_kernels.fp8.moe.route import route_reference, route_triton
from equipoise_kernels.fp8.moe.routes import RoutingRule, empty_routes
from equipoise_kernels.fp8.moe.row_order import RowOrder
from equipoise_kernels.fp8.testing.cases import spread_rows

_HIDDEN = 7168
_ROUTED_ROWS = (128, 8192)
_MOVED_ROWS = 4096
# Rows of a rank, ranks, slots per rank.
_BALANCED = ((128, 32, 9), (1024, 32, 10), (128, 144, 2))


def routing(
    bench: Bench, sizes: Sequence[int] = _ROUTED_ROWS, rule: RoutingRule = RULE
) -> list[Sample]:
    """C3: speed-up over the compiled reference."""
    return [_routing(bench, num_rows, rule) for num_rows in sizes]


def moving(
    bench: Bench, num_rows: int = _MOVED_ROWS, dim: int = _HIDDEN, rule: RoutingRule = RULE
) -> list[Sample]:
    """C4: bytes per second of `permute` with scales, and of `combine`."""
    order = row_order_of(num_rows, bench.generator, rule=rule)
    return [_permute(bench, order, num_rows, dim), _combine(bench, order, num_rows, dim)]


def balancing(
    bench: Bench,
    sizes: Sequence[tuple[int, int, int]] = _BALANCED,
    rule: RoutingRule = RULE,
) -> list[Sample]:
    """C5: speed-up over torch, whose launches are captured too."""
    return [_balancing(bench, *size, rule) for size in sizes]


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a reference with torch."""
    fast: Callable[..., None] = torch.compile(function, dynamic=False)
    return fast


def _routing(bench: Bench, num_rows: int, rule: RoutingRule) -> Sample:
    inputs = route_inputs(num_rows, bench.generator, rule=rule)
    out, wanted = (empty_routes(num_rows, rule.top_k, device=bench.device) for _ in range(2))
    out.slots_TK.fill_(-7)
    out.weights_TK.fill_(float("nan"))
    rows, wanted_rows = inputs.counters(), inputs.counters()
    inputs.run(route_triton, rows_S=rows, out=out)
    inputs.run(route_reference, rows_S=wanted_rows, out=wanted)
    faults = []
    if not (torch.equal(out.slots_TK, wanted.slots_TK) and torch.equal(rows, wanted_rows)):
        faults.append("slots or their counts differ from the reference")
    faults += result_faults(out.weights_TK, wanted.weights_TK.double())
    reference = compiled(route_reference)
    launch: TimedCall = lambda: inputs.run(route_triton, rows_S=rows, out=out)  # noqa: E731
    # The reference does not count: in torch that waits for the device, which no graph captures.
    times, missing = bench.measure(
        {
            "route": [launch],
            "compiled": [lambda: inputs.run(reference, rows_S=None, out=wanted)],
        }
    )
    faults += missing + backend_faults(bench.timer.kernel_names(launch), "route_kernel")
    compiled_us = times["compiled"].median_us if "compiled" in times else float("nan")
    return Sample(
        gate="C3",
        shape=f"route {num_rows} rows, {rule.num_experts} experts",
        value=compiled_us / times["route"].median_us,
        raw={"us": times["route"].median_us, "compiled_us": compiled_us},
        faults=faults,
    )


def _balancing(
    bench: Bench, num_rows: int, num_ranks: int, slots_per_rank: int, rule: RoutingRule
) -> Sample:
    inputs = balance_inputs(
        num_rows, bench.generator, num_ranks=num_ranks, slots_per_rank=slots_per_rank, rule=rule
    )
    out, wanted = (torch.full_like(inputs.expert_ids_TK, -7) for _ in range(2))
    launch: TimedCall = lambda: inputs.run(replica_balance_triton, out_TK=out)  # noqa: E731
    times, faults = bench.measure(
        {
            "balance": [launch],
            "torch": [lambda: inputs.run(replica_balance_reference, out_TK=wanted)],
        }
    )
    if not torch.equal(out, wanted):
        faults.append("slots differ from the reference")
    faults += backend_faults(bench.timer.kernel_names(launch), "replica_ends_kernel")
    torch_us = times["torch"].median_us if "torch" in times else float("nan")
    return Sample(
        gate="C5",
        shape=f"balance {num_rows} rows, {num_ranks} ranks of {slots_per_rank} slots",
        value=torch_us / times["balance"].median_us,
        raw={"us": times["balance"].median_us, "torch_us": torch_us},
        faults=faults,
    )


def _permute(bench: Bench, order: RowOrder, num_rows: int, dim: int) -> Sample:
    copies = range(num_copies(num_rows * dim))
    inputs = [spread_rows((num_rows, dim), bench.generator) for _ in copies]
    shape = (len(order.pair_of_row_M), dim)
    outs = [empty_rows(shape, device=bench.device) for _ in copies]
    for out in outs:
        out.codes.view(torch.uint8).fill_(0xFF)

    def move(index: int) -> TimedCall:
        def call() -> None:
            permute_triton(_parts(inputs[index]), order, outs=_parts(outs[index]))

        return call

    calls = [move(index) for index in copies]
    timing = bench.timer.interleaved({"permute": calls})["permute"]
    wanted = empty_rows(shape, device=bench.device)
    wanted.codes.view(torch.uint8).fill_(0xFF)
    permute_reference(_parts(inputs[-1]), order, outs=_parts(wanted))
    own = order.pair_of_row_M >= 0
    right = torch.equal(outs[-1].codes.view(torch.uint8), wanted.codes.view(torch.uint8))
    right = right and torch.equal(outs[-1].scales[own], wanted.scales[own])
    faults = [] if right else ["rows or scales differ from the reference, or others were written"]
    faults += backend_faults(bench.timer.kernel_names(calls[0]), "permute_kernel")
    row_bytes = dim + 4 * inputs[0].scales.shape[1]
    # Counts every row as read once and written once per choice; padding does not count.
    num_bytes = fp8_bytes(inputs[0].codes, inputs[0].scales) + int(own.sum()) * row_bytes
    return _moved(bench, "permute", f"{num_rows} x {dim}", num_bytes, timing.median_us, faults)


def _parts(rows: QuantizedRows) -> Parts:
    return rows.codes.view(torch.int32), rows.scales


def _combine(bench: Bench, order: RowOrder, num_rows: int, dim: int) -> Sample:
    shape = (len(order.pair_of_row_M), dim)
    copies = range(num_copies(2 * shape[0] * dim))
    inputs = [
        torch.randn(shape, generator=bench.generator, device=bench.device).bfloat16()
        for _ in copies
    ]
    top_k = order.place_of_pair_TK.shape[1]
    weights = torch.rand(num_rows, top_k, generator=bench.generator, device=bench.device)
    outs = [torch.full((num_rows, dim), float("nan"), device=bench.device).bfloat16()
            for _ in copies]  # fmt: skip
    calls: list[TimedCall] = [
        lambda x=x, out=out: combine_triton(x, order, weights, out=out)  # type: ignore[misc]
        for x, out in zip(inputs, outs, strict=True)
    ]
    timing = bench.timer.interleaved({"combine": calls})["combine"]
    wanted = torch.empty_like(outs[-1])
    combine_reference(inputs[-1], order, weights, out=wanted)
    faults = result_faults(outs[-1], wanted.double())
    faults += backend_faults(bench.timer.kernel_names(calls[0]), "combine_kernel")
    num_bytes = 2 * dim * (int((order.place_of_pair_TK >= 0).sum()) + num_rows)
    return _moved(bench, "combine", f"{num_rows} x {dim}", num_bytes, timing.median_us, faults)


def _moved(
    bench: Bench, name: str, size: str, num_bytes: int, time_us: float, faults: list[str]
) -> Sample:
    rate = num_bytes / time_us / 1e6
    return Sample(
        gate="C4",
        shape=f"{name} {size}",
        value=rate / bench.machine.copy_tb_s,
        raw={"us": time_us, "tb_s": rate},
        faults=faults,
    )
