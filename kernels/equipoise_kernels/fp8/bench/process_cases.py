"""Gate E3: the exchange between processes that share one GPU, and their report of a dead rank.

It shows that the protocol holds between processes: flags, parities, skew, and a lost rank. Contexts
take turns on the GPU, so its times are meaningless.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from equipoise_kernels.fp8.bench.bench import Bench
from equipoise_kernels.fp8.bench.exchange_rank import Arguments, ExchangeRecord
from equipoise_kernels.fp8.bench.report import Sample

_RANKS = 3
_EXCHANGES = 10_000
# Contexts that take turns on a GPU make a few dozen exchanges per second.
_FEWEST = 500
_TIMEOUT_S = 10.0
# Starting Python, forming the group, and compiling with an empty cache.
_STARTING_S = 30.0
_ROOM = Path(__file__).parents[3]
# Torch maps windows of the same device into each other only if this is set.
_ENVIRONMENT = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "OMP_NUM_THREADS": "1"}


def processes(
    bench: Bench,
    *,
    num_ranks: int = _RANKS,
    exchanges: int = _EXCHANGES,
    fewest: int = _FEWEST,
    within_s: float | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> list[Sample]:
    """E3: the share of exchanges that were correct on every rank, of as many as time allows.

    Fewer than `fewest` are a fault. By default, exchanges take what starting and losing a rank
    leave of the case's time.
    """
    if within_s is None:
        within_s = max(1.0, bench.within_s - _STARTING_S - 3 * timeout_s)
    with tempfile.TemporaryDirectory(prefix="equipoise-") as folder:
        arguments = Arguments(
            num_ranks=num_ranks,
            rendezvous=str(Path(folder) / "rendezvous"),
            device=bench.device.type,
            exchanges=exchanges,
            within_s=within_s,
            timeout_s=timeout_s,
            seed=bench.rng.randrange(1 << 30),
        )
        reports, faults = _ran(arguments)
    faults += [
        fault
        for rank, seen in reports.items()
        for fault in _faults(rank, seen, arguments, fewest=min(fewest, exchanges))
    ]
    shares = [(seen.exchanges - seen.wrong) / max(seen.exchanges, 1) for seen in reports.values()]
    made = min((seen.exchanges for seen in reports.values()), default=0)
    return [
        Sample(
            gate="E3",
            shape=f"{num_ranks} processes x {made} exchanges",
            value=min(shares, default=0.0),
            raw={f"rank_{rank}_waited_s": seen.waited_s for rank, seen in reports.items()},
            faults=faults,
        )
    ]


def _ran(arguments: Arguments) -> tuple[Mapping[int, ExchangeRecord], list[str]]:
    """Records of every rank but the killed one; ranks that failed become faults."""
    bound_s = _STARTING_S + arguments.within_s + arguments.timeout_s
    path = os.pathsep.join([str(_ROOM), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "equipoise_kernels.fp8.bench.exchange_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), json.dumps(asdict(arguments))],
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(arguments.num_ranks)
    ]
    seen, faults = {}, []
    try:
        for rank, process in enumerate(ranks[:-1]):
            output, errors = process.communicate(timeout=bound_s)
            if process.returncode == 0:
                seen[rank] = ExchangeRecord(**json.loads(output))
            else:
                faults.append(f"rank {rank} failed: {_last_line(errors)}")
    except subprocess.TimeoutExpired:
        faults.append(f"ranks were not done within {bound_s:g} s")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    return seen, faults


def _faults(rank: int, seen: ExchangeRecord, arguments: Arguments, *, fewest: int) -> Sequence[str]:
    """Return the faults of a rank's record."""
    faults, killed = [], arguments.num_ranks - 1
    if seen.exchanges < fewest:
        faults.append(f"rank {rank}: time for {seen.exchanges} exchanges only, {fewest} are needed")
    if seen.wrong:
        faults.append(f"rank {rank}: {seen.wrong} sums are not right to the last bit")
    if tuple(seen.missing) != (killed,):
        faults.append(f"rank {rank}: rank {killed} is dead, but it reported: {seen.words}")
    if seen.waited_s > 2 * arguments.timeout_s:
        faults.append(f"rank {rank} took {seen.waited_s:.1f} s to report it")
    return faults


def _last_line(errors: str) -> str:
    return (errors.strip().splitlines() or ["without a word"])[-1]
