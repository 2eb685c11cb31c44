"""`StepBatch` and `StepOutput`: input and output of a serving step, in either data plane."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from equipoise_model.latent_cache import CacheStep


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftState:
    """What multi-token prediction reuses of a step."""

    rotary: tuple[Tensor, Tensor]
    """Cosines and sines of the step's positions."""
    cache_step: CacheStep
    """Where the step's latents are stored."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutput:
    """The result of a serving step."""

    logits_SV: Tensor
    """Logits of the rows in `StepBatch.sample_rows_S`."""
    hidden_TD: Tensor
    """Hidden states of all rows, after the final norm."""
    draft_state: DraftState | None = None
    """Input of multi-token prediction; None from a model that does not draft."""
