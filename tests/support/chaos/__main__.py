"""`make chaos`: performs many runs, shows progress, and prints a table of faults survived."""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from equipoise.planning.warm_up import warm_up
from tests.support.chaos.campaign import Result, results, undisturbed_answers
from tests.support.chaos.checks import Violation
from tests.support.chaos.plan import Fault, Ground, Kind, Run, kinds_of

_CLOCK_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
)


def main() -> int:
    """Perform the runs asked for; 1 if anything was violated."""
    options = _options()
    console = Console()
    if options.add:
        done = [result for file in options.add for result in _read(file)]
        console.print(_table(done))
        return int(any(result.violations for result in done))
    folder = options.folder or Path(tempfile.mkdtemp(prefix="equipoise-chaos-"))
    console.print(f"the processes' logs: {folder}")
    done = asyncio.run(_perform(options, folder=folder, console=console))
    console.print(_table(done))
    for result in done:
        _tell_violations(result, console)
    return int(any(result.violations for result in done))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first; the next has one more")
    parser.add_argument(
        "--ground", type=Ground, choices=list(Ground), help="(default: all, in turn)"
    )
    parser.add_argument("--folder", type=Path, help="where processes write (default: a new one)")
    parser.add_argument("--json", type=Path, help="file for the results, as they come")
    parser.add_argument(
        "--add", type=Path, nargs="+", help="do nothing but add up the results in these files"
    )
    return parser.parse_args()


async def _perform(options: argparse.Namespace, *, folder: Path, console: Console) -> list[Result]:
    console.print("compiling the planner, computing the undisturbed answers")
    await asyncio.to_thread(warm_up)
    answers = await asyncio.to_thread(undisturbed_answers)
    library = clock_library()
    if library is None:
        console.print("no libfaketime here: clocks do not jump (apt-get install faketime)")
    done: list[Result] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("starting a fleet", total=options.runs)
        for ground, seeds in _shares(options).items():
            performed = results(
                seeds, ground=ground, folder=folder, answers=answers, clock_library=library
            )
            async with aclosing(performed):
                async for result in performed:
                    done.append(result)
                    progress.update(bar, advance=1, description=str(ground))
                    console.print(_line(result), highlight=False)
                    _tell_violations(result, console)
                    if options.json:
                        _write(done, options.json)
    return done


def _tell_violations(result: Result, console: Console) -> None:
    for violation in result.violations:
        console.print(f"{violation.what}: {violation.message}", style="red", markup=False)
        console.print(
            f"  again: make chaos ARGS='--seed {result.run.seed} --runs 1 "
            f"--ground {result.run.ground}'"
        )


def _write(done: list[Result], file: Path) -> None:
    file.write_text(json.dumps([asdict(result) for result in done], indent=1))


def _read(file: Path) -> list[Result]:
    """What `_write` wrote."""
    results = []
    for record in json.loads(file.read_text()):
        run = record["run"]
        faults = tuple(Fault(**{**one, "kind": Kind(one["kind"])}) for one in run["faults"])
        run = Run(**{**run, "ground": Ground(run["ground"]), "faults": faults})
        violations = tuple(Violation(*one) for one in record["violations"])
        results.append(Result(**{**record, "run": run, "violations": violations}))
    return results


def clock_library() -> Path | None:
    """Where libfaketime is, if it is here."""
    return next((Path(name) for name in _CLOCK_LIBRARIES if Path(name).exists()), None)


def _shares(options: argparse.Namespace) -> dict[Ground, list[int]]:
    seeds = range(options.seed, options.seed + options.runs)
    if options.ground:
        return {options.ground: list(seeds)}
    # One in four on SQLite: it has fewer ways to fail.
    grounds = (Ground.SQLITE, Ground.REDIS, Ground.POOLS, Ground.REDIS)
    return {
        ground: [seed for seed in seeds if grounds[seed % len(grounds)] is ground]
        for ground in Ground
    }


def _line(result: Result) -> str:
    faults = ", ".join(
        f"{fault.kind} at {fault.at_s:.1f} s for {fault.lasts_s:.1f} s"
        for fault in result.run.faults
    )
    outcome = "[red]VIOLATED[/red]" if result.violations else "[green]held[/green]"
    return (
        f"{outcome} seed {result.run.seed} {result.run.ground}: {faults}; "
        f"{result.num_answers} answers, {result.num_rejected} turned away, longest pause "
        f"{result.longest_pause_s:.1f} s, {result.took_s:.0f} s"
        + (f", {result.num_latents} messages of latents" if result.num_latents else "")
        + "".join(f", {name} after {took_s:.1f} s" for name, took_s in result.waits_s.items())
    )


def _table(done: list[Result]) -> Table:
    injected: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    pauses: defaultdict[str, list[float]] = defaultdict(list)
    for result in done:
        for fault in result.run.faults:
            injected[fault.kind] += 1
            survived[fault.kind] += not result.violations
        if len(result.run.faults) == 1:
            pauses[result.run.faults[0].kind].append(result.longest_pause_s)
    violated = sum(bool(result.violations) for result in done)
    table = Table(title=f"{len(done)} runs, {violated} with violations")
    table.add_column("fault")
    for heading in ("injected", "survived", "longest pause alone, s"):
        table.add_column(heading, justify="right")
    for kind in dict.fromkeys(kind for ground in Ground for kind in kinds_of(ground)):
        longest = f"{max(pauses[kind]):.1f}" if pauses[kind] else ""
        table.add_row(kind, str(injected[kind]), str(survived[kind]), longest)
    table.add_section()
    table.add_row("all", str(injected.total()), str(survived.total()))
    return table


if __name__ == "__main__":
    sys.exit(main())
