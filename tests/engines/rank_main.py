"""Runs ranks of a real engine's expert balancing on CPUs: imports once, then forks the ranks.

`python -m tests.engines.rank_main '{"engine": "vllm", …}'`: one JSON line per rank goes to the file
that the options name. The engine's forward passes are replaced by routed tokens; what balances is
its own code. The environment has the plugin's options.
"""

import json
import logging
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.engines import stubs


@dataclass(kw_only=True)
class Options:
    """What to run."""

    engine: str
    folder: str
    ranks: int = 4
    stages: int = 1
    """Pipeline stages that share the ranks."""
    layers: int = 6
    """Of each stage."""
    experts: int = 32
    redundant: int = 8
    dim: int = 32
    passes: int = 800
    pass_ms: float = 20.0
    planner: str = "equipoise"
    """Or "engine": its own; or "both": its own beside the plugin."""
    corrupt: int = -1
    """The rank that sends damaged bytes to its peers."""
    pause_at: int = -1
    pause_s: float = 0.0
    """A pause in which the engine takes no pass."""
    update_at: int = -1
    """The pass after which all weights are updated in place, as a trainer does."""
    announced: bool = True
    """Whether by the engine's own method, or behind its back."""
    equal: bool = False
    """Compare each switch with the engine's own mover."""

    @property
    def stage_ranks(self) -> int:
        """Ranks of a stage, which share its experts."""
        return self.ranks // self.stages


@dataclass(kw_only=True)
class Record:
    """What one rank saw."""

    rank: int
    faults: list[str] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    """Of each 50 passes: busiest rank over mean rank."""
    switches: list[tuple[int, int, int]] = field(default_factory=list)
    """Generation since the first, pass, and microseconds of each switch."""
    equal: list[dict] = field(default_factory=list)
    hook_us: dict[str, float] = field(default_factory=dict)
    stopped: str = ""
    routed: int = 0
    """Assignments that this rank sent since the seat was ready."""
    planner_runs: int = 0
    moves: int = 0
    """Slots that changed their expert, over all ranks."""

    def count_moves(self, before, table):
        """Count the slots that changed since the table `before`; returns a copy of this one."""
        if before is not None:
            self.moves += int((table != before).sum())
        return table.clone()


def main() -> None:
    options = Options(**json.loads(sys.argv[1]))
    stubs.install()
    if options.engine == "vllm":
        from tests.engines import vllm_rank as module
    else:
        from tests.engines import sglang_rank as module
    logging.disable(logging.NOTSET)
    children = []
    for rank in range(options.ranks):
        child = os.fork()
        if not child:
            _run_rank(module, options, rank)
        children.append(child)
    status = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(int(any(status)))


def _run_rank(module, options: Options, rank: int) -> None:
    import torch
    import torch.distributed as dist

    code = 1
    try:
        logging.basicConfig(
            level=logging.INFO, force=True, format=f"{rank} %(levelname)s %(name)s %(message)s"
        )
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{options.folder}/store",
            rank=rank,
            world_size=options.ranks,
        )
        record = drive(module.Rank(options, rank), options)
        Path(options.folder, f"rank{rank}.json").write_text(json.dumps(vars(record)))
        dist.barrier()
        code = 0
    except BaseException:
        logging.getLogger(__name__).exception("rank %d failed", rank)
    os._exit(code)


class Stage:
    """A rank's pipeline stage: its group, and what it passes on to the next stage."""

    def __init__(self, options: Options, rank: int) -> None:
        import torch
        import torch.distributed as dist

        self.num, self.rank, self.dist = options.stage_ranks, rank, dist
        firsts = range(0, options.ranks, self.num)
        groups = [dist.new_group(range(first, first + self.num)) for first in firsts]
        self.group = groups[rank // self.num]
        self.is_first, self.is_last = rank < self.num, rank + self.num >= options.ranks
        self.activations = torch.zeros(1)

    def receive(self) -> None:
        """Wait for what the previous stage has computed."""
        if not self.is_first:
            self.dist.recv(self.activations, self.rank - self.num)

    def send(self) -> None:
        """Let the next stage begin."""
        if not self.is_last:
            self.dist.send(self.activations, self.rank + self.num)

    def differs(self, table) -> bool:
        """Whether the stage's ranks have different tables."""
        tables = [table.clone() for _ in range(self.num)]
        self.dist.all_gather(tables, table.contiguous(), self.group)
        return any(not one.equal(table) for one in tables)


def drive(one, options: Options) -> Record:
    """Take passes, and check after each that weights and tables agree on this rank and on all."""
    import numpy as np
    import torch
    import torch.distributed as dist

    record = Record(rank=one.rank)
    window = torch.zeros(options.layers, options.experts + options.redundant)
    stage = Stage(options, one.rank)
    hook_us = []
    one.record = record
    table = None
    for number in range(options.passes):
        if number == options.pause_at:
            time.sleep(options.pause_s)
        stage.receive()
        began = time.perf_counter()
        window += one.route(int(number >= options.passes // 2))
        hook = time.perf_counter()
        one.step()
        if number == options.update_at:
            one.update()
        hook_us.append(1e6 * (time.perf_counter() - hook))
        stage.send()
        if fault := one.fault():
            record.faults.append(f"pass {number}: {fault}")
        table = record.count_moves(table, one.table())
        if number % 10 == 0 and stage.differs(one.table()):
            record.faults.append(f"pass {number}: tables differ between ranks")
        if number % 50 == 49:
            total = window.clone()
            dist.all_reduce(total, group=stage.group)
            window.zero_()
            load = total.view(options.layers, options.stage_ranks, -1).sum(-1)
            ratio = load.max(1).values / load.mean(1)
            record.imbalance.append(round(float(ratio.mean()), 3))
        rest_s = options.pass_ms / 1e3 - (time.perf_counter() - began)
        if rest_s > 0:
            time.sleep(rest_s)
    record.hook_us = {
        name: round(float(np.percentile(hook_us, q)), 1)
        for name, q in (("median", 50), ("p99", 99), ("longest", 100))
    }
    seat = one.seat()
    if seat is not None:
        record.stopped = seat.stopped
    return record


def watch_switches(seat, record: Record) -> None:
    """Record the switches of a seat."""
    note = seat.on_switch

    def on_switch(switch):
        record.switches.append((switch.generation - seat.epoch, switch.step, switch.stall_us))
        note(switch)

    seat.on_switch = on_switch


def prepare(one, seat):
    """What the options want of a seat that is ready."""
    watch_switches(seat, one.record)
    if one.options.corrupt == one.rank:
        read = seat.held.read

        def damaged(**about):
            payload = read(**about).clone()
            payload[0] ^= 1
            return payload

        seat.held.read = damaged
    if one.options.equal:
        from torch import from_numpy

        switch = seat._switch

        def checked(staged):
            before = from_numpy(seat.held.contents.layout.expert_of_slot.astype("int64"))
            after = from_numpy(staged.contents.layout.expert_of_slot.astype("int64"))
            copies = one.copies()
            switch(staged)
            one.record.equal.append(one.compare(before, after, copies))

        seat._switch = checked


if __name__ == "__main__":
    main()
