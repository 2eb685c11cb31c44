"""Root-mean-square norm of rows (arXiv 1910.07467), fast or batch-invariant."""

from torch import Tensor

from equipoise_kernels.plain.linear import pad_rows


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, *, row_block: int | None) -> Tensor:
    """Divide each row by its root mean square and multiply by `weight_D`.

    Args:
        x_TD: rows; T may be 0. The mean is float32, the result has the rows' dtype.
        weight_D: one factor per column.
        eps: added to the mean square.
        row_block: None, or a number of rows to pad to a multiple of, so that no element falls into
            the tail that vectorised code computes differently.
    """
    if row_block is None or x_TD.shape[0] == 0:
        return _normed(x_TD, weight_D, eps)
    return _normed(pad_rows(x_TD, row_block=row_block), weight_D, eps)[: x_TD.shape[0]]


def _normed(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    wide_TD = x_TD.float()
    mean_T1 = (wide_TD * wide_TD).mean(dim=-1, keepdim=True)
    return weight_D * (wide_TD * (mean_T1 + eps).rsqrt()).to(x_TD.dtype)
