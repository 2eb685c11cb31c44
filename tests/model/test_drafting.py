"""Drafts equal those computed from whole sequences, however a sequence is split into steps."""

import dataclasses

import numpy as np
import pytest
import torch

from equipoise_model.dispatch import ExpertParallel
from equipoise_model.drafting import Drafter, DraftLine
from equipoise_model.latent_cache import LatentCache, blocks_for
from equipoise_model.presets import TINY
from equipoise_model.sampling_params import SamplingParams, SamplingRow
from equipoise_model.step import StepBatch

LENGTH = 24
DEPTHS = 2


@pytest.fixture
def drafting(random_model):
    config = dataclasses.replace(TINY, num_nextn_predict_layers=DEPTHS)
    return random_model(config, mtp=True)


class Serving:
    """Two sequences of a model that drafts; `run` takes (sequence, first, rows, known) parts."""

    def __init__(self, model, tokens, *, num_drafts=DEPTHS, params=None, allowed=None):
        size = blocks_for(LENGTH + DEPTHS)
        self.model, self.tokens = model, tokens
        self.cache = LatentCache(model.config, num_blocks=2 * size, max_len=LENGTH, mtp=True)
        self.tables = [range(size), range(size, 2 * size)]
        self.drafter = Drafter(model, num_drafts=num_drafts)
        self.experts = ExpertParallel.local(model.config)
        self.params = params or SamplingParams(temperature=0)
        self.allowed = allowed

    def run(self, *parts):
        """Rows of `tokens` from `first` on; what is guessed behind the first `known` of all."""
        places = [
            (n, position) for n, first, rows, _ in parts for position in range(first, first + rows)
        ]
        batch = StepBatch(
            tokens_T=torch.tensor([self.tokens[n][p] for n, p in places]),
            positions_T=torch.tensor([p for _, p in places]),
            sequences_T=torch.tensor([n for n, _ in places]),
            block_tables=self.tables,
            sample_rows_S=torch.tensor([0]),
        )
        output = self.model.step(batch, self.cache, self.experts)
        lines = [
            DraftLine(
                num_rows=rows,
                tokens=self.tokens[n][first : known or first + rows + DEPTHS],
                sampling=known
                and SamplingRow(
                    params=self.params,
                    position=known,
                    allowed=self.allowed,
                ),
            )
            for n, first, rows, known in parts
        ]
        return self.drafter.draft(output, lines, [[len(places)]] * self.drafter.num_drafts)


def sequences(seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TINY.vocab_size, (2, LENGTH), generator=generator).tolist()


def expected(model, tokens, known):
    """What the modules guess behind the first `known` tokens, by the form for training."""
    line = list(tokens[:known])
    for depth in range(DEPTHS):
        # A row of module k is as long as the sequence less k + 1 tokens.
        whole = torch.tensor([[*line, 0]])[:, : known + depth]
        logits = model.forward_train(whole).mtp_logits[depth]
        line.append(int(logits[0, -1].argmax()))
    return tuple(line[known:])


def test_drafts_match_the_modules_run_on_the_whole_sequence(drafting):
    a, b = sequences()
    serving = Serving(drafting, (a, b))
    assert serving.run((0, 0, 9, 10)) == [expected(drafting, a, 10)]
    # A prompt in two parts beside a sequence that generates.
    nothing, guess = serving.run((1, 0, 5, None), (0, 9, 1, 11))
    assert nothing == ()
    # The second module was given a guess in place of the eleventh token, and remembers it.
    assert guess[0] == expected(drafting, a, 11)[0]
    assert serving.run((1, 5, 6, 12)) == [expected(drafting, b, 12)]


def test_rows_of_failed_guesses_are_passed_over(drafting):
    a, _ = sequences()
    serving = Serving(drafting, (a, a), num_drafts=1)
    serving.run((0, 0, 9, 10))
    # Rows 10 and 11 run with guesses that fail: the token at 10 is another.
    rows = StepBatch(
        tokens_T=torch.tensor([a[9], (a[10] + 1) % TINY.vocab_size, (a[11] + 1) % TINY.vocab_size]),
        positions_T=torch.tensor([9, 10, 11]),
        sequences_T=torch.tensor([0, 0, 0]),
        block_tables=serving.tables,
        sample_rows_S=torch.tensor([0, 1, 2]),
    )
    output = drafting.step(rows, serving.cache, serving.experts)
    sampling = SamplingRow(params=serving.params, position=11)
    line = DraftLine(num_rows=3, tokens=a[9:11], sampling=sampling)
    assert serving.drafter.draft(output, [line], [[3]]) == [expected(drafting, a, 11)[:1]]
    assert serving.run((0, 10, 1, 12)) == [expected(drafting, a, 12)[:1]]


def test_a_seed_picks_the_same_guess_each_time_and_seeds_differ(drafting):
    def guesses(seed):
        serving = Serving(drafting, sequences(), params=SamplingParams(temperature=2.0, seed=seed))
        return serving.run((0, 0, 9, 10))

    assert guesses(1) == guesses(1)
    assert len({tuple(guesses(seed)) for seed in range(6)}) > 1


def test_a_mask_applies_to_the_first_guess_alone(drafting):
    a, b = sequences()
    first, second = expected(drafting, a, 10)
    assert first != second
    only_first = np.zeros(-(-TINY.vocab_size // 32), dtype=np.int32)
    only_first[first // 32] = np.uint32(1 << first % 32).astype(np.int32)
    assert Serving(drafting, (a, b), allowed=only_first).run((0, 0, 9, 10)) == [(first, second)]


def test_fewer_guesses_than_modules_are_the_first_ones(drafting):
    a, b = sequences()
    (whole,) = Serving(drafting, (a, b)).run((0, 0, 9, 10))
    assert Serving(drafting, (a, b), num_drafts=1).run((0, 0, 9, 10)) == [whole[:1]]


def test_a_step_without_rows_guesses_nothing(drafting):
    serving = Serving(drafting, sequences())
    nothing = torch.zeros(0, dtype=torch.int64)
    batch = StepBatch(
        tokens_T=nothing,
        positions_T=nothing,
        sequences_T=nothing,
        block_tables=(),
        sample_rows_S=nothing,
    )
    output = drafting.step(batch, serving.cache, serving.experts)
    assert serving.drafter.draft(output, [], [[0]] * DEPTHS) == []
