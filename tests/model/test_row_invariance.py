import pytest
import torch

from equipoise_kernels.row_invariance import RowVarianceError
from equipoise_model.attention import Attention
from equipoise_model.latent_cache import LatentCache, stretches
from equipoise_model.presets import TINY
from equipoise_model.row_invariance import verify_rows


@pytest.mark.parametrize(("num_rows", "max_len"), [(8, 256), (1, 3), (20, 65)])
def test_this_machine_passes(random_model, num_rows, max_len):
    model = random_model(TINY, row_block=16)
    verify_rows(model, LatentCache(TINY, num_rows=num_rows, max_len=max_len))


def test_attention_that_depends_on_a_querys_place_is_found(random_model, monkeypatch):
    model = random_model(TINY, row_block=16)
    attend = Attention._attend

    def leaning(self, query, latents, *, positions_N):
        out = attend(self, query, latents, positions_N=positions_N)
        if latents.shape[1] == 128:
            out[5] *= 1 + 1e-6
        return out

    monkeypatch.setattr(Attention, "_attend", leaning)
    verify_rows(model, LatentCache(TINY, num_rows=2, max_len=64))
    with pytest.raises(RowVarianceError, match="position 99"):
        verify_rows(model, LatentCache(TINY, num_rows=2, max_len=100))


def test_products_of_every_weight_are_tried(random_model, monkeypatch):
    model = random_model(TINY, num_slots=3, row_block=16)
    tried = set()
    monkeypatch.setattr(
        "equipoise_model.row_invariance.verify_row_invariance",
        lambda shapes, **_: tried.update(shapes),
    )
    verify_rows(model, LatentCache(TINY, num_rows=2, max_len=10))
    matrices = {p.shape[-2:] for name, p in model.named_parameters() if p.ndim > 1}
    assert tried == matrices


def test_stretches_double_and_end_with_the_cache():
    assert list(stretches(300)) == [range(64), range(64, 128), range(128, 256), range(256, 300)]
    assert list(stretches(64)) == [range(64)]
    assert list(stretches(1)) == [range(1)]


def test_a_filled_cache_is_noise_everywhere():
    cache = LatentCache(TINY, num_rows=2, max_len=10)
    cache.fill(torch.Generator().manual_seed(0))
    step = cache.begin_step(
        cache_rows_T=torch.tensor([1]), positions_T=torch.tensor([9]), row_block=16
    )
    assert step.read(4, step.groups[0]).all()
