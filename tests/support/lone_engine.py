"""A single rank's engine, and a client that collects what it publishes."""

import numpy as np

from equipoise.telemetry.histogram import SHORT_S, Histogram
from equipoise.worker.engine import Engine
from equipoise.worker.group import RankGroup
from equipoise.worker.placement import placement_of
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.sequence import Request
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.drafting import Drafter

PROMPTS = [tuple(int(t) for t in np.random.default_rng(n).integers(0, 64, n)) for n in range(1, 10)]


class Client:
    """Collects what an engine publishes, and acts after every step on the engine's thread."""

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
            if emission.is_last:
                self.finished[emission.key] = emission.finish
        self.then(self.engine, result)


def engine_of(core, held, client, *, max_queued=32, max_step_tokens=12, num_drafts=0, **changes):
    """An engine of the small model; keyword arguments replace its collaborators."""
    scheduler = Scheduler(
        blocks=core.block_pool(),
        max_requests=4,
        max_queued=max_queued,
        max_step_tokens=max_step_tokens,
        num_drafts=num_drafts,
    )
    client.engine = lone_engine(
        core, held, client, scheduler=scheduler, num_drafts=num_drafts, **changes
    )
    return client.engine


def lone_engine(core, held, publish, *, kind=Engine, num_drafts=0, **changes):
    """An engine of a rank alone; keyword arguments replace its collaborators."""
    config, layout = core.checkpoint.config, held.contents.layout
    fields = {
        "core": core,
        "experts": ExpertParallel.local(config, placement_of(layout), device=core.device),
        "held": held,
        "group": RankGroup.alone("worker-0"),
        "publish": publish,
        "step_s": Histogram(SHORT_S),
        "drafter": Drafter(core.model, num_drafts=num_drafts) if num_drafts else None,
    }
    return kind(**fields | changes)


def request(key, max_tokens=20, **changes):
    return Request(key=key, prompt=PROMPTS[key], max_tokens=max_tokens, **changes)


def leave_when_done(count):
    finished = set()

    def then(engine, result):
        finished.update(emission.key for emission in result.emissions if emission.is_last)
        if len(finished) == count:
            engine.leave()

    return then
