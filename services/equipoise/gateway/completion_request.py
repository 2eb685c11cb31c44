"""`CompletionRequest`: a checked request for text, from any of the paths that generate it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from equipoise.gateway.tool_fields import ToolUse
from equipoise.wire.inference_messages import Grammar, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A checked request for text."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each prompt."""

    max_tokens: int
    """Maximum number of tokens to generate, per choice; 0 to only repeat the prompt."""

    num_choices: int
    """Answers to each prompt that are generated."""

    num_best: int
    """How many of them the client gets: those whose tokens are likeliest on average. All of them if
    it is a stream."""

    sampling: Sampling
    """How tokens are chosen; `seed_of` says by which seed."""

    has_seed: bool
    """Whether the client named the seed. Then a prompt gets the same text in any batch."""

    logit_bias: tuple[tuple[int, float], ...]
    """Tokens and what to add to their logits."""

    show_logprobs: bool
    """Whether the client gets the logprobs of tokens that `sampling` asks for."""

    grammar: Grammar | None
    """What each choice must match; None for anything."""

    min_tokens: int
    """Tokens before which neither stop tokens nor stop strings end a choice."""

    prompt_logprobs: int | None
    """How many of the most likely tokens to find for each token of the prompts; None for none."""

    show_prompt_logprobs: bool
    """Whether choices have them in a field of their own, as at vLLM."""

    echo: bool
    """Whether to put the prompt before each answer."""

    stops: tuple[str, ...]
    """Strings that end a choice."""

    stop_tokens: frozenset[int]
    """Tokens that end a choice."""

    stream: bool
    """Whether to send server-sent events."""

    include_usage: bool
    """Whether a stream ends with token counts."""

    continuous_usage: bool
    """Whether all other events of a stream have token counts, too."""

    return_token_ids: bool
    """Whether choices have their token ids and their prompt's."""

    with_special: bool
    """Whether special tokens have text."""

    splits_reasoning: bool
    """Whether the model's reasoning is kept apart from its answer."""

    tools: ToolUse
    """How answers call tools."""

    repeated: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request that the answer repeats."""

    @property
    def num_all_choices(self) -> int:
        """Answers to all prompts; those to one prompt are consecutive."""
        return len(self.prompts) * self.num_choices

    def seed_of(self, index: int) -> int:
        """The seed of a choice, by its index among those to all prompts."""
        which = index % self.num_choices if self.has_seed else index
        return (self.sampling.seed + which) % 2**64
