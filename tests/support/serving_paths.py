"""Ways in which serving may run a text, together in few steps: all must give the same logits."""

import torch

from equipoise_model.latent_cache import LatentCache, blocks_for
from equipoise_model.step import StepBatch

NUM_SEQUENCES, LENGTH = 3, 74
"""Sequences of one scenario; their length is beyond a stretch of cache."""

GROUP_SIZES = (2, 4)
"""Ranks that serve together, each by its own experts and for its own texts."""

SHARED = 48
"""Tokens that the third sequence has in common with the first: whole blocks."""

_MAX_LEN = 96


def texts(vocab_size, *, seed):
    """Tokens of one scenario, int64 [NUM_SEQUENCES, LENGTH]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (NUM_SEQUENCES, LENGTH), generator=generator)
    tokens[2, :SHARED] = tokens[0, :SHARED]
    return tokens


def served_logits(model, experts, tokens):
    """Logits of a scenario's tokens, [NUM_SEQUENCES, LENGTH, V].

    The first text is read in chunks, beside them the second is prefilled and then decoded token by
    token; the third finds its beginning in the first one's blocks (its logits there are those).
    Each one's blocks lie between the others'.
    """
    num_blocks = NUM_SEQUENCES * blocks_for(_MAX_LEN)
    cache = LatentCache(model.config, num_blocks=num_blocks, max_len=_MAX_LEN)
    tables = [list(range(first, num_blocks, NUM_SEQUENCES)) for first in range(NUM_SEQUENCES)]
    tables[2][: SHARED // 16] = tables[0][: SHARED // 16]
    logits = torch.zeros(NUM_SEQUENCES, LENGTH, model.config.vocab_size)

    def run(*chunks):
        """Run tokens from `first` to `end` of sequences."""
        spans = [(number, torch.arange(first, end)) for number, first, end in chunks]
        batch = StepBatch(
            tokens_T=torch.cat([tokens[number, span] for number, span in spans]),
            positions_T=torch.cat([span for _, span in spans]),
            sequences_T=torch.cat([torch.full_like(span, number) for number, span in spans]),
            block_tables=tables,
            sample_rows_S=torch.arange(sum(len(span) for _, span in spans)),
        )
        made = model.step(batch, cache, experts).logits_SV
        for (number, span), part in zip(
            spans, made.split([len(span) for _, span in spans]), strict=True
        ):
            logits[number, span] = part

    run((0, 0, 33), (1, 0, 69))
    run((1, 69, 70), (0, 33, 50))
    logits[2, :SHARED] = logits[0, :SHARED]
    run((2, SHARED, 55), (1, 70, 71), (0, 50, LENGTH))
    run((1, 71, 72), (2, 55, LENGTH))
    for position in range(72, LENGTH):
        run((1, position, position + 1))
    return logits
