"""The engine of a rank, and a client that collects what it publishes."""

import numpy as np

from equipoise.worker.stager import placement_of
from equipoise.worker.engine import Engine
from equipoise.worker.group import RankGroup
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.sequence import Request
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.drafting import Drafter

PROMPTS = [tuple(int(t) for t in np.random.default_rng(n).integers(0, 64, n)) for n in range(1, 10)]


class Client:
    """Collects what an engine publishes, and acts behind every step on the engine's thread."""

    def __init__(self, then=lambda engine, result: None):
        self.tokens = {}
        self.finished = {}
        self.generations = {}
        self.switches = []
        self.results = []
        self.then = then
        self.engine = None

    def __call__(self, result):
        self.results.append(result)
        if result.switch:
            self.switches.append(result.switch)
        for emission in result.emissions:
            self.tokens.setdefault(emission.key, []).append(emission.token)
            self.generations.setdefault(emission.key, set()).add(result.generation)
            if emission.finish:
                self.finished[emission.key] = emission.finish
        self.then(self.engine, result)


def engine_of(core, held, client, *, group=None, max_queued=32, max_step_tokens=12, num_drafts=0):
    engine = Engine(
        model=core.model,
        cache=core.cache,
        experts=ExpertParallel.local(core.checkpoint.config, placement_of(held.contents.layout)),
        held=held,
        group=group or RankGroup.alone(),
        scheduler=Scheduler(
            blocks=core.block_pool(),
            max_requests=4,
            max_queued=max_queued,
            max_step_tokens=max_step_tokens,
            num_drafts=num_drafts,
        ),
        epoch=1,
        names=("worker-0",),
        publish=client,
        drafter=Drafter(core.model, num_drafts=num_drafts) if num_drafts else None,
    )
    client.engine = engine
    return engine


def request(key, max_tokens=20, **changes):
    return Request(key=key, prompt=PROMPTS[key], max_tokens=max_tokens, **changes)


def leave_when_done(count):
    def then(engine, result):
        if len(engine._publish.finished) == count:
            engine.leave()

    return then
