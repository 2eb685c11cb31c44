"""`equipoise bench serve`: latency and throughput of an OpenAI-compatible server."""

import asyncio
import time
from dataclasses import asdict

from rich.progress import MofNCompleteColumn, TimeElapsedColumn
from rich.table import Table

from equipoise.cli.bench.clients import BenchClients, RequestResult
from equipoise.cli.bench.report import (
    BenchReport,
    e2es_s,
    itls_s,
    report,
    ttfts_s,
)
from equipoise.cli.bench.requests import timed_requests
from equipoise.cli.bench.settings import BenchServeSettings
from equipoise.cli.display import console, print_json, progress_bar

EXIT_FAILURES = 1

_TTFT, _ITL, _E2E = "time to first token", "inter-token latency", "end-to-end latency"


def run(settings: BenchServeSettings) -> int:
    """Measure and print; return 1 if a request failed.

    Raises:
        InvalidSettingsError: the server is unreachable, or options contradict each other.
        FormatError: the image cannot be written.
        ModuleNotFoundError: an image is requested and matplotlib is missing.
    """
    if settings.plot is not None:
        from equipoise.cli.plots import draw_latencies  # Fails early if matplotlib is missing.
    model, results = asyncio.run(_measured(settings))
    figures = report(results)
    if settings.plot is not None:
        good = [result for result in results if not result.failure]
        latencies_s = {_TTFT: ttfts_s(good), _ITL: itls_s(good), _E2E: e2es_s(good)}
        draw_latencies(latencies_s, settings.plot, title=_title(settings, model))
    if settings.json:
        print_json({"settings": _chosen(settings, model), **asdict(figures)})
    else:
        _show(figures, title=_title(settings, model))
    return EXIT_FAILURES if figures.failed else 0


async def _measured(settings: BenchServeSettings) -> tuple[str, list[RequestResult]]:
    warm_up = timed_requests(settings, count=settings.warm_up, stream=1) if settings.warm_up else ()
    measured = timed_requests(settings, count=settings.requests, stream=0)
    with progress_bar(MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task("warming up", total=len(warm_up))
        async with BenchClients(
            settings, clock=time.perf_counter, done=lambda _: progress.advance(task)
        ) as clients:
            model = await clients.model()
            await clients.run(warm_up, model=model)
            progress.reset(task, description="measuring", total=len(measured))
            return model, await clients.run(measured, model=model)


def _title(settings: BenchServeSettings, model: str) -> str:
    unlimited = settings.request_rate == float("inf")
    rate = "all at once" if unlimited else f"{settings.request_rate:g} per second"
    return (
        f"{model}: {settings.requests} requests, {rate}, at most {settings.concurrency} in flight"
    )


def _chosen(settings: BenchServeSettings, model: str) -> dict[str, object]:
    """The settings that the figures depend on; JSON has no infinity."""
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


def _show(figures: BenchReport, *, title: str) -> None:
    screen = console()
    screen.print(title, highlight=False)
    rates = Table.grid(padding=(0, 2))
    rates.add_column()
    rates.add_column(justify="right")
    for name, value in (
        ("successful requests", f"{figures.requests - figures.failed} of {figures.requests}"),
        ("duration", f"{figures.duration_s:.2f} s"),
        ("request throughput", f"{figures.requests_per_s:.2f}/s"),
        ("output token throughput", f"{figures.output_tokens_per_s:.1f}/s"),
    ):
        rates.add_row(name, value)
    screen.print(rates)
    table = Table("ms")
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for name, latency in ((_TTFT, figures.ttft), (_ITL, figures.itl), (_E2E, figures.e2e)):
        values = (latency.mean_ms, latency.p50_ms, latency.p90_ms, latency.p99_ms)
        table.add_row(name, *("-" if value is None else f"{value:.1f}" for value in values))
    screen.print(table)
    for why, count in figures.failures.items():
        screen.print(f"{count} failed: {why}", style="red", highlight=False, markup=False)
