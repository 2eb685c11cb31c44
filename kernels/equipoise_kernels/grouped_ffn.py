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
) -> Tensor:
    """down(silu(gate(x)) * up(x)) of each row by its slot's weights, [N, D].

    Args:
        x_ND: rows in slot order; N may be 0.
        gate_up_SHD: per slot the gate's I rows, then up's I rows: H = 2 I.
        down_SDI: per slot the down projection.
        rows_per_slot: S counts that sum to N.
        row_block: None for one product per slot. A number of rows: every product has exactly that
            many, a slot's missing rows being zeros, so that a row's result depends on its slot's
            weights only, neither on its neighbours nor on where the slot lies. Differentiable.
    """
    assert len(rows_per_slot) == gate_up_SHD.shape[0]
    assert sum(rows_per_slot) == x_ND.shape[0]
    if x_ND.shape[0] == 0:
        return x_ND.new_zeros(x_ND.shape)
    if row_block is None:
        return _by_slot(x_ND, gate_up_SHD, down_SDI, rows_per_slot)
    blocks_per_slot = [-(-rows // row_block) for rows in rows_per_slot]
    places_N = _padded_places(rows_per_slot, blocks_per_slot, row_block).to(x_ND.device)
    padded = x_ND.new_zeros(sum(blocks_per_slot) * row_block, x_ND.shape[1])
    padded = padded.index_copy(0, places_N, x_ND)
    slot_of_block = [slot for slot, blocks in enumerate(blocks_per_slot) for _ in range(blocks)]
    gate_up, down = gate_up_SHD.unbind(), down_SDI.unbind()
    hidden = torch.cat(
        [
            functional.linear(block, gate_up[slot])
            for block, slot in zip(padded.split(row_block), slot_of_block, strict=True)
        ]
    )
    y = torch.cat(
        [
            functional.linear(block, down[slot])
            for block, slot in zip(_swiglu(hidden).split(row_block), slot_of_block, strict=True)
        ]
    )
    return y.index_select(0, places_N)


def _by_slot(
    x_ND: Tensor, gate_up_SHD: Tensor, down_SDI: Tensor, rows_per_slot: Sequence[int]
) -> Tensor:
    # unbind, not indexing: its gradient is one stack instead of a full-size zero tensor per slot.
    parts = zip(
        x_ND.split(list(rows_per_slot)), gate_up_SHD.unbind(), down_SDI.unbind(), strict=True
    )
    return torch.cat(
        [
            functional.linear(_swiglu(functional.linear(rows, gate_up)), down)
            for rows, gate_up, down in parts
            if rows.shape[0]
        ]
    )


def _swiglu(hidden_NH: Tensor) -> Tensor:
    gate_NI, up_NI = hidden_NH.chunk(2, dim=-1)
    return functional.silu(gate_NI) * up_NI


def _padded_places(
    rows_per_slot: Sequence[int], blocks_per_slot: Sequence[int], row_block: int
) -> Tensor:
    """Where each row lies once every slot starts a block of its own, int64 [N]."""
    rows_S = torch.tensor(rows_per_slot)
    padding_S = torch.tensor(blocks_per_slot) * row_block - rows_S
    padding_before_S = padding_S.cumsum(0) - padding_S
    return torch.arange(int(rows_S.sum())) + padding_before_S.repeat_interleave(rows_S)
