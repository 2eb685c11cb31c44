"""One rank of `test_two_hop_processes`: the same exchanges by one hop and by two, over gloo.

Arguments: rank, number of ranks, folder. Writes one JSON object to `report-RANK.json` there.
Everything is derived from seeds.
"""

import json
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from equipoise_kernels.errors import AllToAllError
from equipoise_kernels.fp8.all_to_all.buffer import EpBuffer
from equipoise_kernels.fp8.all_to_all.collective import CollectiveBackend
from equipoise_kernels.fp8.all_to_all.order import RowLayout
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.all_to_all.two_hop import TwoHopBackend
from equipoise_kernels.fp8.quant.group_quant import group_quant
from equipoise_kernels.nodes import Nodes
from tests.kernels.fp8.all_to_all_rank import bits

PATIENCE_S, IMPATIENCE_S = 60, 1.5

NODES = {
    "2x2": (0, 0, 1, 1),
    "4x1": (0, 1, 2, 3),
    "1x4": (0, 0, 0, 0),
    "uneven": (0, 0, 0, 1),
    "mixed up": (0, 1, 0, 2),
}


def shape_of(rank, num_ranks, payload):
    return EpShape(
        rank=rank, num_ranks=num_ranks, slots_per_rank=3, top_k=4, dim=128, max_tokens=7,
        payload=payload,
    )  # fmt: skip


def buffers_of(shape, nodes):
    """A buffer for each way that rows may travel."""
    group = {"group": dist.group.WORLD, "timeout_s": PATIENCE_S}
    backends = {
        "one hop": CollectiveBackend(shape, **group),
        "two hops": TwoHopBackend(shape, nodes=nodes, **group),
        "sums": TwoHopBackend(shape, nodes=nodes, sums_on_nodes=True, **group),
    }
    return {name: EpBuffer(shape, one, device="cpu") for name, one in backends.items()}


def problem(shape, epoch):
    """Rows of this rank, another number of other values in each epoch; some ranks have none."""
    generator = torch.Generator().manual_seed(100 * epoch + shape.rank)
    num_tokens = (3 * shape.rank + 5 * epoch) % (shape.max_tokens + 1)
    x = torch.randn(num_tokens, shape.dim, generator=generator).to(shape.payload.answer_dtype)
    scores = torch.rand(num_tokens, shape.num_slots, generator=generator)
    slots = scores.topk(shape.top_k).indices
    slots[:1, 1:] = -1
    slots[1:2, 2] = -1
    sent = group_quant(x) if shape.payload is Payload.FP8 else x
    return sent, slots, scores[:, : shape.top_k].contiguous()


def answers(came, shape):
    """Slot s multiplies by s + 1."""
    rows = came.rows.dequantized() if shape.payload is Payload.FP8 else came.rows
    y = rows.to(shape.payload.answer_dtype)
    for slot, (end, count) in enumerate(zip(came.slot_ends, came.rows_of_slot, strict=True)):
        y[end - count : end] *= shape.rank * shape.slots_per_rank + slot + 1
    return y


def real_rows(came):
    """Rows between slots are unspecified."""
    ends, counts = came.slot_ends, came.rows_of_slot
    real = torch.cat([torch.arange(e - n, e) for e, n in zip(ends, counts, strict=True)])
    return [*(part[real] for part in bits(came.rows)), ends, counts]


def exchange(buffer, shape, epoch):
    """What a rank sees of an exchange, and what it sent."""
    x, slots, weights = problem(shape, epoch)
    came = buffer.dispatch(x, slots, layout=RowLayout(alignment=4))
    summed = buffer.combine(answers(came, shape), came.handle, weights_TK=weights)
    return [*real_rows(came), summed], came.sent


def overlapping(buffer, shape):
    """The same of two exchanges that are open at once."""
    problems = [problem(shape, epoch) for epoch in range(2)]
    receive = [
        buffer.begin_dispatch(x, slots, layout=RowLayout(alignment=4)) for x, slots, _ in problems
    ]
    came = [receive_one() for receive_one in receive]
    receive = [
        buffer.begin_combine(answers(one, shape), one.handle, weights_TK=weights)
        for one, (_, _, weights) in zip(came, problems, strict=True)
    ]
    return [[*real_rows(one), sums()] for one, sums in zip(came, receive, strict=True)]


def distinct_nodes(slots, shape, nodes):
    """Nodes other than this rank's that hold a row's slots, added up over rows."""
    own = nodes.of_rank[shape.rank]
    return sum(
        len({nodes.of_rank[slot // shape.slots_per_rank] for slot in row if slot >= 0} - {own})
        for row in slots.tolist()
    )


def between(numbers, shape, nodes):
    own = nodes.of_rank[shape.rank]
    return sum(n for n, node in zip(numbers, nodes.of_rank, strict=True) if node != own)


def compare(shape, nodes):
    """Faults, and what went between nodes by each way, as [rows, outputs]."""
    faults, buffers = [], buffers_of(shape, nodes)
    sent = {name: [0, 0] for name in buffers}
    opened = {name: overlapping(buffer, shape) for name, buffer in buffers.items()}
    for epoch in range(3):
        slots = problem(shape, epoch)[1]
        seen = {}
        for name, buffer in buffers.items():
            seen[name], what = exchange(buffer, shape, epoch)
            counts = [between(numbers, shape, nodes) for numbers in (what.rows, what.outputs)]
            sent[name] = [a + b for a, b in zip(sent[name], counts, strict=True)]
            expected = distinct_nodes(slots, shape, nodes)
            if name != "one hop" and counts[0] != expected:
                faults.append(f"{name} sent {counts[0]} rows, not {expected}")
            if epoch < 2 and not all(map(torch.equal, opened[name][epoch], seen[name])):
                faults.append(f"{name} mixes up open exchanges")
        if not all(map(torch.equal, seen["two hops"], seen["one hop"])):
            faults.append(f"two hops differ in {epoch}")
        if not all(map(torch.equal, seen["sums"][:-1], seen["one hop"][:-1])):
            faults.append(f"rows to be summed on nodes differ in {epoch}")
        if not torch.allclose(seen["sums"][-1], seen["one hop"][-1], rtol=1e-4, atol=1e-3):
            faults.append(f"sums on nodes are wrong in {epoch}")
    return faults, sent


def words_of_failure(buffer, shape):
    x, slots, _ = problem(shape, 1)
    try:
        buffer.dispatch(x, slots)
    except AllToAllError as error:
        return [type(error).__name__, list(error.ranks), str(error)]
    return ["nothing was noticed", [], ""]


def main(rank, num_ranks, folder):
    rank, num_ranks, folder = int(rank), int(num_ranks), Path(folder)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=num_ranks,
        timeout=timedelta(seconds=PATIENCE_S),
    )  # fmt: skip
    report = {}
    for payload in Payload:
        shape = shape_of(rank, num_ranks, payload)
        for name, of_rank in NODES.items():
            report[f"{payload.value} {name}"] = compare(shape, Nodes.named(of_rank))
    nodes = Nodes(of_rank=NODES["2x2"])
    buffer = buffers_of(shape, nodes)["two hops"]
    buffer.switch(8 if rank == 1 else 7)
    report["skewed"] = words_of_failure(buffer, shape)
    dist.barrier()
    lonely = TwoHopBackend(shape, nodes=nodes, group=dist.group.WORLD, timeout_s=IMPATIENCE_S)
    if rank < num_ranks - 1:
        report["lonely"] = words_of_failure(EpBuffer(shape, lonely, device="cpu"), shape)
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    # No rank leaves before the others have timed out: a broken connection is noticed at once.
    (folder / f"done-{rank}").touch()
    until = time.monotonic() + PATIENCE_S
    while len(list(folder.glob("done-*"))) < num_ranks and time.monotonic() < until:
        time.sleep(0.02)
