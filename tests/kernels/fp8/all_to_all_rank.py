"""One rank of `test_all_to_all_processes`: exchanges over gloo and shared memory, and compares.

Arguments: rank, number of ranks, folder. Writes one JSON object to `report-RANK.json` there.
Everything is derived from seeds.
"""

import json
import random
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from equipoise_kernels.errors import AllToAllError
from equipoise_kernels.formats import QuantizedRows
from equipoise_kernels.fp8 import selection
from equipoise_kernels.fp8.all_to_all.buffer import EpBuffer
from equipoise_kernels.fp8.all_to_all.collective import CollectiveBackend
from equipoise_kernels.fp8.all_to_all.opening import open_buffer
from equipoise_kernels.fp8.all_to_all.order import RowLayout
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.peer import PeerBackend
from equipoise_kernels.fp8.all_to_all.peer_operation import AllToAllConfig
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.all_to_all.window import shared_window
from equipoise_kernels.fp8.quant.group_quant import group_quant
from equipoise_kernels.fp8.testing.interpreter import corrected_casts

PATIENCE_S = 60
IMPATIENCE_S = 1.5
# Four use each half of a window twice.
NUM_EPOCHS = {Payload.BF16: 4, Payload.FP8: 2, Payload.FP32: 2}
CONFIG = AllToAllConfig(parts=2, block=128, num_warps=4)


def shape_of(rank, num_ranks, payload):
    return EpShape(
        rank=rank, num_ranks=num_ranks, slots_per_rank=2, top_k=2, dim=128, max_tokens=3,
        payload=payload,
    )  # fmt: skip


def opened(shape, folder, name, *, timeout_s):
    """A buffer over gloo and one over shared memory."""
    collective = CollectiveBackend(shape, group=dist.group.WORLD, timeout_s=timeout_s)
    window = shared_window(folder / name, shape)
    peer = PeerBackend(shape, window, timeout_s=timeout_s, config=CONFIG)
    return {
        "gloo": EpBuffer(shape, collective, device="cpu"),
        "peer": EpBuffer(shape, peer, device="cpu"),
    }


def opened_by_name(shape):
    """A buffer of each backend that can be selected here."""
    buffers = {}
    for name in ("reference", "triton"):
        selection.start(selection.resolve(name, lambda operation, backend: None))
        opened = open_buffer(shape, group=dist.group.WORLD, device="cpu", timeout_s=PATIENCE_S)
        assert (opened.backend, opened.passed_over) == (name, {})
        buffers[name] = opened.buffer
    return buffers


def problem(shape, epoch):
    """Rows of this rank, another number of other values in each epoch; some ranks have none."""
    generator = torch.Generator().manual_seed(100 * epoch + shape.rank)
    num_tokens = (shape.rank + epoch) % (shape.max_tokens + 1)
    x = torch.randn(num_tokens, shape.dim, generator=generator)
    scores = torch.rand(num_tokens, shape.num_slots, generator=generator)
    slots = scores.topk(shape.top_k).indices
    slots[:1, 1:] = -1
    return x.to(shape.payload.answer_dtype), slots, scores[:, : shape.top_k].contiguous()


def bits(rows):
    if isinstance(rows, QuantizedRows):
        return [rows.codes.contiguous().view(torch.uint8), rows.scales.contiguous()]
    return [rows.contiguous().view(torch.int32)]


def exchange(buffer, shape, epoch, skew):
    """What a rank sees of an exchange in which slot s multiplies by s + 1."""
    x, slots, weights = problem(shape, epoch)
    time.sleep(skew.random() * 0.02)
    sent = group_quant(x) if shape.payload is Payload.FP8 else x
    came = buffer.dispatch(sent, slots, layout=RowLayout(alignment=4))
    rows = came.rows.dequantized() if shape.payload is Payload.FP8 else came.rows
    y = rows.to(x.dtype)
    for slot, (end, count) in enumerate(zip(came.slot_ends, came.rows_of_slot, strict=True)):
        y[end - count : end] *= shape.rank * shape.slots_per_rank + slot + 1
    time.sleep(skew.random() * 0.02)
    summed = buffer.combine(y, came.handle, weights_TK=weights)
    factors = (slots + 1).to(x.dtype)
    real = sent.dequantized().to(x.dtype) if shape.payload is Payload.FP8 else x
    terms = [
        (real * f[:, None]).float() * w[:, None] for f, w in zip(factors.T, weights.T, strict=True)
    ]
    right = sum(terms[1:], terms[0])
    # Rows between slots are unspecified.
    ends, counts = came.slot_ends, came.rows_of_slot
    real = torch.cat([torch.arange(e - n, e) for e, n in zip(ends, counts, strict=True)])
    rows = [part[real] for part in bits(came.rows)]
    return [*rows, ends, counts, summed], bool(torch.equal(summed, right))


def compare(buffers, shape):
    """Messages of the faults of all epochs."""
    skew = random.Random(shape.rank)
    faults = []
    for epoch in range(NUM_EPOCHS[shape.payload]):
        seen = {name: exchange(buffer, shape, epoch, skew) for name, buffer in buffers.items()}
        faults += [f"{name} is wrong in {epoch}" for name, (_, right) in seen.items() if not right]
        pairs = zip(seen["gloo"][0], seen["peer"][0], strict=True)
        if not all(torch.equal(ours, theirs) for ours, theirs in pairs):
            faults.append(f"backends differ in {epoch}")
    return faults


def overlapping(buffers, shape):
    """Whether two dispatches that are open at once give what they give one after the other."""
    faults = []
    for name, buffer in buffers.items():
        problems = [problem(shape, epoch) for epoch in (1, 2)]
        came = [buffer.dispatch(x, slots) for x, slots, _ in problems]
        for (x, slots, _), one in zip(problems, came, strict=True):
            summed = buffer.combine(one.rows, one.handle)
            if not torch.equal(summed, x.float() * (slots >= 0).sum(dim=1, keepdim=True)):
                faults.append(f"{name} mixes up open exchanges")
    return faults


def words_of_failure(buffer, shape):
    x, slots, _ = problem(shape, 1)
    try:
        buffer.dispatch(x, slots)
    except AllToAllError as error:
        return [type(error).__name__, list(error.ranks), str(error)]
    return ["nothing was noticed", [], ""]


def main(rank, num_ranks, folder):
    warnings.simplefilter("ignore", DeprecationWarning)
    with corrected_casts():
        run(int(rank), int(num_ranks), Path(folder))


def run(rank, num_ranks, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=num_ranks,
        timeout=timedelta(seconds=PATIENCE_S),
    )  # fmt: skip
    report = {"faults": []}
    for payload in Payload:
        shape = shape_of(rank, num_ranks, payload)
        buffers = opened(shape, folder, payload.value, timeout_s=PATIENCE_S)
        report["faults"] += [f"{payload.value}: {fault}" for fault in compare(buffers, shape)]
    shape = shape_of(rank, num_ranks, Payload.FP32)
    report["faults"] += overlapping(opened_by_name(shape), shape)
    for name, buffer in opened(shape, folder, "skewed", timeout_s=PATIENCE_S).items():
        buffer.switch(8 if rank == 1 else 7)
        report[f"{name} skewed"] = words_of_failure(buffer, shape)
    dist.barrier()
    for name, buffer in opened(shape, folder, "lonely", timeout_s=IMPATIENCE_S).items():
        # A gloo group is of no use after a timeout, so the buffer over gloo comes last.
        if rank < num_ranks - 1 and name == "peer":
            report["peer lonely"] = words_of_failure(buffer, shape)
    lonely = CollectiveBackend(shape, group=dist.group.WORLD, timeout_s=IMPATIENCE_S)
    if rank < num_ranks - 1:
        buffer = EpBuffer(shape, lonely, device="cpu")
        report["gloo lonely"] = words_of_failure(buffer, shape)
        report["gloo afterwards"] = words_of_failure(buffer, shape)
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    # No rank leaves before the others have timed out: a broken connection is noticed at once.
    (folder / f"done-{rank}").touch()
    until = time.monotonic() + PATIENCE_S
    while len(list(folder.glob("done-*"))) < num_ranks and time.monotonic() < until:
        time.sleep(0.02)
