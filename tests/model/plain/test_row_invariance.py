import dataclasses

import pytest

from equipoise_kernels.plain.row_invariance import RowVarianceError
from equipoise_model.latent_cache import LatentCache, blocks_for, stretches
from equipoise_model.plain.attention import Attention
from equipoise_model.plain.layers import SwiGLU
from equipoise_model.plain.row_invariance import verify_rows
from equipoise_model.presets import TINY


def cache_of(max_len):
    return LatentCache(TINY, num_blocks=blocks_for(max_len), max_len=max_len)


@pytest.mark.parametrize("max_len", [256, 3, 65])
def test_this_machine_passes(random_model, max_len):
    verify_rows(random_model(TINY, row_block=16), cache_of(max_len))


def test_attention_that_depends_on_a_querys_place_is_found(random_model, monkeypatch):
    model = random_model(TINY, row_block=16)
    attend = Attention._attend

    def leaning(self, query, latents, *, unseen_BQL):
        out = attend(self, query, latents, unseen_BQL=unseen_BQL)
        if latents.shape[1] == 128:
            out[5] *= 1 + 1e-6
        return out

    monkeypatch.setattr(Attention, "_attend", leaning)
    verify_rows(model, cache_of(64))
    with pytest.raises(RowVarianceError, match="position 99"):
        verify_rows(model, cache_of(100))


def test_products_of_every_weight_are_tried(random_model, monkeypatch):
    model = random_model(TINY, num_slots=3, row_block=16)
    tried = set()
    monkeypatch.setattr(
        "equipoise_model.plain.row_invariance.verify_row_invariance",
        lambda shapes, **_: tried.update(shapes),
    )
    verify_rows(model, cache_of(10))
    matrices = {p.shape[-2:] for name, p in model.named_parameters() if p.ndim > 1}
    assert tried == matrices


def test_a_shared_expert_whose_bits_depend_on_where_it_is_computed_is_found(
    random_model, monkeypatch
):
    routed = random_model(dataclasses.replace(TINY, shared_as_routed=True), row_block=16)
    dense = random_model(TINY, row_block=16)
    verify_rows(routed, cache_of(10))
    forward = SwiGLU.forward
    monkeypatch.setattr(SwiGLU, "forward", lambda self, x: forward(self, x) * (1 + 1e-6))
    verify_rows(dense, cache_of(10))
    with pytest.raises(RowVarianceError, match="--shared-as-routed is not available"):
        verify_rows(routed, cache_of(10))


def test_stretches_double_and_end_with_the_cache():
    assert list(stretches(300)) == [range(64), range(64, 128), range(128, 256), range(256, 300)]
    assert list(stretches(64)) == [range(64)]
    assert list(stretches(1)) == [range(1)]
