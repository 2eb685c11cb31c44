import pytest
import torch

from equipoise_model.latent_cache import LatentCache
from equipoise_model.presets import TINY


def begin(rows, positions, *, row_block, max_len=1024):
    cache = LatentCache(TINY, num_rows=8, max_len=max_len)
    return cache.begin_step(
        cache_rows_T=torch.tensor(rows, dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        row_block=row_block,
    )


def test_the_fast_form_joins_single_queries_and_leaves_chunks_alone():
    step = begin([5, 2, 2, 7], [100, 0, 1, 30], row_block=None)
    seen = [(g.places_N.tolist(), g.cache_rows_B.tolist(), g.length) for g in step.groups]
    assert seen == [([0, 3], [5, 7], 101), ([1, 2], [2], 2)]


def test_blocks_are_full_and_see_what_the_position_says():
    rows, positions = [0] * 20 + [1, 2], [*range(20), 63, 64]
    step = begin(rows, positions, row_block=16)
    assert [(len(g.places_N), g.length) for g in step.groups] == [(16, 64), (16, 64), (16, 128)]
    assert step.groups[1].places_N.tolist() == [16, 17, 18, 19] + [20] * 12
    assert step.groups[2].cache_rows_B.tolist() == [2] * 16
    assert step.groups[1].positions_N.tolist() == [16, 17, 18, 19] + [63] * 12


@pytest.mark.parametrize("row_block", [None, 4])
def test_every_query_is_in_a_group_that_holds_its_position(row_block):
    rows = [3, 3, 3, 1, 0, 0, 6]
    positions = [61, 62, 200, 0, 127, 128, 1023]
    step = begin(rows, positions, row_block=row_block)
    places = torch.cat([g.places_N for g in step.groups])
    assert set(places.tolist()) == set(range(7))
    assert all((g.positions_N < g.length).all() for g in step.groups)


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


@pytest.mark.parametrize(("rows", "positions"), [([8], [0]), ([-1], [0]), ([0], [10]), ([0], [-1])])
def test_a_place_outside_the_cache_is_a_programmers_fault(rows, positions):
    with pytest.raises(AssertionError):
        begin(rows, positions, row_block=None, max_len=10)
