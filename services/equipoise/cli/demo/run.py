"""`equipoise demo`: a local fleet drifts out of balance when traffic changes, and recovers.

This module owns the sequence of events. `fleet` runs the processes, `traffic` the clients; `result`
computes the figures, `view` and `summary` show them.
"""

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import numpy as np
from rich.console import Console

from equipoise.cli.demo.arguments import balancer_arguments, domain_prompts, worker_arguments
from equipoise.cli.demo.fleet import Fleet, FleetError, free_address
from equipoise.cli.demo.result import (
    DemoResult,
    compare_tokens,
    latency,
    recovery_of,
    split_latency,
    steps_of_two_generations,
    switches_of,
    windows_of,
)
from equipoise.cli.demo.settings import DemoSettings
from equipoise.cli.demo.summary import summary
from equipoise.cli.demo.traffic import Completion, Prompt, Traffic
from equipoise.cli.demo.two_pools import TwoPoolsDemo
from equipoise.cli.demo.two_pools_result import TwoPoolsResult
from equipoise.cli.demo.two_pools_result import summary as two_pools_summary
from equipoise.cli.demo.view import Mark, Scene, Screen, open_screen
from equipoise.cli.live.status_feed import StatusFeed
from equipoise.settings.errors import InvalidSettingsError
from equipoise_api.v1 import status_pb2

POOL = "demo"

_BALANCER_TIMEOUT_S = 120.0
_POOL_TIMEOUT_S = 240.0
_REFERENCE_BATCH = 16  # prompts; Ctrl-C takes effect between batches
_PIPE_WIDTH = 120
_REFRESH_S = 0.5
_RECENT_S = 4.0  # period of the live figures


def run(settings: DemoSettings) -> int:
    """Run the demo; return 0 if every check passed, else 1.

    Raises:
        InvalidSettingsError: a file or folder cannot be used.
        FleetError: a process exited unexpectedly or was not ready in time.
    """
    _check_files(settings)
    # A pipe has no width; the table needs more than the default 80 columns.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    try:
        result = asyncio.run(_run(settings, console))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except BaseExceptionGroup as group:
        raise _first(group) from None
    if isinstance(result, TwoPoolsResult):
        console.print(two_pools_summary(result))
    else:
        console.print(summary(result))
    if settings.json is not None:
        settings.json.write_text(json.dumps(result.to_json(), indent=2) + "\n")
    for fault in result.faults:
        console.print(f"[bold red]FAILED[/] {fault}", soft_wrap=True)
    return 1 if result.faults else 0


async def _run(settings: DemoSettings, console: Console) -> DemoResult | TwoPoolsResult:
    task = asyncio.current_task()
    assert task is not None
    # Like Ctrl-C: by default SIGTERM would leave the terminal and the temporary folder as they are.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="equipoise-demo-") as temporary:
        folder = settings.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        kind = TwoPoolsDemo if settings.disaggregated else Demo
        plain = settings.plain or settings.disaggregated
        with open_screen(console, plain=plain) as screen:
            async with Fleet(folder) as fleet:
                return await kind(
                    settings, fleet=fleet, screen=screen, state=Path(temporary) / "state.sqlite"
                ).run()


class Demo:
    """One run of the demo."""

    def __init__(
        self, settings: DemoSettings, *, fleet: Fleet, screen: Screen, state: Path
    ) -> None:
        self._settings = settings
        self._state = state
        self._fleet = fleet
        self._screen = screen
        answers = settings.min_output_tokens, settings.max_output_tokens
        self._prompts = {
            domain: domain_prompts(settings, domain, max_tokens=answers)
            for domain in settings.domains
        }
        self._references: dict[Prompt, tuple[int, ...]] = {}
        self._address = free_address(settings.listen)
        self._page = free_address(settings.web_listen)
        self._feed = StatusFeed(self._address, pool=POOL)
        self._traffic: Traffic | None = None
        self._marks: list[Mark] = []
        self._activity = "starting the workers"
        self._num_compared = self._tokens_compared = self._tokens_identical = 0
        self._rates: deque[tuple[float, int]] = deque(maxlen=round(_RECENT_S / _REFRESH_S) + 1)
        # `_now` is monotonic, so that latencies are exact, but in Unix seconds.
        self._began_s = time.time()
        self._began_monotonic_s = time.monotonic()

    async def run(self) -> DemoResult:
        """Start the fleet, send the traffic, return the figures. The caller stops the fleet."""
        async with asyncio.TaskGroup() as group:
            watchers = [
                group.create_task(self._fleet.watch()),
                group.create_task(self._feed.run()),
                group.create_task(self._keep_showing()),
            ]
            await self._start()
            from_s = self._now()
            await self._send_traffic()
            result = self._result(from_s=from_s)
            for watcher in watchers:
                watcher.cancel()
        return result

    async def _start(self) -> None:
        settings = self._settings
        if self._address != settings.listen and not settings.listen.endswith(":0"):
            self._say(f"{settings.listen} is in use: the balancer listens on {self._address}")
        for rank in range(settings.workers):
            # Workers take longest to start, and retry until the balancer listens.
            await self._fleet.start(
                f"worker-{rank}",
                worker_arguments(
                    settings,
                    pool=POOL,
                    worker=f"worker-{rank}",
                    rank=rank,
                    num_ranks=settings.workers,
                    slots_per_rank=settings.slots_per_rank,
                    balancer=self._address,
                ),
            )
        self._activity = "starting the balancer"
        await self._fleet.start(
            "balancer",
            balancer_arguments(settings, address=self._address, page=self._page, state=self._state),
        )
        await self._fleet.until_serving("balancer", self._address, timeout_s=_BALANCER_TIMEOUT_S)
        self._say(f"web page: http://{self._page}/")
        self._say(
            f"balancer: {self._address}; in another shell, run: "
            f"equipoise status --address {self._address} --watch"
        )
        self._activity = "loading the model and computing reference tokens"
        await asyncio.gather(self._compute_references(), self._until_pool_serves())

    async def _compute_references(self) -> None:
        # Imported here, because it takes seconds and needs torch.
        from equipoise.cli.demo.reference import ReferenceModel

        model = await asyncio.to_thread(ReferenceModel.load, self._settings.checkpoint)
        prompts = [prompt for these in self._prompts.values() for prompt in these]
        for first in range(0, len(prompts), _REFERENCE_BATCH):
            batch = prompts[first : first + _REFERENCE_BATCH]
            self._references.update(await asyncio.to_thread(model.answer, batch))
        self._say(f"reference: {len(prompts)} distinct prompts completed without a balancer")

    async def _until_pool_serves(self) -> None:
        try:
            status = await self._feed.until(
                lambda status: status.health == status_pb2.POOL_HEALTH_SERVING,
                timeout_s=_POOL_TIMEOUT_S,
            )
        except TimeoutError:
            latest = self._feed.status
            reason = latest.health_reason if latest else "no worker connected"
            raise FleetError(
                f"the pool was not serving after {_POOL_TIMEOUT_S:g} s: {reason}\n"
                f"{self._fleet.log_tail('worker-0')}"
            ) from None
        self._say(
            f"{len(status.ranks)} ranks on {self._settings.nodes} nodes are serving: "
            f"{status.model.num_experts} experts in "
            f"{self._settings.workers * self._settings.slots_per_rank} slots, "
            f"{status.model.num_layers} MoE layers"
        )

    async def _send_traffic(self) -> None:
        assert self._feed.status is not None
        settings = self._settings
        self._traffic = Traffic(
            self._prompts,
            addresses=[rank.address for rank in self._feed.status.ranks],
            clients_per_rank=settings.clients_per_rank,
            clock=self._now,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(self._traffic.run())
            for domain in settings.domains:
                before = self._marks[-1].domain if self._marks else None
                self._traffic.shift_to(domain)
                self._marks.append(Mark(at_s=self._now(), domain=domain))
                self._activity = f"{domain} traffic"
                self._say(
                    f"traffic shifts from {before} to {domain}" if before else f"{domain} traffic"
                )
                await asyncio.sleep(settings.seconds_per_domain)
                # Shift right after a window closes, so that whole windows measure it.
                await self._until_window_closes()
            self._activity = "waiting for the last requests"
            self._traffic.end()

    async def _until_window_closes(self) -> None:
        newest = max(self._feed.windows, default=0.0)
        with suppress(TimeoutError):  # Traffic continues without the balancer.
            await self._feed.until(
                lambda _: max(self._feed.windows, default=0.0) > newest,
                timeout_s=2 * self._settings.interval_s,
            )

    def _result(self, *, from_s: float) -> DemoResult:
        traffic, status = self._traffic, self._feed.status
        assert traffic is not None
        assert status is not None
        windows = windows_of(self._feed.windows.values())
        switches = switches_of(self._feed.switches.values())
        until_s = [mark.at_s for mark in self._marks[1:]] + [self._now()]
        self._compare(traffic.completions[self._num_compared :])
        quiet, during_rollout = split_latency(traffic.gaps, [switch.span for switch in switches])
        return DemoResult(
            shifts=tuple(
                recovery_of(
                    windows,
                    from_domain=before.domain,
                    to_domain=mark.domain,
                    at_s=mark.at_s,
                    until_s=end_s,
                )
                for before, mark, end_s in zip(
                    self._marks, self._marks[1:], until_s[1:], strict=False
                )
            ),
            switches=switches,
            rollouts=status.rollouts_completed,
            decisions=len(self._feed.decisions),
            generation=status.generation,
            requests=len(traffic.completions),
            failures=tuple(c.failure for c in traffic.completions if c.failure is not None),
            tokens_compared=self._tokens_compared,
            tokens_identical=self._tokens_identical,
            steps_of_two_generations=steps_of_two_generations(traffic.completions),
            quiet=quiet,
            during_rollout=during_rollout,
            tokens_per_s=traffic.num_tokens / (self._now() - from_s),
            peak_memory_bytes=self._fleet.peak_memory_bytes,
            wall_s=self._now() - self._began_s,
        )

    async def _keep_showing(self) -> None:
        while True:
            self._screen.show(self._scene())
            await asyncio.sleep(_REFRESH_S)

    def _scene(self) -> Scene:
        now_s = self._now()
        completions = self._traffic.completions if self._traffic else []
        gaps = self._traffic.gaps if self._traffic else []
        self._compare(completions[self._num_compared :])
        self._rates.append((now_s, self._traffic.num_tokens if self._traffic else 0))
        (from_s, num_tokens), (to_s, num_tokens_now) = self._rates[0], self._rates[-1]
        recent = takewhile(lambda gap: gap.to_s > from_s, reversed(gaps))
        return Scene(
            elapsed_s=now_s - self._began_s,
            activity=self._activity,
            status=self._feed.status,
            windows=windows_of(self._feed.windows.values()),
            decisions=[decision for _, decision in sorted(self._feed.decisions.items())],
            marks=self._marks,
            tokens_per_s=(num_tokens_now - num_tokens) / max(to_s - from_s, _REFRESH_S),
            latency=latency(np.array([gap.to_s - gap.from_s for gap in recent])),
            requests=len(completions),
            failed_requests=sum(c.failure is not None for c in completions),
            tokens_compared=self._tokens_compared,
            tokens_identical=self._tokens_identical,
            references_ready=len(self._references),
            references_total=sum(map(len, self._prompts.values())),
            memory_bytes=self._fleet.memory_bytes(),
        )

    def _compare(self, completions: Sequence[Completion]) -> None:
        compared, identical = compare_tokens(completions, self._references)
        self._num_compared += len(completions)
        self._tokens_compared += compared
        self._tokens_identical += identical

    def _say(self, text: str) -> None:
        self._screen.say(text, at_s=self._now() - self._began_s)

    def _now(self) -> float:
        return self._began_s + time.monotonic() - self._began_monotonic_s


def _check_files(settings: DemoSettings) -> None:
    """Find problems that would only show minutes later."""
    if not (settings.checkpoint / "config.json").is_file():
        raise InvalidSettingsError(
            f"no checkpoint in {settings.checkpoint}: --checkpoint needs a folder with a "
            "config.json; without it the demo uses the model in the package"
        )
    if settings.json is not None and not settings.json.absolute().parent.is_dir():
        raise InvalidSettingsError(f"cannot write {settings.json}: create its folder first")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception in nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
