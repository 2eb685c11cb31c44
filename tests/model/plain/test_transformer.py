import dataclasses

import pytest
import torch

from equipoise_model.dispatch import ExpertParallel
from equipoise_model.latent_cache import LatentCache, blocks_for
from equipoise_model.plain.transformer import Transformer
from equipoise_model.presets import TINY
from equipoise_model.step import StepBatch

LENGTH = 80  # beyond the first stretch of cache


def tokens_of(config, *, num_sequences=2, length=LENGTH, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (num_sequences, length), generator=generator)


class Serving:
    """A model with a cache; `run` takes (sequence, first position, tokens) chunks."""

    def __init__(self, model, *, num_sequences=4, max_len=128):
        self.model = model
        num_blocks = num_sequences * blocks_for(max_len)
        self.cache = LatentCache(model.config, num_blocks=num_blocks, max_len=max_len)
        self.tables = [range(first, num_blocks, num_sequences) for first in range(num_sequences)]
        self.experts = ExpertParallel.local(model.config)

    def run(self, *chunks):
        """Logits of every token of every chunk."""
        batch = StepBatch(
            tokens_T=torch.cat([tokens for _, _, tokens in chunks]),
            positions_T=torch.cat([first + torch.arange(len(t)) for _, first, t in chunks]),
            sequences_T=torch.cat([torch.full((len(t),), n) for n, _, t in chunks]),
            block_tables=self.tables,
            sample_rows_S=torch.arange(sum(len(tokens) for _, _, tokens in chunks)),
        )
        logits = self.model.step(batch, self.cache, self.experts).logits_SV
        return logits.split([len(tokens) for _, _, tokens in chunks])


def test_whole_sequences_give_the_logits_of_transformers(config, random_model, hugging_face):
    model = random_model(config)
    tokens = tokens_of(config)
    theirs = hugging_face(model)(tokens).logits
    assert theirs.std() > 0.1
    torch.testing.assert_close(
        model.forward_train(tokens).logits_BTV, theirs, atol=1e-4, rtol=0, check_stride=False
    )


@pytest.mark.parametrize("row_block", [None, 16])
def test_prefill_and_decode_give_the_logits_of_transformers(
    config, random_model, hugging_face, row_block
):
    model = random_model(config, row_block=row_block)
    tokens = tokens_of(config)
    theirs = hugging_face(model)(tokens).logits
    serving = Serving(model)
    prefill = serving.run((2, 0, tokens[0, :61]), (0, 0, tokens[1, :5]))
    assert_near(prefill[0], theirs[0, :61])
    assert_near(prefill[1], theirs[1, :5])
    mixed = serving.run((2, 61, tokens[0, 61:62]), (0, 5, tokens[1, 5:30]))
    assert_near(mixed[0], theirs[0, 61:62])
    assert_near(mixed[1], theirs[1, 5:30])
    for step in range(10):
        ours = serving.run(
            (0, 30 + step, tokens[1, [30 + step]]), (2, 62 + step, tokens[0, [62 + step]])
        )
        assert_near(ours[0], theirs[1, [30 + step]])
        assert_near(ours[1], theirs[0, [62 + step]])


def assert_near(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_row_blocks_give_the_same_bits_however_a_prompt_is_cut(config, random_model, chunk):
    model = random_model(config, row_block=16)
    tokens = tokens_of(config)[0]
    (whole,) = Serving(model).run((0, 0, tokens))
    serving = Serving(model)
    parts = [
        serving.run((0, first, tokens[first : first + chunk]))[0]
        for first in range(0, LENGTH, chunk)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_row_blocks_give_the_same_bits_in_any_company(config, random_model):
    model = random_model(config, row_block=16)
    tokens = tokens_of(config, num_sequences=4)
    (alone,) = Serving(model).run((0, 0, tokens[0, :40]))
    for row, others in ((0, (3,)), (1, (0, 3)), (3, (0, 1, 2))):
        company = [(other, 0, tokens[1 + i, : 9 + 20 * i]) for i, other in enumerate(others)]
        for place in range(len(company) + 1):
            chunks = [*company[:place], (row, 0, tokens[0, :40]), *company[place:]]
            assert torch.equal(Serving(model).run(*chunks)[place], alone)


def test_row_blocks_give_the_same_bits_whatever_the_cache_holds_and_however_long_it_is(
    random_model,
):
    model = random_model(TINY, row_block=16)
    tokens = tokens_of(TINY)
    (fresh,) = Serving(model, max_len=80).run((0, 0, tokens[0]))
    used = Serving(model, num_sequences=1, max_len=300)
    used.run((0, 0, tokens[1].repeat(3)))
    (again,) = used.run((0, 0, tokens[0]))
    assert torch.equal(again, fresh)


def test_the_fast_form_agrees_with_row_blocks(random_model):
    fast, exact = random_model(TINY), random_model(TINY, row_block=16)
    tokens = tokens_of(TINY)
    chunks = [(0, 0, tokens[0]), (1, 0, tokens[1, :3])]
    for ours, theirs in zip(Serving(fast).run(*chunks), Serving(exact).run(*chunks), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_a_prefix_computed_for_another_sequence_gives_the_same_bits(config, random_model):
    model = random_model(config, row_block=16)
    tokens = tokens_of(config)
    (whole,) = Serving(model).run((0, 0, tokens[0]))
    serving = Serving(model)
    serving.run((0, 0, torch.cat([tokens[0, :48], tokens[1, :20]])))
    # The first three blocks of 16 are the other sequence's, the rest its own.
    serving.tables[1] = [*serving.tables[0][:3], *serving.tables[1][3:]]
    (rest,) = serving.run((1, 48, tokens[0, 48:]))
    assert torch.equal(rest, whole[48:])


@pytest.mark.parametrize("row_block", [None, 16])
def test_logits_come_for_the_rows_that_are_sampled(random_model, row_block):
    model = random_model(TINY, row_block=row_block)
    tokens = tokens_of(TINY, length=6)[0]
    serving = Serving(model)
    (every,) = serving.run((0, 0, tokens))
    batch = StepBatch(
        tokens_T=tokens,
        positions_T=torch.arange(6),
        sequences_T=torch.zeros(6, dtype=torch.int64),
        block_tables=serving.tables,
        sample_rows_S=torch.tensor([5, 2]),
    )
    some = model.step(batch, serving.cache, serving.experts).logits_SV
    torch.testing.assert_close(some, every[[5, 2]], atol=1e-5, rtol=0)
    none = dataclasses.replace(batch, sample_rows_S=torch.zeros(0, dtype=torch.int64))
    assert model.step(none, serving.cache, serving.experts).logits_SV.shape == (0, TINY.vocab_size)


@pytest.mark.parametrize("row_block", [None, 16])
def test_a_step_without_tokens_takes_part_in_every_moe_layer(random_model, row_block):
    model = random_model(TINY, row_block=row_block)
    ran = []
    for moe in model.moe_layers:
        moe.gate.register_forward_hook(lambda *_: ran.append(1))
    nothing = torch.zeros(0, dtype=torch.int64)
    batch = StepBatch(
        tokens_T=nothing,
        positions_T=nothing,
        sequences_T=nothing,
        block_tables=(),
        sample_rows_S=nothing,
    )
    serving = Serving(model)
    assert model.step(batch, serving.cache, serving.experts).logits_SV.shape == (0, TINY.vocab_size)
    assert len(ran) == TINY.num_moe_layers


def test_training_reaches_every_parameter_and_reports_every_routing(random_model):
    config = dataclasses.replace(TINY, num_nextn_predict_layers=2)
    model = random_model(config, mtp=True).requires_grad_(requires_grad=True)
    tokens = tokens_of(config, num_sequences=3, length=20)
    output = model.forward_train(tokens)
    assert [logits.shape for logits in output.mtp_logits] == [(3, 19, 272), (3, 18, 272)]
    assert [len(r.expert_ids_TK) for r in output.routings] == [60] * config.num_moe_layers
    assert [len(r.expert_ids_TK) for r in output.mtp_routings] == [57, 54]
    loss = output.logits_BTV.square().mean() + sum(x.square().mean() for x in output.mtp_logits)
    loss.backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not silent


def test_training_outputs_do_not_depend_on_later_tokens(random_model):
    model = random_model(TINY, mtp=True)
    tokens = tokens_of(TINY, length=20)
    changed = tokens.clone()
    changed[:, 12:] += 1
    before, after = (model.forward_train(t % TINY.vocab_size) for t in (tokens, changed))
    assert_near(before.logits_BTV[:, :12], after.logits_BTV[:, :12])
    assert_near(before.mtp_logits[0][:, :11], after.mtp_logits[0][:, :11])
    assert not torch.allclose(before.logits_BTV[:, 12], after.logits_BTV[:, 12])


def test_a_model_may_hold_more_slots_than_experts():
    model = Transformer(TINY, num_slots=40)
    assert [moe.experts.num_slots for moe in model.moe_layers] == [40] * TINY.num_moe_layers
    assert not model.mtp_layers
