"""The format of rows in transit: whole 32-bit words, whatever they contain.

A row in FP8 is its codes followed by its scales, so that one copy carries both.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import CODE, GROUP, QuantizedRows, require

WORD_BYTES = 4

Rows = Tensor | QuantizedRows


class Payload(Enum):
    """Format of rows sent to experts: BF16, FP32, or FP8 with a float32 scale per 128 columns.

    Experts' outputs return as FP32 for FP32, and as BF16 for the other two.
    """

    BF16 = "bf16"
    FP32 = "fp32"
    FP8 = "fp8"

    @property
    def answer_dtype(self) -> torch.dtype:
        """The dtype of experts' outputs."""
        return torch.float32 if self is Payload.FP32 else torch.bfloat16

    def row_words(self, dim: int) -> int:
        """Words of a row of `dim` columns sent to an expert.

        Raises:
            KernelInputError: such rows are not whole words or whole groups.
        """
        if self is Payload.FP8:
            if dim % GROUP != 0:
                raise KernelInputError(f"rows in FP8 need a multiple of {GROUP} columns, not {dim}")
            return dim // WORD_BYTES + dim // GROUP
        return self.answer_words(dim)

    def answer_words(self, dim: int) -> int:
        """Words of a row sent back."""
        num_bytes = dim * self.answer_dtype.itemsize
        if num_bytes % WORD_BYTES != 0:
            raise KernelInputError(f"rows in BF16 need an even number of columns, not {dim}")
        return num_bytes // WORD_BYTES

    def to_words(self, x: Rows, *, dim: int) -> Tensor:
        """View rows [T, dim] as int32 [T, words]; copies FP8.

        Raises:
            KernelInputError: the rows do not have this payload's format.
        """
        if isinstance(x, QuantizedRows):
            if self is not Payload.FP8:
                raise KernelInputError(f"x is FP8, but the buffer carries {self.value}")
            require("x", x.codes, shape=(x.codes.shape[0], dim))
            codes = x.codes.contiguous().view(torch.int32)
            return torch.cat([codes, x.scales.contiguous().view(torch.int32)], dim=1)
        if self is Payload.FP8:
            raise KernelInputError("x must be QuantizedRows: quantise it with group_quant")
        require("x", x, self.answer_dtype, shape=(x.shape[0], dim), dense=True)
        return x.view(torch.int32)

    def from_words(self, words: Tensor, *, dim: int) -> Rows:
        """Invert `to_words`: [.., N, words] to rows [.., N, dim], as views."""
        if self is not Payload.FP8:
            return words.view(self.answer_dtype)
        code_words = dim // WORD_BYTES
        return QuantizedRows(
            codes=words[..., :code_words].view(CODE),
            scales=words[..., code_words:].view(torch.float32),
        )
