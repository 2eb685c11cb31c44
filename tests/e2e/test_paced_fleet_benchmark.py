"""Tokens per second of the demo's fleet where the busiest rank sets a step's time, by layout.

Ranks share this machine's cores. Paced, the experts of a layer take as long as if each rank had a
GPU of its own. Three pools serve the same requests in turns: one keeps the contiguous layout, two
are balanced, one of these also chooses replicas by what all ranks route.
"""

import asyncio
import math
import os
import signal
import statistics
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from equipoise.cli.demo.arguments import balancer_arguments, domain_prompts, worker_arguments
from equipoise.cli.demo.fleet import free_address
from equipoise.cli.demo.settings import DemoSettings
from equipoise.cli.demo.traffic import Traffic
from equipoise.cli.live.balance import imbalance_text
from equipoise.cli.live.status_feed import StatusFeed
from equipoise.planning.warm_up import warm_up
from equipoise_api.v1 import status_pb2
from tests.support.forked_commands import ForkedFleet

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(3600)]

BOUND_S = 200.0
PACE_US = int(os.environ.get("EQUIPOISE_PACE_US", "1000"))
TURN_S = float(os.environ.get("EQUIPOISE_TURN_S", "20"))
SETTLE_S = 2 * TURN_S
"""Long enough to adapt, and to read all prompts once, which then are in the prefix caches."""

ROUNDS = int(os.environ.get("EQUIPOISE_ROUNDS", "2"))
SETTINGS = DemoSettings(clients_per_rank=16)
OUTPUT_TOKENS = (8, 24)
STATIC, BALANCED, BY_COUNTS = "static", "balanced", "by-counts"
POOLS = {STATIC: (), BALANCED: (), BY_COUNTS: ("--replica-choice=balanced",)}
MIXED, KIND = "mixed", "english"


class PacedFleet:
    """A balancer and the workers of some pools; `served` sends requests to one at a time."""

    def __init__(self, folder, stack):
        self._folder, self._stack = folder, stack
        self._prompts = {
            domain: domain_prompts(SETTINGS, domain, max_tokens=OUTPUT_TOKENS)
            for domain in SETTINGS.domains
        }
        together = zip(*self._prompts.values(), strict=True)
        self._prompts[MIXED] = [one for same in together for one in same]
        self.feeds, self._workers = {}, {}

    async def start(self, *pools):
        fleet = await self._stack.enter_async_context(ForkedFleet(self._folder))
        self._fleet, self._address = fleet, free_address("127.0.0.1:0")
        page, state = free_address("127.0.0.1:0"), self._folder / "state.sqlite"
        await fleet.start(
            "balancer",
            balancer_arguments(SETTINGS, address=self._address, page=page, state=state),
        )
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        for pool in pools:
            self.feeds[pool] = StatusFeed(self._address, pool=pool)
            feed = group.create_task(self.feeds[pool].run())
            self._stack.callback(feed.cancel)
            for rank in range(SETTINGS.workers):
                arguments = worker_arguments(
                    SETTINGS,
                    pool=pool,
                    worker=f"{pool}-{rank}",
                    rank=rank,
                    num_ranks=SETTINGS.workers,
                    slots_per_rank=SETTINGS.slots_per_rank,
                    balancer=self._address,
                )
                pace = [f"--pace-us-per-row={PACE_US}", "--step-timeout-s=60"]
                self._workers[f"{pool}-{rank}"] = [*arguments, *pace, *POOLS[pool]]
        for worker, arguments in self._workers.items():
            await fleet.start(worker, arguments)
        for pool in pools:
            await self._until(pool, status_pb2.POOL_HEALTH_SERVING)

    async def replace(self, pool, rank):
        """Kill a rank; start it again once the others serve without it."""
        worker = f"{pool}-{rank}"
        await self._fleet.stop(worker, with_signal=signal.SIGKILL)
        await self._until(pool, status_pb2.POOL_HEALTH_DEGRADED)
        await self._fleet.start(worker, self._workers[worker])
        await self._until(pool, status_pb2.POOL_HEALTH_SERVING)

    async def _until(self, pool, health):
        await self.feeds[pool].until(lambda status: status.health == health, timeout_s=BOUND_S)

    async def order(self, command, pool):
        """Run a command of `equipoise` about a pool."""
        program = [sys.executable, "-m", "equipoise.cli.main", command]
        process = await asyncio.create_subprocess_exec(
            *program, f"--pool={pool}", f"--address={self._address}"
        )
        assert await process.wait() == 0

    @asynccontextmanager
    async def traffic(self, pool, domain):
        """Clients of all ranks of a pool, until the end of the block."""
        traffic = Traffic(
            {domain: self._prompts[domain]},
            addresses=[rank.address for rank in self.feeds[pool].status.ranks],
            clients_per_rank=SETTINGS.clients_per_rank,
            clock=time.monotonic,
            timeout_s=BOUND_S,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(traffic.run())
            yield traffic
            traffic.end()
        assert not [one.failure for one in traffic.completions if one.failure is not None]

    async def served(self, pool, domain, *, for_s):
        """Tokens per second that clients of all ranks get, from 5 s on."""
        async with self.traffic(pool, domain) as traffic:
            return await tokens_per_s(traffic, from_s=5.0, for_s=for_s)

    def rollouts(self, pool):
        return self.feeds[pool].status.rollouts_completed

    def cost_of_imbalance(self, pool):
        """What the pool's status says, and the part of a step that experts would take evenly."""
        imbalance = self.feeds[pool].status.imbalance
        share = f"; experts take {imbalance.expert_share:.0%} of a step"
        return imbalance_text(imbalance) + (share if imbalance.is_measured else "")

    def balancedness(self, pool):
        """Of the pool's latest window with traffic."""
        windows = sorted(self.feeds[pool].windows.items(), reverse=True)
        found = (one.balancedness for _, one in windows if not math.isnan(one.balancedness))
        return next(found, math.nan)


async def tokens_per_s(traffic, *, from_s, for_s):
    """What clients get in the `for_s` seconds that begin `from_s` from now."""
    await asyncio.sleep(from_s)
    began_s, before = time.monotonic(), traffic.num_tokens
    await asyncio.sleep(for_s)
    return (traffic.num_tokens - before) / (time.monotonic() - began_s)


def ratio_of_means(of, to):
    """Of two series that were measured in turns, and its standard error."""
    relative = of / of.mean() - to / to.mean()
    return of.mean() / to.mean(), relative.std(ddof=1) / math.sqrt(len(relative))


async def in_turns(fleet, domain, *pools):
    """Median tokens per second of each pool, one turn after the other."""
    rates = {pool: [] for pool in pools}
    for turn in range(ROUNDS):
        for pool in pools if turn % 2 == 0 else pools[::-1]:
            rates[pool].append(await fleet.served(pool, domain, for_s=TURN_S))
    shown = ", ".join(
        f"{pool} {' '.join(f'{one:.1f}' for one in these)} at {fleet.balancedness(pool):.2f}"
        for pool, these in rates.items()
    )
    print(f"{domain}: {shown}", flush=True)
    return {pool: statistics.median(these) for pool, these in rates.items()}


async def test_balanced_pools_serve_1_4_times_the_tokens_of_a_contiguous_layout(tmp_path):
    """One kind of traffic after the other, then a mixture, each once its layout has settled."""
    warm_up()
    gains = {BALANCED: [], BY_COUNTS: []}
    async with AsyncExitStack() as stack:
        fleet = PacedFleet(tmp_path, stack)
        await fleet.start(*POOLS)
        await fleet.order("pause", STATIC)
        for domain in (*SETTINGS.domains, MIXED):
            for pool in POOLS:
                await fleet.served(pool, domain, for_s=SETTLE_S)
                print(f"{domain}, {pool}: {fleet.rollouts(pool)} rollouts so far", flush=True)
                print(fleet.cost_of_imbalance(pool), flush=True)
            rates = await in_turns(fleet, domain, *POOLS)
            for pool, of_kinds in gains.items():
                of_kinds.append(rates[pool] / rates[STATIC])
            print(domain, {pool: round(these[-1], 2) for pool, these in gains.items()}, flush=True)
        assert fleet.rollouts(STATIC) == 0
    for pool, of_kinds in gains.items():
        *kinds, mixed = of_kinds
        print(f"{pool}: {statistics.harmonic_mean(kinds):.2f} times, mixed {mixed:.2f} times")
        assert mixed >= 0.99
    assert statistics.harmonic_mean(gains[BALANCED][:-1]) >= 1.4


async def test_a_pool_regains_what_balance_gains_after_a_rank_is_lost(tmp_path):
    """By the contiguous layout, then balanced, then with a rank killed and started again."""
    warm_up()
    async with AsyncExitStack() as stack:
        fleet = PacedFleet(tmp_path, stack)
        await fleet.start(BALANCED)
        await fleet.order("pause", BALANCED)
        rates = {}
        for state in ("skewed", "balanced", "recovered"):
            if state == "balanced":
                await fleet.order("resume", BALANCED)
            elif state == "recovered":
                await fleet.replace(BALANCED, 1)
            await fleet.served(BALANCED, KIND, for_s=2 * SETTLE_S)
            rates[state] = await fleet.served(BALANCED, KIND, for_s=2 * TURN_S)
            shown = f"{rates[state]:.1f} tokens/s at {fleet.balancedness(BALANCED):.2f}"
            print(f"{state}: {shown}; {fleet.cost_of_imbalance(BALANCED)}", flush=True)
        # What each rollout was expected to gain, and what it gained.
        await fleet.order("decisions", BALANCED)
    assert min(rates["balanced"], rates["recovered"]) >= 1.2 * rates["skewed"]


async def test_planning_costs_no_measurable_throughput_where_traffic_is_balanced(tmp_path):
    """One pool by the layout for its traffic, with planning paused in half of the turns."""
    warm_up()
    orders = ("pause", "resume")
    async with AsyncExitStack() as stack:
        fleet = PacedFleet(tmp_path, stack)
        await fleet.start(BALANCED)
        traffic = await stack.enter_async_context(fleet.traffic(BALANCED, MIXED))
        await asyncio.sleep(3 * SETTLE_S)
        before, seen = fleet.rollouts(BALANCED), {order: ([], []) for order in orders}
        for turn in range(32 * ROUNDS):
            order = orders[turn % 2]
            rates, steps = seen[order]
            await fleet.order(order, BALANCED)
            num_gaps = len(traffic.gaps)
            rates.append(await tokens_per_s(traffic, from_s=2.0, for_s=TURN_S / 2))
            steps.append(
                statistics.median(to_s - from_s for from_s, to_s in traffic.gaps[num_gaps:])
            )
        print(f"{fleet.rollouts(BALANCED) - before} rollouts meanwhile")
    (paused, paused_steps), (planning, planning_steps) = (map(np.array, seen[o]) for o in orders)
    print("tokens per second {:.3f} ± {:.3f} times".format(*ratio_of_means(planning, paused)))
    ratio, error = ratio_of_means(planning_steps, paused_steps)
    print(f"decode steps {ratio:.4f} ± {error:.4f} times")
    assert ratio - error <= 1.01
    assert error <= 0.05, "too noisy to tell anything"
