"""`equipoise bench serve`: how fast a server answers, from outside, in the field's usual words."""

import asyncio
import importlib
import json
import time
from dataclasses import asdict

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from equipoise.cli.bench.clients import Load, Served
from equipoise.cli.bench.report import BenchReport, Spread, report
from equipoise.cli.bench.requests import asked_requests
from equipoise.cli.bench.settings import BenchServeSettings
from equipoise.cli.display import console

EXIT_FAILURES = 1


def run(settings: BenchServeSettings) -> int:
    """Measure and print; the exit status is 1 if a request failed.

    Raises:
        ToolInputError: the server cannot be reached, or the options contradict each other.
        FormatError: the picture cannot be written.
    """
    if settings.plot is not None:
        importlib.import_module("matplotlib")  # If it is missing, say so before the work.
    model, served = asyncio.run(_measured(settings))
    made = report(served)
    if settings.plot is not None:
        importlib.import_module("equipoise.cli.bench.plot").draw(
            served, settings.plot, title=_title(settings, model)
        )
    if settings.json:
        print(json.dumps({"settings": _chosen(settings, model), **asdict(made)}, indent=2))
    else:
        _show(made, title=_title(settings, model))
    return EXIT_FAILURES if made.failed else 0


async def _measured(settings: BenchServeSettings) -> tuple[str, list[Served]]:
    screen = console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    warm_up = asked_requests(settings, count=settings.warm_up, stream=1) if settings.warm_up else ()
    measured = asked_requests(settings, count=settings.requests, stream=0)
    with Progress(
        *columns, console=screen, transient=True, disable=not screen.is_terminal
    ) as progress:
        task = progress.add_task("warming up", total=len(warm_up))
        async with Load(
            settings, clock=time.perf_counter, done=lambda _: progress.advance(task)
        ) as load:
            model = await load.model()
            await load.run(warm_up, model=model)
            progress.reset(task, description="measuring", total=len(measured))
            return model, await load.run(measured, model=model)


def _title(settings: BenchServeSettings, model: str) -> str:
    pace = "at once" if settings.request_rate == float("inf") else f"{settings.request_rate:g}/s"
    return f"{model}: {settings.requests} requests {pace}, {settings.concurrency} open at most"


def _chosen(settings: BenchServeSettings, model: str) -> dict[str, object]:
    """What the numbers depend on; JSON has no infinity."""
    unlimited = settings.request_rate == float("inf")
    return {
        "url": settings.url,
        "model": model,
        "request_rate": None if unlimited else settings.request_rate,
        "concurrency": settings.concurrency,
        "warm_up": settings.warm_up,
        "mix": settings.shares,
        "input_chars": settings.input_chars,
        "output_tokens": settings.output_tokens,
        "ignore_eos": settings.ignore_eos,
        "temperature": settings.temperature,
        "seed": settings.seed,
    }


def _show(made: BenchReport, *, title: str) -> None:
    screen = console()
    screen.print(title, highlight=False)
    rates = Table.grid(padding=(0, 2))
    rates.add_column()
    rates.add_column(justify="right")
    for name, value in (
        ("answered", f"{made.requests - made.failed} of {made.requests}"),
        ("duration", f"{made.duration_s:.2f} s"),
        ("requests", f"{made.requests_per_s:.2f}/s"),
        ("output tokens", f"{made.output_tokens_per_s:.1f}/s"),
    ):
        rates.add_row(name, value)
    screen.print(rates)
    table = Table("milliseconds")
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for words, spread in (
        ("to the first token (TTFT)", made.ttft),
        ("between tokens (ITL)", made.itl),
        ("to the end (E2E)", made.e2e),
    ):
        table.add_row(words, *_cells(spread))
    screen.print(table)
    for why, count in made.failures.items():
        screen.print(f"{count} failed: {why}", style="red", highlight=False, markup=False)


def _cells(spread: Spread) -> list[str]:
    values = (spread.mean_ms, spread.p50_ms, spread.p90_ms, spread.p99_ms)
    return ["-" if value is None else f"{value:.1f}" for value in values]
