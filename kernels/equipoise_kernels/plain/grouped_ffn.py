"""SwiGLU feed-forward networks of the physical slots, on rows in slot order."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def grouped_ffn(
    x_ND: Tensor,
    gate_up_SHD: Tensor,
    down_SDI: Tensor,
    rows_per_slot: Sequence[int],
    *,
    row_block: int | None,
    place_of_slot: Sequence[int] | None = None,
) -> Tensor:
    """Compute down(silu(gate(x)) * up(x)) of each row with its slot's weights, [N, D].

    Differentiable.

    Args:
        x_ND: rows in slot order; N may be 0.
        gate_up_SHD: per place the gate's I rows, then up's I rows: H = 2 I.
        down_SDI: per place the down projection.
        rows_per_slot: S counts that sum to N.
        row_block: None for one product per slot. A number of rows: every product has exactly that
            many, filled up with zeros, so that a row's result depends only on its slot's weights,
            not on its neighbours or the slot's index.
        place_of_slot: the place of each slot's weights; that of its number if None. Any place will
            do for a slot without rows.
    """
    places = range(len(rows_per_slot)) if place_of_slot is None else place_of_slot
    assert len(rows_per_slot) == len(places)
    assert sum(rows_per_slot) == x_ND.shape[0]
    if x_ND.shape[0] == 0:
        return x_ND.new_zeros(x_ND.shape)
    if row_block is None:
        return _ffn_of_blocks(x_ND, gate_up_SHD, down_SDI, rows_per_slot, places)
    blocks_per_slot = [-(-rows // row_block) for rows in rows_per_slot]
    places_N = _padded_places(rows_per_slot, blocks_per_slot, row_block).to(x_ND.device)
    num_blocks = sum(blocks_per_slot)
    padded = x_ND.new_zeros(num_blocks * row_block, x_ND.shape[1]).index_copy(0, places_N, x_ND)
    place_of_block = [
        place for place, blocks in zip(places, blocks_per_slot, strict=True) for _ in range(blocks)
    ]
    y = _ffn_of_blocks(padded, gate_up_SHD, down_SDI, [row_block] * num_blocks, place_of_block)
    return y.index_select(0, places_N)


def _ffn_of_blocks(
    x_ND: Tensor,
    gate_up_SHD: Tensor,
    down_SDI: Tensor,
    rows_per_block: Sequence[int],
    place_of_block: Sequence[int],
) -> Tensor:
    """One product per block and projection; the activation runs on all rows at once."""
    # unbind, not indexing: its gradient is one stack instead of a full-size zero tensor per slot.
    gate_up, down = gate_up_SHD.unbind(), down_SDI.unbind()
    hidden = _by_block(x_ND, [gate_up[place] for place in place_of_block], rows_per_block)
    gate_NI, up_NI = hidden.chunk(2, dim=-1)
    # Contiguous, as the gate of a dense network is: vectorised code computes the last elements of a
    # row with other rounding.
    activated_NI = functional.silu(gate_NI.contiguous()) * up_NI
    return _by_block(activated_NI, [down[place] for place in place_of_block], rows_per_block)


def _by_block(x_ND: Tensor, weights: Sequence[Tensor], rows_per_block: Sequence[int]) -> Tensor:
    blocks = zip(x_ND.split(list(rows_per_block)), weights, strict=True)
    return torch.cat(
        [functional.linear(rows, weight) for rows, weight in blocks if rows.shape[0] > 0]
    )


def _padded_places(
    rows_per_slot: Sequence[int], blocks_per_slot: Sequence[int], row_block: int
) -> Tensor:
    """Row numbers after every slot starts a new block, int64 [N]."""
    rows_S = torch.tensor(rows_per_slot)
    padding_S = torch.tensor(blocks_per_slot) * row_block - rows_S
    padding_before_S = padding_S.cumsum(0) - padding_S
    return torch.arange(int(rows_S.sum())) + padding_before_S.repeat_interleave(rows_S)
