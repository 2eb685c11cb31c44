"""Fuzzed messages: through the decoding into a pool's state, and over raw sockets into a process.

Seconds of it here; `make fuzz` plays a million. EQUIPOISE_FUZZ_DECODED, _HEARD and _SOCKET say how
many messages are only decoded, heard by a pool, and sent to a process; EQUIPOISE_FUZZ_SEED which.
"""

import asyncio
import os
import random
from collections import Counter
from dataclasses import fields, is_dataclass, replace

import grpc
import numpy as np
import pytest

from equipoise.balancer.pools import MAX_POOLS
from equipoise.balancer.service.status import loads_response, pool_status
from equipoise.planning.counters import LoadReport
from equipoise.planning.errors import InvalidReportError
from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.wire import checks
from equipoise.wire.convert import from_worker, to_balancer
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import GroupLost, Hello, LayoutRejected, Leaving, Report
from equipoise.wire.seal import seal
from equipoise_api.v1 import status_pb2, status_pb2_grpc
from equipoise_api.v1 import worker_link_pb2 as pb
from tests.support.mutations import Mutator
from tests.support.raw_peer import RawPeer
from tests.support.redis_server import free_port
from tests.support.scale import balancing

NUM_DECODED = int(os.environ.get("EQUIPOISE_FUZZ_DECODED", "5000"))
NUM_HEARD = int(os.environ.get("EQUIPOISE_FUZZ_HEARD", "2000"))
NUM_ON_SOCKETS = int(os.environ.get("EQUIPOISE_FUZZ_SOCKET", "900"))
SEED = int(os.environ.get("EQUIPOISE_FUZZ_SEED", "1"))
ROUND = 250

pytestmark = pytest.mark.timeout(7200)


class FuzzedPool:
    """A pool of scripted workers whose words are broken on the way, and what must hold of it."""

    def __init__(self, harness, seed, load) -> None:
        self._bench, self._load = harness, load
        self._random, self._mutator = random.Random(seed), Mutator(seed)
        self._tokens = 0
        self._epoch = self._stored = 0
        self.outcomes = Counter()

    def round(self, num_messages):
        """Everybody is well; then `num_messages` are broken, and the pool is looked at."""
        self._heal()
        for _ in range(num_messages):
            self._say_something()
            self._check_numbers()
        self._check_tables()

    def decode(self, num_messages):
        """Only decode `num_messages`, broken ones of all that the workers could say now."""
        self._heal()
        workers = list(self._bench.workers.values())
        said = [(worker, to_balancer(self._word(worker))) for worker in workers for _ in range(64)]
        for number in range(num_messages):
            worker, message = said[number % len(said)]
            broken = self._mutator.mutated(message)
            if broken is None:
                self.outcomes["unreadable"] += 1
                continue
            is_first = broken.WhichOneof("message") == "hello"
            try:
                heard = from_worker(broken, hello=None if is_first else worker.hello)
            except InvalidMessageError as rejection:
                self._check_rejection(rejection.kind, str(rejection))
                self.outcomes["rejected"] += 1
            else:
                assert_sane(heard, worker.hello)
                self.outcomes["accepted"] += 1

    def _say_something(self):
        harness = self._bench
        worker = self._random.choice(list(harness.workers.values()))
        value = self._word(worker)
        message = self._mutator.mutated(to_balancer(value))
        if message is None:
            self.outcomes["unreadable"] += 1
            return
        is_first = message.WhichOneof("message") == "hello"
        try:
            heard = from_worker(message, hello=None if is_first else worker.hello)
            assert_sane(heard, worker.hello)
            self._hear(worker, heard)
        except (InvalidMessageError, InvalidReportError, RejectedWorkerError) as rejection:
            self._reject(worker, kind=rejection.kind, reason=str(rejection))
        else:
            self.outcomes["accepted"] += 1

    def _reject(self, worker, *, kind, reason):
        self._check_rejection(kind, reason)
        name = worker.hello.worker
        self._bench.perform(self._bench.controller.reject(name, kind=kind, reason=reason))
        self.outcomes["rejected"] += 1

    def _check_rejection(self, kind, reason):
        assert len(reason) < 1500
        assert kind.replace("_", "").isalpha(), kind

    def _hear(self, worker, value):
        harness = self._bench
        if isinstance(value, Hello):
            if value.worker not in harness.workers:
                harness.disconnected.add(value.worker)
            try:
                harness.hello(value)
            finally:
                self._lose(value.worker)
                harness.disconnected.discard(value.worker)
                self._return()
        elif worker.hello.worker in harness.pool.roster.members:
            harness.say(worker, value)

    def _word(self, worker):  # noqa: PLR0911 - a case a word
        """Something that this worker could say now; mostly reports, like in life."""
        if worker.join_epoch is None:
            return worker.hello
        seat = {"epoch": worker.epoch, "rank": worker.rank}
        generation = worker.layout.generation + 1
        match self._random.randrange(16):
            case 0:
                return worker.hello
            case 1:
                return worker.reconnecting()
            case 2:
                return worker.serving()
            case 3:
                return LayoutRejected(**seat, generation=generation, reason="it differs")
            case 4:
                held = worker.own(worker.layout.expert_of_slot)
                return GroupLost(epoch=worker.epoch, reason="a rank died", expert_of_slot=held)
            case 5:
                return Leaving(reason="enough")
            case 6 | 7 if worker.staged is not None:
                return worker.answer_staged()
            case 6 | 7 | 8:
                return worker.heartbeat()
            case _:
                return worker.report()

    def _heal(self):
        """Who lost touch comes back as a new process; all serve and report what they counted."""
        harness = self._bench
        for name in list(harness.pool.roster.members):
            self._lose(name)
        for worker in harness.workers.values():
            worker.hello = replace(worker.hello, boot_id=f"boot-{self._random.random()}")
            worker.join_epoch = None
            worker.steps = worker.busy_us = 0
        for _ in range(60):
            self._return()
            harness.tick(1.0)
            if all(worker.join_epoch for worker in harness.workers.values()):
                break
        for worker in harness.ranks:
            harness.say(worker, worker.serving())
        assert harness.pool.roster.complete, harness.pool.diagnosis()
        harness.run_traffic(self._load, seconds=12)
        assert harness.pool.windows.loads is not None
        self.outcomes["healed"] += 1

    def _return(self):
        members = self._bench.pool.roster.members
        for name, worker in self._bench.workers.items():
            if name not in members or not members[name].connected:
                # A scripted worker forgets with its stream what it ran.
                self._bench.hello(worker.hello)

    def _lose(self, name):
        self._bench.perform(
            self._bench.controller.lost(name, reason="it is fuzzed", now=self._bench.now)
        )

    def _check_numbers(self):
        pool = self._bench.pool
        stored = pool.layouts.stored_generation or 0
        assert pool.roster.highest_epoch >= max(self._epoch, pool.roster.epoch)
        assert stored >= self._stored
        assert pool.layouts.next_generation > stored
        self._epoch, self._stored = pool.roster.highest_epoch, stored

    def _check_tables(self):
        pool, now = self._bench.pool, self._bench.now
        layout = pool.layouts.current
        for row in layout.expert_of_slot:
            assert set(row.tolist()) == set(range(layout.num_experts))
        if pool.windows.loads is not None:
            for average in (pool.windows.loads.fast, pool.windows.loads.slow):
                assert np.isfinite(average.decayed_load).all()
                assert (average.decayed_load >= 0).all()
            assert loads_response(pool).SerializeToString()
        for window in pool.windows.closed:
            assert 0.0 < window.balancedness <= 1.0 or window.assignments == 0
        status = pool_status(pool, now=now)
        assert len(status.SerializeToString()) < 2**20


def assert_sane(value, hello):
    """What the types promise, looked at by other means than the checks of `wire`."""
    own = (hello.model.num_layers, hello.slots_per_rank)
    if isinstance(value, Hello):
        assert value.num_ranks * value.slots_per_rank <= 2**20
        return  # It says itself what shapes it has.
    for field in fields(value):
        _assert_sane_part(getattr(value, field.name), hello)
    if hasattr(value, "checksums"):
        assert value.checksums.shape == (*own, 16)
    if isinstance(value, LoadReport):
        assert value.assignments.shape == own
        assert value.assignments.dtype == np.uint64
        assert value.assignments.max() <= 2**53
    if isinstance(value, Report):
        assert value.load.boot_id == hello.boot_id
    if isinstance(value, GroupLost) and value.expert_of_slot is not None:
        assert value.expert_of_slot.shape == own
        assert 0 <= value.expert_of_slot.min() <= value.expert_of_slot.max() < 32


def _assert_sane_part(part, hello):
    match part:
        case str():
            assert part.isprintable()
            assert len(part) <= 1000
        case int():
            assert 0 <= part <= 2**53
        case float():
            assert 0 < part <= 3600
        case tuple():
            assert len(part) <= 16
        case _ if is_dataclass(part):
            assert_sane(part, hello)


def test_no_fuzzed_message_is_decoded_to_nonsense(make_harness, skewed, capsys):
    pool = FuzzedPool(make_harness(), SEED, skewed(SEED, assignments_per_layer=1_000.0))
    for begun in range(0, NUM_DECODED, 50_000):
        pool.decode(min(50_000, NUM_DECODED - begun))
    _tell(capsys, f"decoded: {dict(pool.outcomes)}")
    assert min(pool.outcomes[what] for what in ("unreadable", "rejected", "accepted")) > 50


def test_a_decoding_that_takes_any_number_would_be_noticed(make_harness, skewed, monkeypatch):
    monkeypatch.setattr(checks, "MAX_COUNT", 2**64)
    pool = FuzzedPool(make_harness(), SEED, skewed(SEED, assignments_per_layer=1_000.0))
    with pytest.raises(AssertionError):
        pool.decode(5000)


def test_no_fuzzed_message_breaks_a_pool_or_passes_as_nonsense(make_harness, skewed, capsys):
    pool = FuzzedPool(make_harness(), SEED, skewed(SEED, assignments_per_layer=1_000.0))
    for _ in range(NUM_HEARD // ROUND):
        pool.round(ROUND)
    _tell(capsys, f"heard by a pool: {dict(pool.outcomes)}")
    assert min(pool.outcomes[what] for what in ("unreadable", "rejected", "accepted")) > 50


async def test_no_raw_peer_brings_a_balancer_down_or_makes_it_grow(tmp_path, hello_of, capsys):
    address = f"127.0.0.1:{free_port()}"
    async with balancing(tmp_path, "--log-level=warning", address=address) as balancer:
        peer = RawPeer(address, seed=SEED, payloads=_payloads(hello_of()))
        await _visit(peer, NUM_ON_SOCKETS // 3)
        await _settled(balancer)
        memory, num_files = balancer.memory("VmRSS"), balancer.num_files
        await _visit(peer, NUM_ON_SOCKETS)
        await _settled(balancer)
        grown = balancer.memory("VmRSS") - memory
        _tell(
            capsys,
            f"on sockets: {peer.num_said} messages; memory {memory / 2**20:.0f} MiB "
            f"+ {grown / 2**20:.1f} MiB, files {num_files} + {balancer.num_files - num_files}",
        )
        async with grpc.aio.insecure_channel(address) as channel:
            pools = await status_pb2_grpc.StatusStub(channel).ListPools(
                status_pb2.ListPoolsRequest(), timeout=120.0
            )
        assert len(pools.pools) <= MAX_POOLS
        assert balancer.num_files <= num_files + 8
        assert grown < 32 * 2**20
        assert balancer.process.returncode is None
    log = (tmp_path / "balancer.log").read_text(errors="replace")
    # What gRPC itself says of bytes that are no question to the status port is all there may be.
    unexpected = [line for line in log.splitlines() if "Unexpected [" in line]
    assert all("Unexpected [DecodeError]" in line for line in unexpected), unexpected[:3]
    assert not [line for line in unexpected if "WorkerLink" in line]
    assert " ERROR equipoise" not in log, log[-4000:]


def _tell(capsys, words):
    with capsys.disabled():
        print(f"\nfuzzed messages {words}")


async def _visit(peer, num_messages):
    said = peer.num_said
    while peer.num_said < said + num_messages:
        await asyncio.to_thread(peer.visit)


async def _settled(balancer):
    """Wait until connections that were hung up on are closed on the other side as well."""
    async with asyncio.timeout(120.0):
        before = None
        while (now := balancer.num_files) != before or now > 64:
            before = now
            await asyncio.sleep(0.3)


def _payloads(hello):
    """Messages of all kinds, whole and broken."""
    mutator = Mutator(SEED)
    requests = [
        status_pb2.GetStatusRequest(pool="tiny"),
        status_pb2.WatchStatusRequest(pool="tiny", min_interval_s=0.1),
        status_pb2.GetLayoutRequest(pool="tiny", generation=7),
        status_pb2.ListDecisionsRequest(pool="tiny", limit=10),
        seal(pb.ConnectRequest(heartbeat=pb.Heartbeat(sequence=1))),
        seal(pb.ConnectRequest(load_report=pb.LoadReport(epoch=1, assignments=bytes(240)))),
    ]
    requests += [to_balancer(replace(hello, num_ranks=ranks)) for ranks in (4, 5, 6)]
    payloads = [b"", bytes(100)]
    for request in requests:
        payloads.append(request.SerializeToString())
        for _ in range(30):
            payloads.append(mutator.damaged(payloads[-1]))
            if (broken := mutator.mutated(request)) is not None:
                payloads.append(broken.SerializeToString())
    return payloads
