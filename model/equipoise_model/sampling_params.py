"""`SamplingParams`: how a request's tokens are chosen, checked as it is built; and what is chosen.

Owns the values that go into and out of `sampling`. Needs no torch, so schedulers can hold them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_LOGPROBS = 20

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Logits are float32 and divided by these; far smaller divisors give infinity or 0 / 0."""


class SamplingError(ValueError):
    """A parameter is out of range; the message names it, its value and the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks for; the defaults sample from the model's own distribution.

    Attributes:
        temperature: divides the logits; 0 is greedy: the most likely token, the lowest of several.
            Otherwise from 0.01 to 100.
        top_k: the most likely tokens that may be drawn; 0 is all.
        top_p: the share of probability, among the top k, that the most likely tokens which may be
            drawn reach together (arXiv 1904.09751); never fewer than one token.
        min_p: the least probability of a token that may be drawn, as a share of the most likely
            one's (arXiv 2407.01082).
        repetition_penalty: divides positive and multiplies negative logits of tokens that prompt
            or output have (arXiv 1909.05858); from 0.01 to 100.
        presence_penalty: subtracted from the logits of tokens that the output has.
        frequency_penalty: the same, for every time that the output has them.
        seed: 64 bits. The same seed and position draw the same, whatever else is in the batch;
            whoever wants another text each time chooses another seed.
        logprobs: None, or how many of the most likely tokens are told with each token, from 0.

    Raises:
        SamplingError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in _FLOATS:
            value = getattr(self, name)
            good = type(value) in {int, float} and math.isfinite(value)
            _require(good, name, value, "a finite number")
        for name in _INTS:
            _require(type(getattr(self, name)) is int, name, getattr(self, name), "a whole number")
        temperature = self.temperature
        good = temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE
        wanted = f"0 (greedy) or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        _require(good, "temperature", temperature, wanted)
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (all tokens) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        penalty = self.repetition_penalty
        good = MIN_REPETITION_PENALTY <= penalty <= MAX_REPETITION_PENALTY
        wanted = f"from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}"
        _require(good, "repetition_penalty", penalty, wanted)
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "from -2 to 2")
        _require(0 <= self.seed < 1 << 64, "seed", self.seed, "from 0 to 2^64 - 1")
        if self.logprobs is not None:
            good = type(self.logprobs) is int and 0 <= self.logprobs <= MAX_LOGPROBS
            _require(good, "logprobs", self.logprobs, f"null or from 0 to {MAX_LOGPROBS}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        """Whether tokens so far change the logits."""
        changes = self.presence_penalty != 0 or self.frequency_penalty != 0
        return changes or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """The request that a row of logits belongs to, and its tokens so far."""

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]

    @property
    def position(self) -> int:
        """Place of the token to come, the same if output is fed again as prompt."""
        return len(self.prompt) + len(self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A token, the log of its probability, and the most likely tokens with theirs.

    Logarithms are natural and of the model's own distribution, before penalties and temperature.
    `top` is empty unless `logprobs` asks for it; it falls, the lower token first among equals.
    `fault` says why no token could be chosen; then the other fields mean nothing.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    fault: str = ""


_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_INTS = ("top_k", "seed")


def _require(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise SamplingError(f"{name} = {value!r} is out of range: it must be {wanted}")
