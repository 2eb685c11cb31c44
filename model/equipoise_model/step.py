"""`StepBatch` and `StepOutput`: input and output of a serving step, in either data plane."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from equipoise_model.latent_cache import CacheStep


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """The tokens of one serving step on this rank, int64 on the host; the step takes them along.

    Row t is `tokens_T[t]` at `positions_T[t]` of sequence `sequences_T[t]`, whose blocks of the
    cache are `block_tables[sequences_T[t]]`; its earlier positions are in the cache or among the
    rows before it. Logits are wanted for the rows `sample_rows_S`. T may be 0.
    """

    tokens_T: Tensor
    positions_T: Tensor
    sequences_T: Tensor
    block_tables: Sequence[Sequence[int]]
    sample_rows_S: Tensor

    @property
    def num_tokens(self) -> int:
        """T: every row is a real token."""
        return int(self.tokens_T.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutput:
    """What a serving step gives: logits of the rows that were asked for, and what drafting needs.

    `hidden_TD` has all rows behind the final norm; `rotary` and `cache_step` are the step's own,
    None of a model that does not draft.
    """

    logits_SV: Tensor
    hidden_TD: Tensor
    rotary: tuple[Tensor, Tensor] | None
    cache_step: CacheStep | None
