"""An engine's ranks in one process, with real seats and links, but collectives in memory."""

import asyncio
import threading
import time

import grpc
import numpy as np
import torch

from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.engines.link import EngineLink
from equipoise.engines.settings import EngineSettings, Mode
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.trust.settings import Tls
from equipoise_api.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    worker_link_pb2,
)
from tests.engines.seats import Ranks
from tests.support.balancers import serving

BOUND_S = 90.0
POLICY = Policy(
    interval_s=0.5,
    report_interval_s=0.1,
    heartbeat_interval_s=0.1,
    slow_half_life_s=2.0,
    fast_half_life_s=0.5,
    min_assignments=100.0,
    payback_s=86_400.0,
    stage_timeout_s=10.0,
    switch_timeout_s=3.0,
    rollback_cooldown_s=1.0,
)
NUM_EXPERTS, NUM_LAYERS, NUM_RANKS = 12, 2, 4
FIRST = np.tile(np.arange(16, dtype=np.int32) % NUM_EXPERTS, (NUM_LAYERS, 1))


class LinkedEngine:
    """Takes passes from `start` on; counts skewed traffic as the layout in use spreads it."""

    def __init__(self, port, *, pool="moe", seed=1, pass_s=0.002):
        self.pool, self.pass_s = pool, pass_s
        self.links, self.steps = {}, []
        self.settings = EngineSettings(
            balancer=f"127.0.0.1:{port}",
            pool=pool,
            worker=pool,
            node="node-0",
            advertise_host="127.0.0.1",
            listen="127.0.0.1:0",
            mode=Mode.BALANCE,
            tls=Tls(insecure=True),
        )
        self.ranks = Ranks(
            FIRST, num_experts=NUM_EXPERTS, num_ranks=NUM_RANKS, names=pool, on_ready=self._link
        )
        self.seats = self.ranks.seats
        self.shift(seed)
        self.before_link = lambda rank, link: None
        self.after_pass = lambda: None
        self.failure, self.num_passes = None, 0
        self._idle, self._stopping = threading.Event(), threading.Event()
        self._takes_passes = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._updates = []

    def start(self):
        self._thread.start()
        return self

    def stop(self):
        self._stopping.set()
        self._thread.join()
        for link in self.links.values():
            link._leave_at_exit()
            if not link._loop.is_closed():
                link._loop.call_soon_threadsafe(link._ended.set)

    def update(self, *, is_announced):
        """New weights, between two passes of all ranks."""
        done = threading.Event()
        self._updates.append((is_announced, done))
        assert done.wait(BOUND_S)

    def idle(self, is_idle):
        """Take no passes, from the next one on; or take them again."""
        self._idle.set() if is_idle else self._idle.clear()

    def park(self):
        """Take no passes, and no longer be in one."""
        self.idle(True)
        while self._takes_passes.is_set():
            time.sleep(0.001)

    def shift(self, seed):
        """Other experts are hot from now on."""
        self.share = np.random.default_rng(seed).dirichlet(
            np.full(NUM_EXPERTS, 0.3), size=NUM_LAYERS
        )

    def has_switched(self):
        return len(self.steps) >= NUM_RANKS

    def until(self, condition):
        end_s = time.monotonic() + BOUND_S
        while not condition():
            assert self.failure is None, self.failure
            assert time.monotonic() < end_s, f"not within {BOUND_S:g} s"
            time.sleep(0.02)

    def until_passes(self, count):
        wanted = self.num_passes + count
        self.until(lambda: self.num_passes >= wanted)

    def check(self):
        """All ranks have switched after the same passes, and hold what the layout says."""
        assert self.failure is None, self.failure
        steps = {}
        for rank, switch in list(self.steps):
            steps.setdefault(switch.generation, {})[rank] = switch.step
        assert all(len(set(of_rank.values())) == 1 for of_rank in steps.values())
        return sorted(steps)

    def _link(self, seat):
        link = self.links[seat.rank] = EngineLink(self.settings)
        self.before_link(seat.rank, link)
        link.start(seat)
        note = seat.on_switch

        def on_switch(switch):
            self.steps.append((seat.rank, switch))
            note(switch)

        seat.on_switch = on_switch

    def _run(self):
        try:
            while not self._stopping.is_set():
                self._takes_passes.set()
                if self._idle.is_set():
                    self._takes_passes.clear()
                    time.sleep(0.05)
                    continue
                self._pass()
                self.num_passes += 1
                self.after_pass()
                time.sleep(self.pass_s)
        except BaseException as error:
            self.failure = error
            raise

    def _pass(self):
        while self._updates:
            is_announced, done = self._updates.pop()
            for rank, tensors in self.ranks.tensors.items():
                for first, _ in tensors:
                    first[:, 2] += 1
                if is_announced:
                    self.seats[rank].note_update()
            done.set()
        seat = self.seats[0]
        table = seat.held.contents.layout.expert_of_slot if seat.is_ready else FIRST
        for layer, row in enumerate(table):
            for rank in range(NUM_RANKS):
                own = row[rank * 4 : rank * 4 + 4]
                assert self.ranks.experts(rank)[layer] == own.tolist(), "tables and weights differ"
        count = np.stack([np.bincount(row, minlength=NUM_EXPERTS) for row in table])
        load = np.take_along_axis(400 * self.share / count, table, axis=1).round()
        for one in self.seats:
            one.count(torch.from_numpy(load.astype(np.int64)))
            one.on_step()


class BalancerThread:
    """A real balancer on a loop of its own, with a store that outlives it unless it is deleted."""

    def __init__(self, folder, port):
        self.store, self.port = folder / "state.sqlite", port

    def start(self):
        self._started, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self._thread.start()
        assert self._started.wait(BOUND_S)

    def stop(self):
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._loop.close()

    def status(self, pool="moe"):
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            stub = status_pb2_grpc.StatusStub(channel)
            try:
                return stub.GetStatus(status_pb2.GetStatusRequest(pool=pool), timeout=30).status
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return status_pb2.PoolStatus()  # No rank has connected yet.
                raise

    def rejection(self):
        """Why the latest decision was a no; empty if it was a yes."""
        decision = self.status().last_decision
        return "" if decision.accepted else decision.reason

    def pin(self, rows):
        """Pin the pool to a layout, [layers, slots], whatever it loads."""
        layout = worker_link_pb2.Layout(
            generation=1,
            num_layers=NUM_LAYERS,
            num_slots=FIRST.shape[1],
            num_experts=NUM_EXPERTS,
            num_ranks=NUM_RANKS,
            expert_of_slot=np.asarray(rows, dtype="<i4").tobytes(),
        )
        request = admin_pb2.PinRequest(pool="moe", reason="a test", layout=layout)
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            admin_pb2_grpc.AdminStub(channel).Pin(request, timeout=30)

    async def _serve(self):
        self._stopping = asyncio.Event()
        store = SqliteStore(self.store)
        async with serving(
            store,
            listen=f"127.0.0.1:{self.port}",
            policies=PolicyBook(POLICY),
            drain_timeout_s=0.0,
        ):
            self._started.set()
            await self._stopping.wait()
        await store.close()
