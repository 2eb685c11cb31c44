"""`verify_rows`: check on this machine that a model's batch-invariant form holds.

The form relies on properties that no BLAS library promises; see the kernels' module of the same
name. This one covers the shapes of a whole model, and attention's products.
"""

import torch
from torch import Tensor

from equipoise_kernels.plain.row_invariance import RowVarianceError, verify_row_invariance
from equipoise_model.latent_cache import LatentCache, blocks_for, stretches
from equipoise_model.plain.attention import Attention
from equipoise_model.plain.experts import ExpertSlots
from equipoise_model.plain.layers import Linear, SwiGLU
from equipoise_model.plain.router import Router
from equipoise_model.plain.transformer import Transformer


def verify_rows(model: Transformer, cache: LatentCache) -> None:
    """Test the shapes of a batch-invariant model before it serves; takes about a second.

    `cache` is the serving cache, not in use yet: its contents are overwritten. A model that routes
    its shared expert must compute it with the bits of one that does not.

    Raises:
        RowVarianceError: a row's result depends on more than the row; the message gives the remedy.
    """
    assert model.row_block is not None
    device = model.embed_tokens.weight.device
    for dtype, shapes in _weight_shapes(model).items():
        verify_row_invariance(shapes, row_block=model.row_block, dtype=dtype, device=device)
    if model.config.shared_as_routed:
        _verify_shared_expert(model)
    for positions in stretches(cache.max_len):
        _verify_attention(model, cache, positions=positions)


def _weight_shapes(model: Transformer) -> dict[torch.dtype, set[tuple[int, int]]]:
    """(out, in) by dtype of every matrix that multiplies rows, of one slot for experts."""
    shapes: dict[torch.dtype, set[tuple[int, int]]] = {}
    for module in model.modules():
        if getattr(module, "row_block", None) is None:
            continue
        weights: list[Tensor]
        if isinstance(module, Linear | Router):
            weights = [module.weight]
        elif isinstance(module, ExpertSlots):
            weights = [module.gate_up[0], module.down[0]]
        else:
            continue
        for weight in weights:
            shapes.setdefault(weight.dtype, set()).add((weight.shape[0], weight.shape[1]))
    return shapes


@torch.no_grad()
def _verify_shared_expert(model: Transformer) -> None:
    """Compare a slot, which multiplies by gate and up together, with a dense network."""
    weight = model.lm_head.weight
    dim, hidden_dim = model.config.hidden_size, model.config.moe_intermediate_size
    with weight.device:
        dense = SwiGLU(dim, hidden_dim, row_block=model.row_block, dtype=weight.dtype)
        slots = ExpertSlots(
            dim, hidden_dim, num_slots=1, row_block=model.row_block, dtype=weight.dtype
        )
    generator = torch.Generator(weight.device).manual_seed(0)
    for linear in (dense.gate_proj, dense.up_proj, dense.down_proj):
        linear.weight.normal_(std=dim**-0.5, generator=generator)
    slots.gate_up[0].copy_(torch.cat([dense.gate_proj.weight, dense.up_proj.weight]))
    slots.down[0].copy_(dense.down_proj.weight)
    # More than a block, and not whole blocks.
    x_TD = weight.new_empty(2 * (model.row_block or 1) + 1, dim).normal_(generator=generator)
    if not torch.equal(slots(x_TD, [len(x_TD)]), dense(x_TD)):
        raise RowVarianceError(
            "--shared-as-routed is not available in batch-invariant mode here: a slot computes the "
            "shared expert with other bits than workers without that option; serve without one of "
            "the two, or set MKL_CBWR=COMPATIBLE and try again"
        )


@torch.no_grad()
def _verify_attention(model: Transformer, cache: LatentCache, *, positions: range) -> None:
    """Compare queries of one stretch in different rows of their block and with other neighbours."""
    attention = next(module for module in model.modules() if isinstance(module, Attention))
    generator = torch.Generator(model.embed_tokens.weight.device).manual_seed(0)
    # Consecutive positions use different places of their blocks, so queries do not overwrite each
    # other, although they share blocks.
    at = list(reversed(positions))[: min(model.row_block or 1, cache.block_tokens)]
    blocks = range(blocks_for(positions.stop, block_tokens=cache.block_tokens))
    tables = [
        [*blocks[first:], *blocks[:first]] for first in (n % len(blocks) for n in range(len(at)))
    ]
    positions_T = torch.tensor(at)
    x_TD = model.embed_tokens.weight.new_empty(len(positions_T), model.config.hidden_size)
    x_TD.normal_(generator=generator)

    def attend(order_T: Tensor) -> Tensor:
        at_T = positions_T[order_T]
        step = cache.begin_step(
            block_tables=tables, sequences_T=order_T, positions_T=at_T, row_block=model.row_block
        )
        x_in_order_TD = x_TD[order_T.to(x_TD.device)]
        return attention.forward_cached(x_in_order_TD, *model.rope.at(at_T), layer=0, step=step)

    cache.fill(generator)
    in_order_T = torch.arange(len(positions_T))
    expected_TD = attend(in_order_T)
    rolled = [in_order_T.roll(shift) for shift in (1, 2, 4, 8)]
    for order_T in [*rolled, *in_order_T.split(1)]:
        if not torch.equal(attend(order_T), expected_TD[order_T.to(x_TD.device)]):
            raise RowVarianceError(
                f"batch-invariant mode is not available here: attention at position "
                f"{positions[-1]} depends on what a query is batched with; serve without it, or "
                "set MKL_CBWR=COMPATIBLE and try again"
            )
