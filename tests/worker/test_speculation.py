"""Speculative decoding with the committed checkpoint: fewer steps, and the same tokens."""

import time
from statistics import median

import pytest

from equipoise.planning.layout import contiguous_layout
from equipoise.rank.errors import WorkerError
from equipoise.worker.core import ModelCore
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.sequence import Request
from equipoise.worker.settings import WorkerSettings
from equipoise_model.sampling_params import SamplingParams
from tests.support.held_slots import held_by
from tests.support.lone_engine import lone_engine

CODE = (
    "import os\n\n\ndef main(argv=None):\n    parser = argparse.",
    "class Node:\n    def __init__(self, value):\n        self.",
    "    def test_empty(self):\n        self.assertEqual(",
    "    for key, value in items.items():\n        if ",
)

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def core():
    """The committed checkpoint, ready to draft, with every expert in its own slot."""
    core = ModelCore.load(WorkerSettings(speculate=1, max_requests=32, context_length=128))
    experts = range(core.shape.num_experts)
    core.checkpoint.load_slots(core.model, [experts] * core.shape.num_layers)
    return core


def run(
    core, *, num_drafts, sampling, prompts=CODE, max_drafting=None, lengths=None, cut_from_tokens=0
):
    """Every prompt's tokens, the number of steps, and the rank's counters."""
    layout = contiguous_layout(
        num_layers=core.shape.num_layers,
        num_experts=core.shape.num_experts,
        num_ranks=1,
        slots_per_rank=core.shape.num_experts,
    )
    tokens = {key: [] for key in range(len(prompts))}
    finished, steps = set(), []

    def publish(result):
        steps.append(len(result.emissions))
        for emission in result.emissions:
            tokens[emission.key].append(emission.token)
            if emission.finish:
                finished.add(emission.key)
        if len(finished) == len(prompts):
            engine.leave()

    engine = lone_engine(
        core,
        held_by(core, layout),
        publish,
        scheduler=Scheduler(
            blocks=core.block_pool(),
            max_requests=len(prompts),
            max_queued=0,
            max_step_tokens=max(24, 2 * len(prompts)),
            num_drafts=num_drafts,
            max_drafting=max_drafting,
        ),
        num_drafts=num_drafts,
        cut_from_tokens=cut_from_tokens,
    )
    for key, text in enumerate(prompts):
        engine.submit(
            Request(
                key=key,
                prompt=tuple(text.encode()),
                max_tokens=lengths(key) if lengths else NUM_TOKENS,
                sampling=sampling(key),
            )
        )
    engine.run()
    return tokens, len(steps), engine.progress()


def greedy(_key):
    return SamplingParams(temperature=0)


def test_drafts_give_the_same_greedy_tokens_in_fewer_steps(core):
    plain, num_plain_steps, _ = run(core, num_drafts=0, sampling=greedy)
    tokens, num_steps, progress = run(core, num_drafts=1, sampling=greedy)
    stats = progress.stats
    print(
        f"{stats.drafts_accepted} of {stats.drafts} drafts right, {num_plain_steps} steps without, "
        f"{num_steps} with"
    )
    assert tokens == plain
    assert stats.drafts_accepted >= 0.8 * stats.drafts
    assert num_plain_steps >= 1.3 * num_steps


def test_drafts_of_steps_that_are_cut_are_those_of_whole_steps(core):
    tokens, num_steps, whole = run(core, num_drafts=1, sampling=greedy)
    cut_tokens, num_cut_steps, cut = run(core, num_drafts=1, sampling=greedy, cut_from_tokens=2)
    assert (cut_tokens, num_cut_steps) == (tokens, num_steps)
    assert (cut.stats.drafts, cut.stats.drafts_accepted) == (
        whole.stats.drafts,
        whole.stats.drafts_accepted,
    )
    assert (cut.loads[0].slot_load_LS == whole.loads[0].slot_load_LS).all()


def test_drafts_do_not_change_sampled_tokens_with_penalties_and_seeds(core):
    """Verified drafts count as load, accepted or not; drafting counts in a layer of its own."""

    def sampling(key):
        return SamplingParams(
            temperature=0.8, top_p=0.95, frequency_penalty=0.2, seed=key, logprobs=2
        )

    plain, _, _ = run(core, num_drafts=0, sampling=sampling)
    tokens, _, progress = run(core, num_drafts=1, sampling=sampling)
    stats, (load,) = progress.stats, progress.loads
    assert tokens == plain
    assert 0 < stats.drafts_accepted < stats.drafts
    verified = stats.tokens_processed + stats.drafts - stats.drafts_accepted
    top_k = core.checkpoint.config.num_experts_per_tok
    assert core.shape.num_layers == core.checkpoint.config.num_moe_layers + 1
    assert load.slot_load_LS.sum(axis=1).tolist() == [verified * top_k] * core.shape.num_layers


def test_drafting_starts_once_few_enough_requests_are_active(core):
    def lengths(key):
        return (6, 12, NUM_TOKENS, NUM_TOKENS)[key]

    plain, _, _ = run(core, num_drafts=0, sampling=greedy, lengths=lengths)
    tokens, _, progress = run(core, num_drafts=1, sampling=greedy, lengths=lengths, max_drafting=2)
    stats = progress.stats
    assert tokens == plain
    assert [len(made) for made in tokens.values()] == [6, 12, NUM_TOKENS, NUM_TOKENS]
    # Earlier steps were not drafted from, so the module has not seen their tokens.
    assert 10 < stats.drafts <= 2 * (NUM_TOKENS - 12)
    # Nor does its layer count them.
    *layers, module = progress.loads[0].slot_load_LS.sum(axis=1).tolist()
    assert 0 < module < min(layers) == max(layers)
    assert stats.drafts_accepted >= 0.5 * stats.drafts


@pytest.mark.benchmark
@pytest.mark.timeout(900)
def test_drafting_pays_off_for_few_streams_and_costs_nothing_for_many(core):
    """Tokens per second of CPU time, which other processes do not affect, in turns."""

    def tokens_per_s(num_streams, **options):
        prompts = [CODE[key % len(CODE)] + " " * (key // len(CODE)) for key in range(num_streams)]
        began = time.process_time()
        tokens, *_ = run(core, sampling=greedy, prompts=prompts, **options)
        return sum(map(len, tokens.values())) / (time.process_time() - began)

    up_to = WorkerSettings().speculate_up_to
    ratios = {}
    for num_streams in (1, 4, 8, 16, 32):
        measured = [
            (
                tokens_per_s(num_streams, num_drafts=0),
                tokens_per_s(num_streams, num_drafts=1),
                tokens_per_s(num_streams, num_drafts=1, max_drafting=up_to),
            )
            for _ in range(3)
        ]
        plain, always, bounded = (median(column) for column in zip(*measured, strict=True))
        ratios[num_streams] = median(row[2] / row[0] for row in measured)
        print(
            f"{num_streams} streams: {plain:.0f} tokens/s without guesses, {always:.0f} with, "
            f"{bounded:.0f} with up to {up_to} streams, {ratios[num_streams]:.2f} times"
        )
    assert ratios[1] >= 1.2
    assert ratios[32] >= 0.95


def test_more_drafts_than_modules_are_rejected():
    with pytest.raises(WorkerError, match="speculate 2 is more than the checkpoint's 1 "):
        ModelCore.load(WorkerSettings(speculate=2))
