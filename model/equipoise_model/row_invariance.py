"""`verify_rows`: proof, on this machine, that a model's batch-invariant form is what it says.

The form rests on the BLAS library, and no library promises what it needs; see the kernels' module
of the same name. Here are the shapes of a whole model, and attention's products.
"""

import torch
from torch import Tensor

from equipoise_kernels.row_invariance import RowVarianceError, verify_row_invariance
from equipoise_model.attention import Attention
from equipoise_model.experts import ExpertSlots
from equipoise_model.latent_cache import LatentCache, stretches
from equipoise_model.layers import Linear
from equipoise_model.router import Router
from equipoise_model.transformer import Transformer


def verify_rows(model: Transformer, cache: LatentCache) -> None:
    """Try the shapes of a batch-invariant model before it serves; takes about a second.

    `cache` is the one to serve with and not in use yet: what it holds is overwritten.

    Raises:
        RowVarianceError: a row's result depends on more than the row; the message says what to do.
    """
    assert model.row_block is not None
    verify_row_invariance(
        _weight_shapes(model), row_block=model.row_block, dtype=model.embed_tokens.weight.dtype
    )
    for positions in stretches(cache.max_len):
        _verify_attention(model, cache, positions=positions)


def _weight_shapes(model: Transformer) -> set[tuple[int, int]]:
    """(out, in) of every matrix that rows are multiplied with, one slot's for experts."""
    shapes = set()
    for module in model.modules():
        weights: list[Tensor]
        if isinstance(module, Linear | Router):
            weights = [module.weight]
        elif isinstance(module, ExpertSlots):
            weights = [module.gate_up[0], module.down[0]]
        else:
            continue
        shapes |= {(weight.shape[0], weight.shape[1]) for weight in weights}
    return shapes


@torch.no_grad()
def _verify_attention(model: Transformer, cache: LatentCache, *, positions: range) -> None:
    """Compare queries of one stretch over places in their block and neighbours."""
    attention = next(module for module in model.modules() if isinstance(module, Attention))
    generator = torch.Generator(model.embed_tokens.weight.device).manual_seed(0)
    places = [(row, position) for position in reversed(positions) for row in range(cache.num_rows)]
    rows_T, positions_T = torch.tensor(places[: model.row_block]).unbind(1)
    x_TD = model.embed_tokens.weight.new_empty(len(rows_T), model.config.hidden_size)
    x_TD.normal_(generator=generator)

    def attend(order_T: Tensor) -> Tensor:
        at_T = positions_T[order_T]
        step = cache.begin_step(
            cache_rows_T=rows_T[order_T], positions_T=at_T, row_block=model.row_block
        )
        return attention.forward_cached(x_TD[order_T], *model.rope.at(at_T), layer=0, step=step)

    cache.fill(generator)
    in_order_T = torch.arange(len(rows_T))
    expected_TD = attend(in_order_T)
    rolled = [in_order_T.roll(shift) for shift in (1, 2, 4, 8)]
    for order_T in [*rolled, *in_order_T.split(1)]:
        if not torch.equal(attend(order_T), expected_TD[order_T]):
            raise RowVarianceError(
                f"batch-invariant mode cannot be had here: attention at position "
                f"{positions[-1]} depends on what a query is batched with; serve without it, or "
                "set MKL_CBWR=COMPATIBLE and try again"
            )
