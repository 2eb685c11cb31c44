import pytest
import torch
from torch.nn import functional

from equipoise_kernels.plain import row_invariance
from equipoise_kernels.plain.row_invariance import RowVarianceError, verify_row_invariance


def test_this_machines_products_depend_on_their_row_alone():
    verify_row_invariance([(96, 128), (128, 48), (272, 128), (96, 128)], row_block=16)


def test_a_product_that_depends_on_the_rows_place_is_found(monkeypatch):
    def by_place(x_TD, weight_OD, *, row_block):
        y = functional.linear(x_TD, weight_OD)
        return y + torch.arange(len(y)).unsqueeze(1) * 1e-3

    monkeypatch.setattr(row_invariance, "linear", by_place)
    with pytest.raises(RowVarianceError, match=r"\[32, 16\] depends on a row's place"):
        verify_row_invariance([(32, 16)], row_block=16)


def test_a_product_that_depends_on_its_neighbours_is_found(monkeypatch):
    def by_company(x_TD, weight_OD, *, row_block):
        return functional.linear(x_TD, weight_OD) + x_TD.abs().sum() * 1e-3

    monkeypatch.setattr(row_invariance, "linear", by_company)
    with pytest.raises(RowVarianceError, match="serve without it"):
        verify_row_invariance([(32, 16)], row_block=16)
