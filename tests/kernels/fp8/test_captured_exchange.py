"""What a captured decode step launches and clears for one layer's exchange, without a GPU.

Kernels are replaced by counters, and torch's operations are counted when they are dispatched.
Before bookkeeping moved into the kernels, there were 6 launches of kernels and 93 other operations,
which cleared every row that could arrive: 91 MB at DeepSeek-V3's width.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise_kernels.fp8.all_to_all import peer
from equipoise_kernels.fp8.all_to_all.buffer import EpBuffer
from equipoise_kernels.fp8.all_to_all.order import RowLayout
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.peer import PeerBackend
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.all_to_all.window import virtual_windows
from equipoise_kernels.fp8.gemm.schedule import GROUP_ALIGNMENT
from equipoise_kernels.fp8.quant.group_quant import group_quant

# DeepSeek-V3 on eight ranks, with narrow rows: how many operations there are does not depend on it.
SHAPE = EpShape(
    rank=0, num_ranks=8, slots_per_rank=32, top_k=8, dim=256, max_tokens=128, payload=Payload.FP8
)
LAYOUT = RowLayout(alignment=GROUP_ALIGNMENT, is_fixed=True)

MOST_KERNELS = 7
MOST_OPERATIONS = 1
"""A row's codes and scales are joined before they are sent."""

# They launch nothing.
FREE = (
    "view",
    "slice",
    "select",
    "expand",
    "unsqueeze",
    "empty",
    "_unsafe_view",
    "alias",
    "detach",
)
CLEARING = ("zero", "zeros", "ones", "full", "fill")


class Counted(TorchDispatchMode):
    """Counts operations that a GPU would launch, and the bytes that they fill with a constant."""

    def __init__(self):
        super().__init__()
        self.operations, self.cleared_bytes = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not name.startswith(FREE):
            self.operations.append(name)
        if name.strip("_").removeprefix("new_").removesuffix("_like") in CLEARING:
            self.cleared_bytes += result.numel() * result.element_size()
        return result


class Launches:
    def __init__(self):
        self.count = 0

    def __getitem__(self, grid):
        def launch(*_arguments, **_options):
            self.count += 1

        return launch


def test_a_captured_exchange_is_a_handful_of_launches_and_clears_nothing(monkeypatch, generator):
    kernels = Launches()
    for name in [name for name in vars(peer) if name.endswith("_kernel")]:
        monkeypatch.setattr(peer, name, kernels)
    monkeypatch.setattr(peer, "_is_capturing", lambda: True)
    window = virtual_windows(SHAPE, device="cpu")[0]
    buffer = EpBuffer(SHAPE, PeerBackend(SHAPE, window, timeout_s=1.0), device="cpu")
    num_tokens = SHAPE.max_tokens
    rows = group_quant(torch.randn(num_tokens, SHAPE.dim, generator=generator).bfloat16())
    slots = torch.rand(num_tokens, SHAPE.num_slots, generator=generator).topk(8).indices
    weights = torch.rand(num_tokens, 8, generator=generator)
    outputs = torch.zeros(LAYOUT.most_rows(SHAPE), SHAPE.dim).bfloat16()
    with Counted() as counted:
        came = buffer.dispatch(rows, slots, layout=LAYOUT)
        buffer.combine(outputs, came.handle, weights_TK=weights)
    assert kernels.count <= MOST_KERNELS
    assert len(counted.operations) <= MOST_OPERATIONS, counted.operations
    assert counted.cleared_bytes == 0
