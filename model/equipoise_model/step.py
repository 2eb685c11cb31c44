"""`StepBatch` and `StepOutput`: input and output of a serving step, in either data plane."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """The tokens of one serving step on this rank, as int64 tensors on the host.

    The step moves them to its device.
    """

    tokens_T: Tensor
    """Token ids; T may be 0."""
    positions_T: Tensor
    """Each token's position in its sequence. Earlier positions are cached, or in rows before it."""
    sequences_T: Tensor
    """Each token's sequence, an index into `block_tables`."""
    block_tables: Sequence[Sequence[int]]
    """The cache blocks of each sequence, from position 0."""
    sample_rows_S: Tensor
    """Rows whose logits are wanted."""

    @property
    def num_tokens(self) -> int:
        """T, all of them real tokens."""
        return int(self.tokens_T.shape[0])

    def split(self, sizes: Sequence[int]) -> list["StepBatch"]:
        """Return batches of consecutive tokens, these many each, without rows to sample."""
        tokens, positions, sequences = (
            one.split(list(sizes)) for one in (self.tokens_T, self.positions_T, self.sequences_T)
        )
        return [
            StepBatch(
                tokens_T=tokens_T,
                positions_T=positions_T,
                sequences_T=sequences_T,
                block_tables=self.block_tables,
                sample_rows_S=self.sample_rows_S[:0],
            )
            for tokens_T, positions_T, sequences_T in zip(tokens, positions, sequences, strict=True)
        ]


class DraftPass(Protocol):
    """Runs one multi-token-prediction module on a step's rows, and stores their latents."""

    def __call__(
        self,
        hidden_TD: Tensor,
        following_T: Tensor,
        *,
        depth: int,
        tokens_by_rank: Sequence[int],
    ) -> Tensor:
        """Return hidden states [T, D] of module `depth`, from 1.

        `hidden_TD` comes from the depth before (from the step itself for depth 1); `following_T`
        holds the tokens `depth` positions after the rows, int64 on the device. All ranks call
        together, each with all rows of its step, or with none of them: `tokens_by_rank`.

        Raises:
            ExchangeError: another rank is gone or stuck, or runs another generation.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutput:
    """The result of a serving step."""

    logits_SV: Tensor
    """Logits of the rows in `StepBatch.sample_rows_S`."""
    hidden_TD: Tensor
    """Hidden states of all rows, after the final norm."""
    draft: DraftPass
    """Runs the model's multi-token-prediction modules on the same rows, before the next step."""
