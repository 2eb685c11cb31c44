import pytest
import torch

from equipoise_model.latent_cache import LatentCache, blocks_for
from equipoise_model.presets import DEEPSEEK_V3, TINY
from tests.support.fp8_models import WIDE
from tests.support.pretended_device import CUDA, pretended_device


def begin(sequences, positions, *, row_block, max_len=1024):
    cache = LatentCache(TINY, num_blocks=8 * blocks_for(max_len), max_len=max_len)
    return cache.begin_step(
        # Every eighth block, so that neither tables nor blocks are where they would be by chance.
        block_tables=[range(first, cache.num_blocks, 8) for first in range(8)],
        sequences_T=torch.tensor(sequences, dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        row_block=row_block,
    )


def test_the_fast_form_joins_single_queries_of_like_length_and_leaves_chunks_alone():
    step = begin([5, 2, 2, 7, 1], [100, 0, 1, 70, 30], row_block=None)
    seen = [(g.places_N.tolist(), g.blocks_BS[:, 0].tolist(), g.length) for g in step.groups]
    assert seen == [([0, 3], [5, 7], 101), ([4], [1], 31), ([1, 2], [2], 2)]


def test_row_blocks_are_full_and_their_stretch_depends_on_the_position():
    sequences, positions = [0] * 20 + [1, 2], [*range(20), 63, 64]
    step = begin(sequences, positions, row_block=16)
    assert [(len(g.places_N), g.length) for g in step.groups] == [(16, 64), (16, 64), (16, 128)]
    assert step.groups[1].places_N.tolist() == [16, 17, 18, 19] + [20] * 12
    assert step.groups[2].blocks_BS.tolist() == [list(range(2, 64, 8))] * 16
    sees = (~step.groups[1].unseen_BQL).sum(dim=-1).flatten()
    assert sees.tolist() == [17, 18, 19, 20] + [64] * 12


@pytest.mark.parametrize("row_block", [None, 4])
def test_every_query_is_in_a_group_that_holds_its_position(row_block):
    sequences = [3, 3, 3, 1, 0, 0, 6]
    positions = [61, 62, 200, 0, 127, 128, 1023]
    step = begin(sequences, positions, row_block=row_block)
    places = torch.cat([g.places_N for g in step.groups])
    assert set(places.tolist()) == set(range(7))
    for group in step.groups:
        sees = (~group.unseen_BQL).sum(dim=-1).flatten()
        assert sees.tolist() == [positions[place] + 1 for place in group.places_N]


@pytest.mark.parametrize("row_block", [None, 16])
def test_a_step_without_tokens_has_no_groups(row_block):
    assert begin([], [], row_block=row_block).groups == ()


def test_what_is_written_is_read_where_it_was_put():
    step = begin([1, 4], [2, 0], row_block=None)
    latents = torch.randn(2, TINY.latent_dim, generator=torch.Generator().manual_seed(0))
    step.write(3, latents)
    (group,) = step.groups
    visible = step.read(3, group)
    assert visible.shape == (2, 3, TINY.latent_dim)
    assert torch.equal(visible[0, 2], latents[0])
    assert torch.equal(visible[1, 0], latents[1])
    assert not visible[0, :2].any()
    assert not step.read(2, group).any()


def test_positions_beyond_a_sequences_blocks_read_the_zero_block():
    cache = LatentCache(TINY, num_blocks=4, max_len=64)
    cache.fill(torch.Generator().manual_seed(0))
    step = cache.begin_step(
        block_tables=[[2]],
        sequences_T=torch.tensor([0]),
        positions_T=torch.tensor([3]),
        row_block=16,
    )
    visible = step.read(0, step.groups[0])
    assert visible.shape == (16, 64, TINY.latent_dim)
    assert visible[:, :16].all()
    assert not visible[:, 16:].any()


@pytest.mark.parametrize(
    ("form", "num_bytes"),
    [
        ({"dtype": torch.bfloat16}, 70_272),
        ({"dtype": torch.bfloat16, "mtp": True}, 71_424),
        ({"fp8": True}, 40_016),
        ({"fp8": True, "mtp": True}, 40_672),
    ],
    ids=["bf16", "bf16 with drafts", "fp8", "fp8 with drafts"],
)
def test_a_token_of_deepseek_v3_takes_this_much_memory_and_as_much_on_the_wire(form, num_bytes):
    for block_tokens in (16, 64):
        cache = LatentCache(
            DEEPSEEK_V3, num_blocks=1, max_len=1, block_tokens=block_tokens, device="meta", **form
        )
        assert cache.bytes_per_token == num_bytes
        assert cache.block_bytes == num_bytes * block_tokens


@pytest.mark.parametrize(
    ("sequences", "positions"), [([8], [0]), ([0], [10]), ([0], [-1]), ([3], [16])]
)
def test_a_place_outside_the_cache_is_a_programmers_fault(sequences, positions):
    with pytest.raises((AssertionError, IndexError)):
        begin(sequences, positions, row_block=None, max_len=10)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_block_is_on_the_device_before_it_is_written(fp8):
    with pretended_device() as recorder:
        there, here = (
            LatentCache(
                WIDE, num_blocks=3, max_len=32, dtype=torch.bfloat16, device=device, fp8=fp8
            )
            for device in ("cpu", CUDA)
        )
        generator = torch.Generator().manual_seed(0)
        for layer in range(WIDE.num_hidden_layers):
            for part in there.latents(layer).parts:
                bits = torch.randint(
                    256, (part.numel() * part.element_size(),), generator=generator
                )
                part.view(torch.uint8).copy_(bits.view(part.view(torch.uint8).shape))
        data = there.read_block(1)
        assert any(data)
        arrived = here.unpack(data)
        assert {part.device for part in arrived.parts} == {CUDA}
        # It waited for no step, whose peers may be gone; only the next step waits for it.
        assert recorder.log == [("stream 1", "reaches", "its event")]
        here.write_block(2, arrived)
        assert recorder.log[1:] == [("computing", "waits for", "stream 1")]
        assert here.read_block(2) == data
        assert recorder.log[2:] == [
            ("stream 2", "waits for", "computing"),
            ("the host", "waits for", "stream 2"),
        ]
        assert not any(here.read_block(0) + here.read_block(1))
