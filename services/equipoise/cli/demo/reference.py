"""`ReferenceModel`: computes the tokens that every request must produce.

One rank in this process, expert e in slot e, without balancer or scheduler, and with the workers'
batch-invariant arithmetic, so that tokens must be bitwise equal. Imports torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from equipoise.cli.demo.traffic import Prompt
from equipoise.worker.settings import ROW_BLOCK
from equipoise_model.checkpoint import Checkpoint
from equipoise_model.generate import greedy
from equipoise_model.plain.transformer import Transformer


class ReferenceModel:
    """A model with one slot per expert. Not thread-safe."""

    def __init__(self, model: Transformer) -> None:
        self._model = model

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load a checkpoint folder.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        # The workers start at the same time and share the cores.
        torch.set_num_threads(1)
        return cls(Checkpoint.open(path).load_model(row_block=ROW_BLOCK))

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Prompt]) -> dict[Prompt, tuple[int, ...]]:
        """The greedy completion of each prompt, as long as it requests."""
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
