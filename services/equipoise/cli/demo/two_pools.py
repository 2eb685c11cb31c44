"""`equipoise demo --disaggregated`: a prefill and a decode pool whose layouts come to differ.

Half of the clients send long prompts of one kind of text for very short answers, the others short
prompts of another kind for long answers, so most of what the prefill pool runs is of the first
kind, and most of what the decode pool generates of the second.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import grpc
import httpx2
from prometheus_client.parser import text_string_to_metric_families

from equipoise.cli.demo.arguments import balancer_arguments, domain_prompts, worker_arguments
from equipoise.cli.demo.fleet import Fleet, FleetError, free_address
from equipoise.cli.demo.settings import DemoSettings
from equipoise.cli.demo.traffic import REQUEST_TIMEOUT_S, Prompt
from equipoise.cli.demo.two_pools_result import PoolRecord, TwoPoolsResult, figures_of
from equipoise.cli.demo.view import Screen
from equipoise.cli.live.loads import load_table
from equipoise.cli.live.status_feed import StatusFeed
from equipoise.wire.layouts import layout_from_proto
from equipoise_api.v1 import status_pb2, status_pb2_grpc

PREFILL, DECODE = "prefill", "decode"
PHASES: Mapping[str, str] = {PREFILL: "prefill", DECODE: "decode"}

BLOCK_TOKENS = 16
"""Tokens per block of a worker's latent cache on a CPU."""

_PREFILL_CACHE_TOKENS = 512
"""Too few for all prompts: from a larger cache, each would be prefilled only once."""

_MIN_ASSIGNMENTS = 500
"""Of a window: fewer than by default, because decode ranks have one token per request and step."""

_START_TIMEOUT_S = 240.0
_CALL_TIMEOUT_S = 30.0
_REFERENCE_BATCH = 16
_POLL_S = 0.5
_SHORT_ANSWER = (2, 2)
_LONG_ANSWER = (48, 64)
_HANDOVERS = "equipoise_gateway_handovers_total"


class TwoPoolsDemo:
    """One run of the demo."""

    def __init__(
        self, settings: DemoSettings, *, fleet: Fleet, screen: Screen, state: Path
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._screen = screen
        self._state = state
        self._address = free_address(settings.listen)
        self._page = free_address(settings.web_listen)
        self._gateway, self._metrics = free_address("127.0.0.1:0"), free_address("127.0.0.1:0")
        self._feeds = {pool: StatusFeed(self._address, pool=pool) for pool in PHASES}
        self._prompts = prompts_by_phase(settings)
        self._references: dict[Prompt, tuple[int, ...]] = {}
        self._failures: list[str] = []
        self._num_requests = self._tokens_compared = self._tokens_identical = 0
        self._began_s = time.monotonic()

    async def run(self) -> TwoPoolsResult:
        """Start the fleet, send the traffic, return the figures. The caller stops the fleet."""
        async with asyncio.TaskGroup() as group:
            watchers = [
                group.create_task(self._fleet.watch()),
                *(group.create_task(feed.run()) for feed in self._feeds.values()),
            ]
            await self._start()
            await self._send_traffic()
            result = await self._result()
            for watcher in watchers:
                watcher.cancel()
        return result

    async def _start(self) -> None:
        for name, arguments in self._processes():
            await self._fleet.start(name, arguments)
        await self._fleet.until_serving("balancer", self._address, timeout_s=_START_TIMEOUT_S)
        self._say(f"web page: http://{self._page}/")
        self._say(
            f"balancer: {self._address}; in another shell, run: "
            f"equipoise status --address {self._address}"
        )
        await asyncio.gather(self._compute_references(), self._until_ready())
        num_ranks = self._settings.workers // 2
        self._say(f"{num_ranks} prefill and {num_ranks} decode ranks serve: http://{self._gateway}")

    def _processes(self) -> Iterator[tuple[str, list[str]]]:
        settings = self._settings
        num_ranks = settings.workers // 2
        for pool, peer in ((PREFILL, DECODE), (DECODE, PREFILL)):
            own = [f"--phase={PHASES[pool]}", f"--peer-pools={peer}"]
            if pool == PREFILL:
                own.append(f"--cache-tokens={_PREFILL_CACHE_TOKENS}")
            for rank in range(num_ranks):
                arguments = worker_arguments(
                    settings,
                    pool=pool,
                    worker=f"{pool}-{rank}",
                    rank=rank,
                    num_ranks=num_ranks,
                    # As many slots in each pool as in the demo's one.
                    slots_per_rank=2 * settings.slots_per_rank,
                    balancer=self._address,
                )
                yield f"{pool}-{rank}", [*arguments, *own]
        arguments = balancer_arguments(
            settings, address=self._address, page=self._page, state=self._state
        )
        yield "balancer", [*arguments, f"--min-assignments={_MIN_ASSIGNMENTS}"]
        yield (
            "gateway",
            [
                "gateway",
                f"--listen={self._gateway}",
                f"--balancer={self._address}",
                f"--pool={DECODE}",
                f"--prefill-pool={PREFILL}",
                f"--metrics-listen={self._metrics}",
            ],
        )

    async def _compute_references(self) -> None:
        # Imported here, because it takes seconds and needs torch.
        from equipoise.cli.demo.reference import ReferenceModel

        model = await asyncio.to_thread(ReferenceModel.load, self._settings.checkpoint)
        for prompts in self._prompts.values():
            for first in range(0, len(prompts), _REFERENCE_BATCH):
                batch = prompts[first : first + _REFERENCE_BATCH]
                self._references.update(await asyncio.to_thread(model.answer, batch))
        self._say(f"reference: {len(self._references)} distinct prompts completed in one process")

    async def _until_ready(self) -> None:
        try:
            for feed in self._feeds.values():
                await feed.until(
                    lambda status: status.health == status_pb2.POOL_HEALTH_SERVING,
                    timeout_s=_START_TIMEOUT_S,
                )
            async with asyncio.timeout(_START_TIMEOUT_S), self._clients() as http:
                while not await _is_ready(http):  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise FleetError(
                f"the pools were not serving after {_START_TIMEOUT_S:g} s\n"
                f"{self._fleet.log_tail('gateway')}"
            ) from None

    async def _send_traffic(self) -> None:
        settings = self._settings
        until_s = time.monotonic() + settings.seconds_per_domain * len(settings.domains)
        each = max(1, settings.clients_per_rank * settings.workers // 4)
        self._say(
            f"{each} clients send long prompts of {settings.domains[0]} for short answers, "
            f"{each} short prompts of {settings.domains[-1]} for long answers"
        )
        async with self._clients() as http, asyncio.TaskGroup() as clients:
            showing = clients.create_task(self._keep_showing())
            asking = [
                clients.create_task(self._be_client(http, prompts, until_s=until_s))
                for prompts in map(cycle, self._prompts.values())
                for _ in range(each)
            ]
            await asyncio.gather(*asking)
            showing.cancel()

    async def _be_client(
        self, http: httpx2.AsyncClient, prompts: Iterator[Prompt], *, until_s: float
    ) -> None:
        while time.monotonic() < until_s:
            failure = await self._ask(http, next(prompts))
            if failure:
                self._failures.append(failure)
                await asyncio.sleep(_POLL_S)

    async def _ask(self, http: httpx2.AsyncClient, prompt: Prompt) -> str:
        """Send a request and compare its answer; returns why it failed, empty if it did not."""
        self._num_requests += 1
        body = {
            "prompt": list(prompt.tokens),
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        try:
            response = await http.post("/v1/completions", json=body)
        except httpx2.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        if response.status_code != httpx2.codes.OK:
            return f"status {response.status_code}: {response.text}"
        ours, theirs = response.json()["choices"][0]["token_ids"], self._references[prompt]
        self._tokens_compared += max(len(ours), len(theirs))
        self._tokens_identical += sum(a == b for a, b in zip(ours, theirs, strict=False))
        return ""

    async def _keep_showing(self) -> None:
        shown = dict.fromkeys(self._feeds, 0.0)
        while True:
            for pool, feed in self._feeds.items():
                latest = max(feed.windows, default=0.0)
                window = feed.windows.get(latest)
                if window is not None and latest > shown[pool] and window.assignments:
                    shown[pool] = latest
                    self._say(
                        f"{pool}: rank max/mean {window.max_over_mean:.2f}, generation "
                        f"{window.generation}; {self._num_requests:,} requests, "
                        f"{len(self._failures)} failed"
                    )
            self._fleet.memory_bytes()
            await asyncio.sleep(_POLL_S)

    async def _result(self) -> TwoPoolsResult:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = status_pb2_grpc.StatusStub(channel)
            prefill, decode = [await self._record(stub, pool) for pool in PHASES]
        return TwoPoolsResult(
            pools=(figures_of(prefill, decode), figures_of(decode, prefill)),
            requests=self._num_requests,
            failures=tuple(self._failures),
            tokens_compared=self._tokens_compared,
            tokens_identical=self._tokens_identical,
            handovers=await self._handovers(),
            peak_memory_bytes=self._fleet.peak_memory_bytes,
            wall_s=time.monotonic() - self._began_s,
        )

    async def _record(self, stub: "status_pb2_grpc.StatusAsyncStub", pool: str) -> PoolRecord:
        status = self._feeds[pool].status
        assert status is not None
        loads = await stub.GetLoads(status_pb2.GetLoadsRequest(pool=pool), timeout=_CALL_TIMEOUT_S)
        layout = await stub.GetLayout(
            status_pb2.GetLayoutRequest(pool=pool), timeout=_CALL_TIMEOUT_S
        )
        return PoolRecord(
            pool=pool,
            phase=PHASES[pool],
            rollouts=status.rollouts_completed,
            load=load_table(loads.slow_assignments_per_s, (loads.num_layers, loads.num_experts)),
            layout=layout_from_proto(layout.layout),
        )

    async def _handovers(self) -> int:
        async with httpx2.AsyncClient(timeout=_CALL_TIMEOUT_S) as http:
            text = (await http.get(f"http://{self._metrics}/metrics")).text
        samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]
        return int(sum(sample.value for sample in samples if sample.name == _HANDOVERS))

    def _clients(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=f"http://{self._gateway}",
            timeout=REQUEST_TIMEOUT_S,
            limits=httpx2.Limits(max_connections=None),
        )

    def _say(self, text: str) -> None:
        self._screen.say(text, at_s=time.monotonic() - self._began_s)


def prompts_by_phase(settings: DemoSettings) -> Mapping[str, Sequence[Prompt]]:
    """The requests that are mostly prefill, and those that are mostly decode.

    Prompts are whole blocks, so decode ranks fetch all of them and prefill none.
    """
    long = domain_prompts(settings, settings.domains[0], max_tokens=_SHORT_ANSWER)
    short = domain_prompts(settings, settings.domains[-1], max_tokens=_LONG_ANSWER)
    return {
        PREFILL: [_cut(one, len(one.tokens) // BLOCK_TOKENS * BLOCK_TOKENS) for one in long],
        DECODE: [_cut(one, BLOCK_TOKENS) for one in short],
    }


def _cut(prompt: Prompt, num_tokens: int) -> Prompt:
    return Prompt(
        domain=prompt.domain, tokens=prompt.tokens[:num_tokens], max_tokens=prompt.max_tokens
    )


async def _is_ready(http: httpx2.AsyncClient) -> bool:
    with suppress(httpx2.TransportError):
        return (await http.get("/readyz")).status_code == httpx2.codes.OK
    return False
