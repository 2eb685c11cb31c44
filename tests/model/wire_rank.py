"""One rank of `test_wire`: what the kernel counts at its sockets, by one hop and by two.

Arguments: rank, rendezvous file, result file.
"""

import os
import socket
import struct
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from equipoise_model.expert_step import ExpertStep
from tests.model.expert_parallel_rank import CONFIG
from tests.model.two_hop_rank import NODES, SENDS, model_of

OF_RANK = NODES["4x2"]
NUM_ROWS = 256
"""Rows of each rank: enough that what gloo adds to a message hardly counts."""

_SENT, _AGAIN = 200, 208  # offsets of bytes_sent and bytes_retrans in Linux's struct tcp_info


def connections():
    """The local and the remote port, and the bytes sent, of each TCP connection of this process."""
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(fd.name))) as one:
            if one.family in {socket.AF_INET, socket.AF_INET6}:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                (sent,), (again,) = (struct.unpack_from("Q", info, at) for at in (_SENT, _AGAIN))
                yield one.getsockname()[1], one.getpeername()[1], sent - again


def sent_to_ranks():
    """Bytes that this rank has sent to each rank."""
    own = list(connections())
    of_ranks = [None] * len(OF_RANK)
    dist.all_gather_object(of_ranks, [(local, remote) for local, remote, _ in own])
    rank_of = {ends: rank for rank, ports in enumerate(of_ranks) for ends in ports}
    sent = Counter()
    for local, remote, num_bytes in own:
        if (remote, local) in rank_of:
            sent[rank_of[remote, local]] += num_bytes
    return sent


def take(rank, send):
    """Bytes to each rank in a step, and the ranks that its rows chose, layer by layer."""
    is_two_hop, sums_on_nodes = SENDS[send]
    model = model_of(OF_RANK, rank=rank, row_block=None, sums_on_nodes=sums_on_nodes)
    choose, chosen = ExpertStep._choose_slots, []

    def noted(step, expert_ids, *, layer):
        slots = choose(step, expert_ids, layer=layer)
        chosen.append(slots // step.placement.slots_per_rank)
        return slots

    ExpertStep._choose_slots = noted
    x = torch.randn(NUM_ROWS, CONFIG.hidden_size, generator=torch.Generator().manual_seed(rank))
    before = sent_to_ranks()
    with torch.no_grad():
        model.ep.agree([[NUM_ROWS] * len(OF_RANK)], is_two_hop=is_two_hop)
        model.forward(x)
    dist.barrier()
    after = sent_to_ranks()
    ExpertStep._choose_slots = choose
    return dict(after - before), torch.stack(chosen).numpy()


def main(rank, rendezvous, result):
    rank = int(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=len(OF_RANK),
        timeout=timedelta(seconds=60),
    )
    torch.save({send: take(rank, send) for send in SENDS}, result)
    dist.barrier()
    dist.destroy_process_group()
