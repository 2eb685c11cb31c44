"""A small random model on disk, its expected tokens, and a scripted balancer."""

import asyncio
import dataclasses

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch

from equipoise.planning.layout import Layout
from equipoise.planning.moves import CheckpointSource, Move, RankSource
from equipoise.rank.held import Contents, StagedGeneration
from equipoise.wire.balancer_messages import HeartbeatAck, JoinEpoch, Peer, Stage
from equipoise.wire.convert import from_worker, to_worker
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import Heartbeat, Report
from equipoise.worker.core import ModelCore
from equipoise.worker.placement import placement_of
from equipoise.worker.settings import WorkerSettings
from equipoise_api.v1 import worker_link_pb2_grpc
from equipoise_model.checkpoint import Checkpoint, save
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.experts import StagedExperts, checksum
from equipoise_model.generate import greedy
from equipoise_model.latent_cache import LatentCache, blocks_for
from equipoise_model.plain.transformer import Transformer
from equipoise_model.step import StepBatch
from tests.support.held_slots import held_by
from tests.support.holders import ranks_of_expert
from tests.support.small_models import SMALL as CONFIG

BOUND_S = 60.0


@pytest.fixture(scope="session")
def checkpoint_path(tmp_path_factory):
    """A checkpoint whose logits differ enough for varied tokens."""
    torch.manual_seed(7)
    model = Transformer(CONFIG).requires_grad_(requires_grad=False)
    for tensor in model.state_dict().values():
        if tensor.ndim > 1:
            tensor.normal_(std=0.2)
    path = tmp_path_factory.mktemp("checkpoint")
    save(model, path)
    return path


@pytest.fixture(scope="session")
def checkpoint(checkpoint_path):
    return Checkpoint.open(checkpoint_path)


@pytest.fixture(scope="session")
def solo(checkpoint):
    """The tokens of a prompt served alone, with every expert in its own slot."""
    model = Transformer(CONFIG, row_block=16)
    checkpoint.load_dense(model)
    identity = np.tile(np.arange(CONFIG.n_routed_experts), (CONFIG.num_moe_layers, 1))
    checkpoint.load_slots(model, identity)
    longest = {}

    def tokens(prompt, max_tokens, stop_tokens=()):
        if stop_tokens:
            return greedy(model, [prompt], max_tokens=max_tokens, stop_tokens=stop_tokens)[0]
        prompt = tuple(prompt)
        if len(longest.get(prompt, ())) < max_tokens:
            longest[prompt] = greedy(model, [prompt], max_tokens=max_tokens)[0]
        return longest[prompt][:max_tokens]

    return tokens


@pytest.fixture(scope="session")
def full_forward(checkpoint):
    """The logprobs of every token at every position of a sequence that runs in one pass."""
    model = Transformer(CONFIG, row_block=16)
    checkpoint.load_dense(model)
    identity = np.tile(np.arange(CONFIG.n_routed_experts), (CONFIG.num_moe_layers, 1))
    checkpoint.load_slots(model, identity)

    @torch.no_grad()
    def logprobs(tokens):
        num_tokens = len(tokens)
        batch = StepBatch(
            tokens_T=torch.tensor(tokens),
            positions_T=torch.arange(num_tokens),
            sequences_T=torch.zeros(num_tokens, dtype=torch.int64),
            block_tables=[range(blocks_for(num_tokens))],
            sample_rows_S=torch.arange(num_tokens),
        )
        cache = LatentCache(
            CONFIG,
            num_blocks=blocks_for(num_tokens),
            max_len=num_tokens,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        experts = ExpertParallel.local(CONFIG, device=torch.device("cpu"))
        return model.step(batch, cache, experts).logits_SV.log_softmax(dim=-1)

    return logprobs


@pytest.fixture
def settings(checkpoint_path):
    """Settings of a worker of the small model; keyword arguments change some."""

    def build(**changes):
        chosen = {
            "checkpoint": checkpoint_path,
            "slots_per_rank": 12,
            "max_requests": 4,
            "max_queued_requests": 4,
            "context_length": 96,
            "max_step_tokens": 12,
            "node": "node-0",
        }
        return WorkerSettings(**chosen | changes)

    return build


@pytest.fixture
def random_layout():
    """Layouts of 8 experts in random slots, without needless replicas on a rank."""

    def build(
        generation,
        *,
        num_ranks=1,
        slots_per_rank=12,
        seed=None,
        num_experts=CONFIG.n_routed_experts,
    ):
        draw = np.random.default_rng(generation if seed is None else seed)
        rows = [
            _random_row(
                draw, num_ranks=num_ranks, slots_per_rank=slots_per_rank, num_experts=num_experts
            )
            for _ in range(CONFIG.num_moe_layers)
        ]
        return Layout(
            generation=generation,
            num_experts=num_experts,
            num_ranks=num_ranks,
            expert_of_slot=np.array(rows, dtype=np.int32),
        )

    return build


def _random_row(draw, *, num_ranks, slots_per_rank, num_experts):
    """Experts drawn like cards: whole decks first, so that every expert is present."""
    if num_ranks == 1:
        decks = [draw.permutation(num_experts) for _ in range(-(-slots_per_rank // num_experts))]
        return np.concatenate(decks)[:slots_per_rank]
    while True:
        deck = draw.permutation(num_experts)
        first, second = list(deck[: num_experts // 2]), list(deck[num_experts // 2 :])
        for rank in (first, second):
            others = [expert for expert in range(num_experts) if expert not in rank]
            rank.extend(draw.permutation(others)[: slots_per_rank - len(rank)])
        return np.concatenate([draw.permutation(first), draw.permutation(second)])


@pytest.fixture
def rank_of_one(settings, random_layout):
    """A loaded core and its held experts, for the only rank of a pool."""

    def build(**changes):
        core = ModelCore.load(settings(**changes))
        layout = random_layout(1, num_experts=core.shape.num_experts)
        core.checkpoint.load_slots(core.model, layout.expert_of_slot)
        return core, held_by(core, layout)

    return build


@pytest.fixture
def staged_from_checkpoint():
    """A generation staged for a single rank, whatever it runs."""

    def build(core, running, layout):
        slots = [(layer, slot) for layer, slot in np.ndindex(layout.expert_of_slot.shape)]
        payloads = {
            (layer, slot): core.checkpoint.read_expert(
                layer, int(layout.expert_of_slot[layer, slot])
            )
            for layer, slot in slots
        }
        sums = b"".join(checksum(payloads[place]) for place in slots)
        checksums = np.frombuffer(sums, dtype=np.uint8)
        return StagedGeneration(
            base_generation=running.generation,
            contents=Contents(
                layout=layout,
                checksums=checksums.reshape(layout.num_layers, layout.num_slots, 16),
            ),
            tables=placement_of(layout).to(core.device),
            experts=StagedExperts.prepare(payloads, core.slots),
        )

    return build


@pytest.fixture
def stage_to(checkpoint):
    """The Stage that takes a rank from one layout to the next."""

    def build(running, layout, *, rank=0, from_peers=False, epoch=1, timeout_s=30.0):
        own = range(rank * layout.slots_per_rank, (rank + 1) * layout.slots_per_rank)
        changed = np.argwhere(layout.expert_of_slot != running.expert_of_slot)
        moves = []
        for layer, slot in changed.tolist():
            if slot in own:
                expert = int(layout.expert_of_slot[layer, slot])
                ranks = ranks_of_expert(running, layer=layer, expert=expert)
                holders = [RankSource(rank=holder) for holder in ranks]
                moves.append(
                    Move(
                        layer=layer,
                        slot=slot,
                        expert=expert,
                        checksum=checksum(checkpoint.read_expert(layer, expert)),
                        sources=(*(holders if from_peers else ()), CheckpointSource()),
                    )
                )
        return Stage(
            epoch=epoch,
            layout=layout,
            base_generation=running.generation,
            moves=tuple(moves),
            timeout_s=timeout_s,
        )

    return build


class Link:
    """One worker's stream as the scripted balancer sees it."""

    def __init__(self):
        self.hello = None
        self.heard = []
        self.changed = asyncio.Condition()
        self.outgoing = asyncio.Queue()
        self.closed = False
        self.invalid = None

    def say(self, message):
        self.outgoing.put_nowait(message)

    def hang_up(self):
        self.outgoing.put_nowait(None)

    def of(self, kind):
        return [message for message in self.heard if isinstance(message, kind)]

    def heartbeats(self):
        """Every heartbeat, whether it was sent alone or in a report."""
        reports_too = [getattr(message, "heartbeat", message) for message in self.heard]
        return [beat for beat in reports_too if isinstance(beat, Heartbeat)]

    async def until(self, kind, where=lambda _: True):
        """The first message of a kind that meets a condition; waits for it."""
        return await self._first(lambda: self.of(kind), where)

    async def until_heartbeat(self, where=lambda _: True):
        """The first heartbeat that meets a condition; waits for it."""
        return await self._first(self.heartbeats, where)

    async def _first(self, received, where):
        async with asyncio.timeout(BOUND_S), self.changed:
            while True:
                for message in received():
                    if where(message):
                        return message
                if self.invalid is not None:
                    raise self.invalid
                await self.changed.wait()

    async def until_closed(self):
        async with asyncio.timeout(BOUND_S), self.changed:
            await self.changed.wait_for(lambda: self.closed)


class ScriptedBalancer(worker_link_pb2_grpc.WorkerLinkServicer):
    """A balancer over real gRPC that sends only acknowledgements and what the test says."""

    def __init__(self):
        self.links = asyncio.Queue()
        self.acknowledges = True
        self.server = None
        self.port = 0

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    async def start(self):
        self.server = grpc.aio.server()
        worker_link_pb2_grpc.add_WorkerLinkServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def stop(self):
        await self.server.stop(None)

    async def link(self):
        """The next stream that a worker opens, with its Hello received."""
        return await asyncio.wait_for(self.links.get(), BOUND_S)

    async def Connect(self, requests, context):  # noqa: N802 - named by the contract
        link = Link()
        reading = asyncio.create_task(self._read(requests, link))
        try:
            while (message := await link.outgoing.get()) is not None:
                yield to_worker(message)
        finally:
            reading.cancel()

    async def _read(self, requests, link):
        try:
            async for request in requests:
                message = from_worker(request, hello=link.hello)
                if link.hello is None:
                    link.hello = message
                    self.links.put_nowait(link)
                async with link.changed:
                    link.heard.append(message)
                    link.changed.notify_all()
                # A heartbeat that is due is part of a report.
                beat = message.heartbeat if isinstance(message, Report) else message
                if isinstance(beat, Heartbeat) and self.acknowledges:
                    link.say(HeartbeatAck(sequence=beat.sequence))
        except InvalidMessageError as error:
            link.invalid = error
        finally:
            async with link.changed:
                link.closed = True
                link.changed.notify_all()
            link.hang_up()


@pytest_asyncio.fixture
async def balancer():
    scripted = ScriptedBalancer()
    await scripted.start()
    yield scripted
    await scripted.stop()


@pytest.fixture
def join_epoch():
    """A JoinEpoch for the workers of these Hellos, in rank order."""

    def build(hellos, layout, *, rank=0, **changes):
        peers = tuple(
            Peer(rank=number, address=hello.address, node=hello.node, worker=hello.worker)
            for number, hello in enumerate(hellos)
        )
        answer = JoinEpoch(
            epoch=1,
            rank=rank,
            peers=peers,
            rendezvous_address=hellos[0].rendezvous_address,
            layout=layout,
            report_interval_s=0.1,
            heartbeat_interval_s=0.1,
        )
        return dataclasses.replace(answer, **changes)

    return build
