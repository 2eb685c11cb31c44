"""Runs ranks of a real engine's expert balancing on CPUs: imports once, then forks the ranks.

`python -m tests.engines.rank_main vllm` reads requests, one JSON line each, and answers each with
the process group of its ranks. The engine's forward passes are replaced by routed tokens; what
balances is its own code. `Controls` in a file steer the ranks; `Record`s tell what they saw.
"""

import hashlib
import json
import logging
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.engines import stubs

WINDOW_PASSES = 50
"""Passes of a window of `windows0`, `windows1` and so on, one file for each pipeline stage."""

_CONTROL_PASSES = 10

_BAD_RANK = 1


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
    passes: int = 0
    """Passes to take, with a shift of the traffic half-way; 0: until the controls end it."""
    pass_ms: float = 20.0
    planner: str = "equipoise"
    """Or "engine": its own; or "both": its own beside the plugin."""
    answer: str = ""
    """What rank 1 is to its peers, if not well: "damaged", "slow" or "unreachable"."""
    equal: bool = False
    """Compare each switch with the engine's own mover."""
    mutant: str = ""
    """A fault of the plugin itself, one of `MUTANTS`."""

    @property
    def stage_ranks(self) -> int:
        """Ranks of a stage, which share its experts."""
        return self.ranks // self.stages


@dataclass(frozen=True, kw_only=True)
class Controls:
    """What the test wants of all ranks, from the same pass on; read every few passes."""

    traffic: int = 0
    """0 or 1: which experts are hot."""
    is_idle: bool = False
    """Take no passes."""
    updates: int = 0
    """How often all weights were updated in place, as a trainer does, by the engine's methods."""
    hidden_updates: int = 0
    """The same, behind the engine's back."""
    is_over: bool = False
    """Record what was seen, and end."""


@dataclass(kw_only=True)
class Record:
    """What one rank saw."""

    rank: int
    pid: int = field(default_factory=os.getpid)
    passes: int = 0
    faults: list[str] = field(default_factory=list)
    """Passes after which a slot did not hold the bytes of the expert that the table names."""
    tables: list[tuple[int, str]] = field(default_factory=list)
    """Passes that changed the tables, and a digest of all tables after each."""
    imbalance: list[float] = field(default_factory=list)
    """Of each window: busiest rank over mean rank."""
    switches: list[tuple[int, int, int]] = field(default_factory=list)
    """Generation since the first, pass, and microseconds of each switch."""
    equal: list[dict] = field(default_factory=list)
    hook_us: dict[str, float] = field(default_factory=dict)
    """Of the engine's thread after each pass, waits included."""
    hook_cpu_us: dict[str, float] = field(default_factory=dict)
    """The same, as CPU time of that thread."""
    stopped: str = ""
    reports: list[tuple[int, int, int]] = field(default_factory=list)
    """Passes that its load reports cover; assignments to its slots in them, over all generations;
    and assignments that it sent in the same passes."""
    planner_runs: int = 0
    moves: int = 0
    """Slots that changed their expert, over all ranks."""


def main() -> None:
    # Some releases log to stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    stubs.install()
    if sys.argv[1] == "vllm":
        from tests.engines import vllm_rank as module
    else:
        from tests.engines import sglang_rank as module
    logging.disable(logging.NOTSET)
    for line in sys.stdin:
        request = json.loads(line)
        group = os.fork()
        if not group:
            os.setsid()
            os.environ.update(request["environment"])
            _run(module, Options(**request["options"]))
        print(group, file=answers, flush=True)


def _run(module, options: Options) -> None:
    """Run the ranks, with a log of their own; `ended` then has their exit status."""
    log = os.open(f"{options.folder}/ranks.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(ours, theirs)
    children = []
    for rank in range(options.ranks):
        child = os.fork()
        if not child:
            _run_rank(module, options, rank)
        children.append(child)
    Path(options.folder, "pids.json").write_text(json.dumps(children))
    status = [os.waitpid(child, 0)[1] for child in children]
    Path(options.folder, "ended").write_text(json.dumps(status))
    os._exit(0)


def _run_rank(module, options: Options, rank: int) -> None:
    import torch
    import torch.distributed as dist

    code = 1
    try:
        module.set_up_logs(rank)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{options.folder}/store",
            rank=rank,
            world_size=options.ranks,
        )
        if options.answer == "unreachable" and rank == _BAD_RANK:
            os.environ["EQUIPOISE_ADVERTISE_HOST"] = "127.0.0.2"  # Nothing listens there.
        one = module.Rank(options, rank)
        if options.mutant:
            from tests.engines.mutants import MUTANTS

            MUTANTS[options.mutant](one)
        record = Passes(one, options).take()
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
        self.number = rank // self.num
        self.group = groups[self.number]
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


class Passes:
    """The passes of one rank, each followed by a check that weights and tables agree."""

    def __init__(self, one, options: Options) -> None:
        import torch

        self.one, self.options = one, options
        self.record = one.record = Record(rank=one.rank)
        self.stage = Stage(options, one.rank)
        self.controls = Controls()
        self._window = torch.zeros(options.layers, options.experts + options.redundant)
        self._experts = None
        self._hook_us, self._hook_cpu_us = [], []
        self._routed = [0]
        # Passes until the seat was ready.
        self._ready = 0

    def take(self) -> Record:
        """Take passes until they are over; returns what was seen."""
        import numpy as np

        record = self.record
        while not self._is_over():
            self._take_one(record.passes)
            record.passes += 1
        for told, times in (
            (record.hook_us, self._hook_us),
            (record.hook_cpu_us, self._hook_cpu_us),
        ):
            for name, q in (("median", 50), ("p99", 99), ("longest", 100)):
                told[name] = round(float(np.percentile(times, q)), 1)
        seat = self.one.seat()
        if seat is not None:
            record.stopped = seat.stopped
            record.reports = self._covered()
        return record

    def _is_over(self) -> bool:
        """Follow the controls, which all ranks read together."""
        number, passes = self.record.passes, self.options.passes
        if passes:
            self.controls = Controls(traffic=int(number >= passes // 2))
            return number == passes
        if number % _CONTROL_PASSES:
            return False
        before = self.controls
        while (controls := self._read_controls()).is_idle and not controls.is_over:
            time.sleep(0.05)
        self.controls = controls
        if controls.updates > before.updates:
            self.one.update(announced=True)
        if controls.hidden_updates > before.hidden_updates:
            self.one.update(announced=False)
        return controls.is_over

    def _read_controls(self) -> Controls:
        import torch.distributed as dist

        file, told = Path(self.options.folder, "controls.json"), [None]
        if self.one.rank == 0 and file.exists():
            told = [json.loads(file.read_text())]
        dist.broadcast_object_list(told, src=0)
        return Controls(**told[0]) if told[0] else Controls()

    def _take_one(self, number: int) -> None:
        one, record = self.one, self.record
        self.stage.receive()
        began_s = time.perf_counter()
        load = one.route(self.controls.traffic)
        self._window += load
        self._routed.append(self._routed[-1] + int(load.sum()))
        hook_s, hook_cpu_s = time.perf_counter(), time.thread_time()
        one.step()
        self._hook_us.append(1e6 * (time.perf_counter() - hook_s))
        self._hook_cpu_us.append(1e6 * (time.thread_time() - hook_cpu_s))
        self.stage.send()
        if fault := one.fault():
            record.faults.append(f"pass {number}: {fault}")
        self._note_tables(number)
        seat = one.seat()
        if seat is not None and seat.is_ready:
            self._ready = self._ready or number + 1
        if (number + 1) % WINDOW_PASSES == 0:
            self._end_window()
        rest_s = self.options.pass_ms / 1e3 - (time.perf_counter() - began_s)
        if rest_s > 0:
            time.sleep(rest_s)

    def _note_tables(self, number: int) -> None:
        tables = self.one.tables()
        digest = hashlib.blake2b(digest_size=16)
        for table in tables:
            digest.update(table.contiguous().numpy())
        if not self.record.tables or self.record.tables[-1][1] != digest.hexdigest():
            self.record.tables.append((number, digest.hexdigest()))
            if self._experts is not None:
                self.record.moves += int((tables[0] != self._experts).sum())
            self._experts = tables[0].clone()

    def _covered(self) -> list[tuple[int, int, int]]:
        """What the reports say, beside what was sent in the passes that they cover."""
        counted: dict[int, int] = {}
        covered = {}
        for report in self.one.reports:
            counted[report.load.generation] = int(report.load.assignments.sum())
            if report.stats.steps > self._ready:
                routed = self._routed[report.stats.steps] - self._routed[self._ready]
                covered[report.stats.steps] = (sum(counted.values()), routed)
        return [(passes, *both) for passes, both in covered.items()]

    def _end_window(self) -> None:
        import torch.distributed as dist

        total = self._window.clone()
        dist.all_reduce(total, group=self.stage.group)
        self._window.zero_()
        load = total.view(self.options.layers, self.options.stage_ranks, -1).sum(-1)
        ratio = load.max(1).values / load.mean(1)
        self.record.imbalance.append(round(float(ratio.mean()), 3))
        if self.one.rank % self.options.stage_ranks == 0:
            with Path(self.options.folder, f"windows{self.stage.number}").open("a") as file:
                file.write(f"{self.record.imbalance[-1]}\n")


def prepare(one, seat):
    """What the options want of a seat that is ready."""
    from equipoise.rank.waits import SOURCE_TIMEOUT_S
    from equipoise.wire.messages import Report

    note = seat.on_switch

    def on_switch(switch):
        one.record.switches.append((switch.generation - seat.epoch, switch.step, switch.stall_us))
        note(switch)

    seat.on_switch = on_switch
    outbox = seat._on_ready.__self__._outbox
    send, one.reports = outbox.send, []

    def sent(message):
        if isinstance(message, Report):
            one.reports.append(message)
        return send(message)

    outbox.send = sent
    if one.options.answer in {"damaged", "slow"} and one.rank == _BAD_RANK:
        read = seat.held.read

        def badly(**about):
            if one.options.answer == "slow":
                time.sleep(2 * SOURCE_TIMEOUT_S)
            payload = read(**about).clone()
            payload[0] ^= one.options.answer == "damaged"
            return payload

        seat.held.read = badly
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
