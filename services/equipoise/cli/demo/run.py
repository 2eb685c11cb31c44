"""`equipoise demo`: a fleet on this machine drifts out of balance when traffic changes, and back.

Owns the order of events: start, traffic by domain, end, verdict. Processes are `fleet`'s, requests
`traffic`'s, figures `outcome`'s, the picture `demo_view`'s.
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

from equipoise.cli.demo.fleet import Fleet, FleetError, free_address
from equipoise.cli.demo.outcome import (
    Outcome,
    compare_tokens,
    latency,
    shift_outcome,
    split_latency,
    steps_of_two_generations,
)
from equipoise.cli.demo.records import switches_of, windows_of
from equipoise.cli.demo.settings import DemoError, DemoSettings
from equipoise.cli.demo.summary import summary
from equipoise.cli.demo.traffic import Completion, Prompt, Traffic, prompts_of
from equipoise.cli.demo.view import Mark, Scene, Screen, open_screen
from equipoise.cli.live.status_feed import StatusFeed
from equipoise_api.v1 import status_pb2
from equipoise_model.train.data import heldout_prompts

__all__ = ["DemoError", "DemoSettings", "run"]

POOL = "demo"

_BALANCER_TIMEOUT_S = 120.0
_POOL_TIMEOUT_S = 240.0
_REFERENCE_BATCH = 16  # prompts answered at once, which a Ctrl-C may have to wait for
_PIPE_WIDTH = 120
# Ranks share a few cores with their pulls: seldom more than two of the tiny model's experts a rank
# and step, and all that a shift of traffic asks for within a second.
_PULL_MIB_PER_S = 0.5
# Windows of six seconds have few tokens, which come in bursts: smaller gains are mostly chance.
_MIN_GAIN = 0.04
_REFRESH_S = 0.5
_RECENT_S = 4.0  # live figures are of the last seconds


def run(settings: DemoSettings) -> int:
    """Run the demo to its end; exit status 0 when everything held, 1 when not.

    Raises:
        DemoError: the demo cannot be run as asked.
        FleetError: a process ended by itself or was not ready in time.
    """
    _check_files(settings)
    # A pipe has no width of its own, and a table that is broken to 80 columns is hard to read.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    try:
        outcome = asyncio.run(_run(settings, console))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except BaseExceptionGroup as group:
        raise _first(group) from None
    console.print(summary(outcome))
    if settings.json is not None:
        settings.json.write_text(json.dumps(outcome.to_json(), indent=2) + "\n")
    for fault in outcome.faults:
        console.print(f"[bold red]FAILED[/] {fault}", soft_wrap=True)
    return 1 if outcome.faults else 0


async def _run(settings: DemoSettings, console: Console) -> Outcome:
    task = asyncio.current_task()
    assert task is not None
    # As Ctrl-C does; by default SIGTERM would leave the terminal and the temporary folder as is.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="equipoise-demo-") as temporary:
        folder = settings.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with open_screen(console, plain=settings.plain) as screen:
            async with Fleet(folder) as fleet:
                return await Demo(
                    settings, fleet=fleet, screen=screen, state=Path(temporary) / "state.sqlite"
                ).run()


class Demo:
    """One run: what was started and what was seen so far."""

    def __init__(
        self, settings: DemoSettings, *, fleet: Fleet, screen: Screen, state: Path
    ) -> None:
        self._settings = settings
        self._state = state
        self._fleet = fleet
        self._screen = screen
        self._prompts = _prompts(settings)
        self._references: dict[Prompt, tuple[int, ...]] = {}
        self._address = free_address(settings.listen)
        self._page = free_address(settings.web_listen)
        self._feed = StatusFeed(self._address, pool=POOL)
        self._traffic: Traffic | None = None
        self._marks: list[Mark] = []
        self._doing = "starting the workers"
        self._num_compared = self._tokens_compared = self._tokens_identical = 0
        self._rates: deque[tuple[float, int]] = deque(maxlen=round(_RECENT_S / _REFRESH_S) + 1)
        # Counts like a monotonic clock, so that latencies are exact, but from 1970 on.
        self._began_s = time.time()
        self._began_monotonic_s = time.monotonic()

    async def run(self) -> Outcome:
        """From the first process to the figures; the fleet's owner stops the processes."""
        async with asyncio.TaskGroup() as group:
            watchers = [
                group.create_task(self._fleet.watch()),
                group.create_task(self._feed.run()),
                group.create_task(self._keep_showing()),
            ]
            await self._start()
            from_s = self._now()
            await self._send_traffic()
            outcome = self._outcome(from_s=from_s)
            for watcher in watchers:
                watcher.cancel()
        return outcome

    async def _start(self) -> None:
        settings = self._settings
        if self._address != settings.listen and not settings.listen.endswith(":0"):
            self._say(f"{settings.listen} is in use: the balancer takes {self._address}")
        for rank in range(settings.workers):
            # They take longest, and wait for the balancer if they must.
            await self._fleet.start(
                f"worker-{rank}", _worker_arguments(settings, rank=rank, balancer=self._address)
            )
        self._doing = "starting the balancer"
        await self._fleet.start(
            "balancer",
            _balancer_arguments(
                settings, address=self._address, page=self._page, state=self._state
            ),
        )
        await self._fleet.until_serving("balancer", self._address, timeout_s=_BALANCER_TIMEOUT_S)
        self._say(f"the fleet in a browser: http://{self._page}/")
        self._say(
            f"the balancer serves at {self._address}; look from another shell with: "
            f"equipoise status --address {self._address} --watch"
        )
        self._doing = "loading the model, and asking it for reference tokens without a balancer"
        await asyncio.gather(self._learn_references(), self._until_pool_serves())

    async def _learn_references(self) -> None:
        # Imported here, because it takes seconds and needs torch.
        from equipoise.cli.demo.reference import ReferenceModel  # noqa: PLC0415

        model = await asyncio.to_thread(ReferenceModel.load, self._settings.checkpoint)
        prompts = [prompt for these in self._prompts.values() for prompt in these]
        for first in range(0, len(prompts), _REFERENCE_BATCH):
            batch = prompts[first : first + _REFERENCE_BATCH]
            self._references.update(await asyncio.to_thread(model.answer, batch))
        self._say(f"reference: {len(prompts)} distinct prompts answered without a balancer")

    async def _until_pool_serves(self) -> None:
        try:
            status = await self._feed.until(
                lambda status: status.health == status_pb2.POOL_HEALTH_SERVING,
                timeout_s=_POOL_TIMEOUT_S,
            )
        except TimeoutError:
            told = self._feed.status
            reason = told.health_reason if told else "no worker said hello"
            raise FleetError(
                f"the pool was not serving after {_POOL_TIMEOUT_S:g} s: {reason}\n"
                f"{self._fleet.log_tail('worker-0')}"
            ) from None
        self._say(
            f"{len(status.ranks)} ranks on {self._settings.nodes} nodes serve: "
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
                self._doing = f"{domain} traffic"
                self._say(
                    f"traffic shifts from {before} to {domain}" if before else f"{domain} traffic"
                )
                await asyncio.sleep(settings.seconds_per_domain)
                # A shift just behind the end of a window leaves whole windows to judge it by.
                await self._until_window_closes()
            self._doing = "letting the last requests end"
            self._traffic.end()

    async def _until_window_closes(self) -> None:
        newest = max(self._feed.windows, default=0.0)
        with suppress(TimeoutError):  # a balancer that is away must not end the traffic
            await self._feed.until(
                lambda _: max(self._feed.windows, default=0.0) > newest,
                timeout_s=2 * self._settings.interval_s,
            )

    def _outcome(self, *, from_s: float) -> Outcome:
        traffic, status = self._traffic, self._feed.status
        assert traffic is not None
        assert status is not None
        windows = windows_of(self._feed.windows.values())
        switches = switches_of(self._feed.switches.values())
        until_s = [mark.at_s for mark in self._marks[1:]] + [self._now()]
        self._compare(traffic.completions[self._num_compared :])
        quiet, during_rollout = split_latency(traffic.gaps, [switch.span for switch in switches])
        return Outcome(
            shifts=tuple(
                shift_outcome(
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
            doing=self._doing,
            status=self._feed.status,
            windows=windows_of(self._feed.windows.values()),
            decisions=[decision for _, decision in sorted(self._feed.decisions.items())],
            marks=self._marks,
            tokens_per_s=(num_tokens_now - num_tokens) / max(to_s - from_s, _REFRESH_S),
            latency=latency(np.array([gap.length_s for gap in recent])),
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


def _prompts(settings: DemoSettings) -> dict[str, tuple[Prompt, ...]]:
    """Prompts of text that the model was not trained on."""
    return {
        domain: prompts_of(
            domain,
            heldout_prompts(domain, num_prompts=settings.prompts_per_domain, seed=settings.seed),
            max_tokens=(settings.min_output_tokens, settings.max_output_tokens),
            seed=settings.seed,
        )
        for domain in settings.domains
    }


def _balancer_arguments(
    settings: DemoSettings, *, address: str, page: str, state: Path
) -> list[str]:
    return [
        "balancer",
        f"--listen={address}",
        f"--web-listen={page}",
        f"--store={state}",
        f"--interval-s={settings.interval_s}",
        f"--report-interval-s={settings.interval_s / 10}",
        # What is newer than a window must outweigh what is older, or a shift is seen late.
        f"--fast-half-life-s={settings.interval_s / 2}",
        f"--min-gain={_MIN_GAIN}",
    ]


def _worker_arguments(settings: DemoSettings, *, rank: int, balancer: str) -> list[str]:
    node = rank * settings.nodes // settings.workers
    return [
        "worker",
        f"--balancer={balancer}",
        f"--pool={POOL}",
        f"--worker=worker-{rank}",
        f"--node=node-{node}",
        f"--checkpoint={settings.checkpoint}",
        f"--num-ranks={settings.workers}",
        f"--slots-per-rank={settings.slots_per_rank}",
        "--batch-invariant",
        "--device=cpu",  # its ranks share this machine, and NCCL wants a GPU for each
        f"--pull-mib-per-s={_PULL_MIB_PER_S}",
    ]


def _check_files(settings: DemoSettings) -> None:
    """What would come to light minutes later."""
    if not (settings.checkpoint / "config.json").is_file():
        raise DemoError(
            f"there is no checkpoint in {settings.checkpoint}: name a folder with a config.json "
            f"by --checkpoint, or leave it out for the one that comes with the package"
        )
    if settings.json is not None and not settings.json.absolute().parent.is_dir():
        raise DemoError(f"{settings.json} cannot be written: make its folder first")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception that is no group: one fault is one line for the user."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
