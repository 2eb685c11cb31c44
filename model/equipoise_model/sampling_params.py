"""`SamplingParams`: how a request's tokens are sampled, validated on construction; and the result.

Holds the inputs and outputs of `sampling`. Does not need torch, so schedulers can use it.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

MAX_LOGPROBS = 20

MAX_SCORED_ROWS = 256
"""Tokens of prompts per step for which logits are computed, to report their logprobs."""

MAX_LOGIT_BIAS = 100.0

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Logits are float32 and are divided by these; much smaller divisors give infinity or 0 / 0."""


class SamplingError(ValueError):
    """A parameter is out of range; the message gives its name, its value and the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """A request's sampling parameters; the defaults sample from the model's own distribution.

    Raises:
        SamplingError: a value is out of range.
    """

    temperature: float = 1.0
    """Divides the logits, from 0.01 to 100; 0 is greedy: the most likely token, the lowest id among
    equals."""
    top_k: int = 0
    """Number of most likely tokens that may be drawn; 0 for all."""
    top_p: float = 1.0
    """Probability that the most likely tokens which may be drawn reach together, among those that
    `min_p` and `top_k` leave (arXiv 1904.09751); always at least one token."""
    min_p: float = 0.0
    """Least probability of a token that may be drawn, relative to the most likely one's (arXiv
    2407.01082)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or output, from 0.01
    to 100 (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output, once per occurrence."""
    seed: int = 0
    """64 bits. The same seed and position draw the same number, whatever the batch."""
    logprobs: int | None = None
    """How many of the most likely tokens to report with each token, from 0; None for no log
    probabilities."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens and what to add to their logits, from -100 to 100, before the penalties."""

    def __post_init__(self) -> None:
        for name in _FLOATS:
            value = getattr(self, name)
            good = type(value) in {int, float} and math.isfinite(value)
            self._require(name, good, "a finite number")
        for name in _INTS:
            self._require(name, type(getattr(self, name)) is int, "a whole number")
        good = self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE
        wanted = f"0 (greedy) or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        self._require("temperature", good, wanted)
        self._require("top_k", self.top_k >= 0, "0 (all tokens) or more")
        self._require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._require("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        good = MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY
        wanted = f"from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}"
        self._require("repetition_penalty", good, wanted)
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(name, -2 <= getattr(self, name) <= 2, "from -2 to 2")
        self._require("seed", 0 <= self.seed < 1 << 64, "from 0 to 2^64 - 1")
        if self.logprobs is not None:
            good = type(self.logprobs) is int and 0 <= self.logprobs <= MAX_LOGPROBS
            self._require("logprobs", good, f"null or from 0 to {MAX_LOGPROBS}")
        good = all(abs(bias) <= MAX_LOGIT_BIAS for _, bias in self.logit_bias)
        wanted = f"from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g} for every token"
        self._require("logit_bias", good, wanted)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens change the logits."""
        changes = self.presence_penalty != 0 or self.frequency_penalty != 0
        return changes or self.repetition_penalty != 1

    def _require(self, name: str, condition: bool, wanted: str) -> None:
        if not condition:
            value = getattr(self, name)
            raise SamplingError(f"{name} = {value!r} is out of range: it must be {wanted}")


class TokenCounts:
    """What penalties need to know of a sequence's tokens; grows with its output.

    Kept from step to step, because counting a long prompt takes milliseconds.
    """

    def __init__(self, prompt: Sequence[int], output: Iterable[int] = ()) -> None:
        """Without repetition penalty the prompt does not matter, and may be empty."""
        tokens = np.fromiter(prompt, dtype=np.int64, count=len(prompt))
        self.in_prompt = np.zeros(tokens.max(initial=-1) + 1, dtype=np.bool_)
        """Whether each token is in the prompt, bool, up to the highest that is."""
        self.in_prompt[tokens] = True
        self._places: dict[int, int] = {}
        self._tokens, self._counts = array("q"), array("q")
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """Count one more token of the output."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens.append(token)
            self._counts.append(0)
        self._counts[place] += 1

    def in_output(self, drafts: Sequence[int]) -> npt.NDArray[np.int64]:
        """Tokens of the output with drafts behind it, and their numbers of occurrences, [2, N].

        Where a token is listed more than once, its numbers add up.
        """
        tokens = self._tokens + array("q", drafts)
        counts = self._counts + array("q", [1]) * len(drafts)
        return np.stack([np.array(tokens), np.array(counts)])


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """The request of a row of logits, and what its tokens so far say of the next one."""

    params: SamplingParams
    position: int
    """Position of the next token: how many there are before it."""
    counts: TokenCounts | None = None
    """The tokens before `drafts`; only needed by parameters that penalize."""
    drafts: tuple[int, ...] = ()
    """The last tokens before the position, which `counts` does not have yet."""
    banned: tuple[int, ...] = ()
    """Tokens that must not be sampled."""
    allowed: npt.NDArray[np.int32] | None = None
    """Bits of the tokens that may be sampled, in words of 32, the lowest first; None for all."""

    def after(self, token: int) -> Self:
        """How to sample behind one more token; what is allowed there is not known."""
        drafts = (*self.drafts, token)
        return replace(self, position=self.position + 1, drafts=drafts, allowed=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A token, its log probability, and the most likely tokens with theirs.

    Log probabilities are natural, and of the model's own distribution, before penalties and
    temperature.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens, descending, the lower token first among equals; empty unless
    `logprobs` asks for them."""
    fault: str = ""
    """Why no token could be sampled; the other fields are then meaningless."""


_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_INTS = ("top_k", "seed")
