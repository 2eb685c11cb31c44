"""`ReferenceModel`: answers prompts as they must be answered when nobody balances anything.

One rank in this process, expert e in slot e, no balancer, no scheduler; only the arithmetic is the
workers' (batch-invariant, so that equality is to be expected to the last bit). Imports torch, so
whoever needs it imports it late.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from equipoise.cli.demo.traffic import Prompt
from equipoise.worker.core import ROW_BLOCK
from equipoise_model.checkpoint import Checkpoint
from equipoise_model.generate import greedy
from equipoise_model.plain.transformer import Transformer


class ReferenceModel:
    """A model with one slot an expert; used from one thread at a time."""

    def __init__(self, model: Transformer) -> None:
        self._model = model

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load a checkpoint's folder.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        # The workers start meanwhile and share the cores.
        torch.set_num_threads(1)
        return cls(Checkpoint.open(path).load_model(row_block=ROW_BLOCK))

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Prompt]) -> dict[Prompt, tuple[int, ...]]:
        """Greedy tokens of each prompt, as many as it asks for."""
        answers = greedy(
            self._model,
            [prompt.tokens for prompt in prompts],
            max_tokens=max(prompt.max_tokens for prompt in prompts),
            chunk_tokens=ROW_BLOCK,
        )
        return {
            prompt: tuple(answer[: prompt.max_tokens])
            for prompt, answer in zip(prompts, answers, strict=True)
        }
