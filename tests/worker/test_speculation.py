"""Guessing by the committed checkpoint's own module: fewer steps, and not a token different."""

import pytest

from equipoise.planning.layout import contiguous_layout
from equipoise.worker.core import ModelCore
from equipoise.worker.engine import Engine
from equipoise.worker.errors import WorkerError
from equipoise.worker.group import RankGroup
from equipoise.worker.held import HeldExperts
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.sequence import Request
from equipoise.worker.settings import WorkerSettings
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.drafting import Drafter
from equipoise_model.sampling_params import SamplingParams

CODE = (
    "import os\n\n\ndef main(argv=None):\n    parser = argparse.",
    "class Node:\n    def __init__(self, value):\n        self.",
    "    def test_empty(self):\n        self.assertEqual(",
    "    for key, value in items.items():\n        if ",
)
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def core():
    """The committed checkpoint, ready to guess, with every expert in its own slot."""
    core = ModelCore.load(WorkerSettings(speculate=1, max_requests=4, context_length=128))
    experts = range(core.shape.num_experts)
    core.checkpoint.load_slots(core.model, [experts] * core.shape.num_layers)
    return core


def run(core, *, num_drafts, sampling, max_step_tokens=24):
    """The tokens of every prompt, steps of generation, and the rank's statistics."""
    layout = contiguous_layout(
        num_layers=core.shape.num_layers,
        num_experts=core.shape.num_experts,
        num_ranks=1,
        slots_per_rank=core.shape.num_experts,
    )
    tokens = {key: [] for key in range(len(CODE))}
    finished, steps = set(), []

    def publish(result):
        steps.append(len(result.emissions))
        for emission in result.emissions:
            tokens[emission.key].append(emission.token)
            if emission.finish:
                finished.add(emission.key)
        if len(finished) == len(CODE):
            engine.leave()

    engine = Engine(
        model=core.model,
        cache=core.cache,
        experts=ExpertParallel.local(core.checkpoint.config),
        held=HeldExperts(core.slots, layout=layout, rank=0),
        group=RankGroup.alone(),
        scheduler=Scheduler(
            blocks=core.block_pool(),
            max_requests=4,
            max_queued=4,
            max_step_tokens=max_step_tokens,
            num_drafts=num_drafts,
        ),
        epoch=1,
        names=("worker-0",),
        publish=publish,
        drafter=Drafter(core.model, num_drafts=num_drafts) if num_drafts else None,
    )
    for key, text in enumerate(CODE):
        engine.submit(
            Request(
                key=key, prompt=tuple(text.encode()), max_tokens=NUM_TOKENS, sampling=sampling(key)
            )
        )
    engine.run()
    return tokens, len(steps), engine.progress().stats


def greedy(_key):
    return SamplingParams(temperature=0)


def test_greedy_code_comes_in_fewer_steps_and_the_same_tokens(core):
    plain, num_plain_steps, _ = run(core, num_drafts=0, sampling=greedy)
    tokens, num_steps, stats = run(core, num_drafts=1, sampling=greedy)
    assert tokens == plain
    assert stats.drafts_accepted >= 0.8 * stats.drafts
    assert num_plain_steps >= 1.3 * num_steps


def test_sampled_tokens_are_the_same_too_with_penalties_and_seeds(core):
    def sampling(key):
        return SamplingParams(
            temperature=0.8, top_p=0.95, frequency_penalty=0.2, seed=key, logprobs=2
        )

    plain, _, _ = run(core, num_drafts=0, sampling=sampling)
    tokens, _, stats = run(core, num_drafts=1, sampling=sampling)
    assert tokens == plain
    assert 0 < stats.drafts_accepted < stats.drafts


def test_more_guesses_than_modules_are_refused():
    with pytest.raises(WorkerError, match="speculate 2 is more than the checkpoint's 1 "):
        ModelCore.load(WorkerSettings(speculate=2))
