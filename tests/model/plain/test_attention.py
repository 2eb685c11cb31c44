import pytest
import torch

from equipoise_model.latent_cache import LatentCache, blocks_for
from equipoise_model.plain.attention import Attention, fewest_to_expand
from equipoise_model.rope import Rope

LENGTH = 70


@pytest.fixture
def attention(config):
    """Builds a random layer, the same in either form."""

    def build(row_block=None):
        layer = Attention(config, row_block=row_block).requires_grad_(requires_grad=False)
        generator = torch.Generator().manual_seed(0)
        for parameter in layer.parameters():
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.2, generator=generator)
        return layer

    return build


def sequences_of(config, num_sequences=1):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_sequences, LENGTH, config.hidden_size, generator=generator)


def cache_for(config, *, num_sequences, max_len=LENGTH):
    return LatentCache(config, num_blocks=num_sequences * blocks_for(max_len), max_len=max_len)


def run(layer, cache, x, *, positions, sequences):
    """One step of `layer` as if it were the decoder's second."""
    num_sequences = cache.num_blocks // blocks_for(cache.max_len)
    step = cache.begin_step(
        # Blocks of all sequences alternate, the later positions' first.
        block_tables=[
            range(cache.num_blocks - 1 - n, -1, -num_sequences) for n in range(num_sequences)
        ],
        sequences_T=sequences,
        positions_T=positions,
        row_block=layer.row_block,
    )
    return layer.forward_cached(x, *Rope(layer.config).at(positions), layer=1, step=step)


def test_whole_sequences_attend_as_in_transformers(config, attention):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3Attention,
        DeepseekV3RotaryEmbedding,
    )

    layer, x = attention(), sequences_of(config, num_sequences=2)
    their_config = DeepseekV3Config(**config.to_dict())
    their_config._attn_implementation = "eager"
    theirs = DeepseekV3Attention(their_config, layer_idx=0).eval()
    theirs.load_state_dict(layer.state_dict())
    positions = torch.arange(LENGTH)
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
    expected, _ = theirs(
        x,
        position_embeddings=DeepseekV3RotaryEmbedding(their_config)(x, positions[None]),
        attention_mask=mask,
    )
    ours = layer.forward_expanded(x, *Rope(config).at(positions))
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("row_block", [None, 16])
@pytest.mark.parametrize("cuts", [[LENGTH], [1] * LENGTH, [64, 6], [3, 1, 40, 1, 25]])
def test_cached_latents_give_what_whole_sequences_give(config, attention, row_block, cuts):
    layer, (x,) = attention(row_block), sequences_of(config)
    expected = attention().forward_expanded(x[None], *Rope(config).at(torch.arange(LENGTH)))[0]
    cache = cache_for(config, num_sequences=3)
    parts = [
        run(layer, cache, x[p], positions=p, sequences=torch.full_like(p, 2))
        for p in torch.arange(LENGTH).split(cuts)
    ]
    torch.testing.assert_close(torch.cat(parts), expected, atol=2e-5, rtol=0)


def test_only_long_chunks_and_only_the_fast_form_expand(config, attention, monkeypatch):
    fewest = fewest_to_expand(config)
    assert 16 < fewest < 128
    x = torch.randn(fewest, config.hidden_size, generator=torch.Generator().manual_seed(0))
    expanded, expand = [], Attention._attend_expanded

    def counted(self, query, latents, *, unseen_BQL):
        expanded.append(len(query))
        return expand(self, query, latents, unseen_BQL=unseen_BQL)

    monkeypatch.setattr(Attention, "_attend_expanded", counted)
    for row_block, num_queries in [(None, fewest - 1), (16, fewest), (None, fewest)]:
        p = torch.arange(num_queries)
        cache = cache_for(config, num_sequences=1, max_len=fewest)
        layer = attention(row_block)
        run(layer, cache, x[p], positions=p, sequences=torch.zeros_like(p))
    assert expanded == [fewest]


@pytest.mark.parametrize("row_block", [None, 16])
def test_interleaved_sequences_do_not_see_each_other(config, attention, row_block):
    layer, x = attention(row_block), sequences_of(config, num_sequences=3)
    positions = torch.arange(LENGTH)
    expected = layer.forward_expanded(x, *Rope(config).at(positions))
    shuffled = torch.randperm(3 * LENGTH, generator=torch.Generator().manual_seed(2))
    rows, places = shuffled // LENGTH, shuffled % LENGTH
    cache = cache_for(config, num_sequences=3)
    ours = run(layer, cache, x.flatten(0, 1)[shuffled], positions=places, sequences=rows)
    torch.testing.assert_close(ours, expected.flatten(0, 1)[shuffled], atol=2e-5, rtol=0)


@pytest.mark.parametrize("row_block", [None, 16])
def test_no_queries_attend_to_nothing(config, attention, row_block):
    layer, nothing = attention(row_block), torch.zeros(0, dtype=torch.int64)
    cache = cache_for(config, num_sequences=1, max_len=8)
    x = torch.zeros(0, config.hidden_size)
    assert run(layer, cache, x, positions=nothing, sequences=nothing).shape == x.shape
