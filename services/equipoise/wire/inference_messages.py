"""The messages of the `Inference` contract: what a gateway sends to ranks and reads from them."""

from dataclasses import dataclass, replace
from enum import StrEnum

ACCEPTED_KEY = "equipoise-accepted"
"""Key of the initial metadata with which a worker reports that a request is queued."""

BLAME_KEY = "equipoise-blame"
"""Key of the trailing metadata with which a worker ends a stream early."""

MAX_LOGPROBS = 20
"""Most likely tokens that may be reported with each token: OpenAI's limit for chats."""

MAX_LOGIT_BIAS = 100.0
"""Largest bias, in either direction, as at OpenAI."""

MAX_GRAMMAR_BYTES = 2**16
"""Longest grammar."""

MAX_LISTED_TOKENS = 1024
"""Most stop tokens of a request, and most tokens of its `logit_bias`: each step looks at them."""

MAX_AFTER_BYTES = 64
"""Longest text after which a grammar holds."""


class Blame(StrEnum):
    """How far a request is the cause of its stream's early end."""

    NONE = "none"
    """Not at all: the worker stops, lost its group, or the request was not in the failed step."""

    STEP = "step"
    """It was one of several requests in a step that failed."""

    REQUEST = "request"
    """It failed by itself, or was the only request in a step that failed."""


class FinishReason(StrEnum):
    """Why a request ended, in OpenAI's terms."""

    LENGTH = "length"
    """It has `max_tokens` tokens."""

    STOP = "stop"
    """A stop token was generated, or the text contains a stop string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. The contract's `Sampling` describes fields and ranges.

    The sampler checks the ranges; here the values have the right types only.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logprobs: int | None = None


class GrammarKind(StrEnum):
    """The language of a grammar."""

    JSON_SCHEMA = "json_schema"
    """JSON schema, as JSON text."""

    REGEX = "regex"
    """A regular expression in the syntax of Rust's regex."""

    GRAMMAR = "grammar"
    """A context-free grammar in Lark or GBNF."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an output must match, without its stop token."""

    kind: GrammarKind
    """Its language."""

    text: str
    """At most `MAX_GRAMMAR_BYTES` in UTF-8."""

    after: str = ""
    """Text after whose first occurrence the output must match; empty if it must from its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHold:
    """What a rank keeps of a request that has finished."""

    boot_id: str
    """The process that holds it."""

    hold: int
    """Number of the hold, from 1."""

    num_tokens: int
    """Tokens whose latents are held, in whole blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSource:
    """Where a rank can fetch a request's latents."""

    address: str
    """host:port of the rank that holds them."""

    pool: str
    """Its pool."""

    worker: str
    """Its name."""

    boot_id: str
    """Its process."""

    hold: int
    """The hold, which ends once all was fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request to one rank."""

    request_id: str
    """Chosen by the client, for logs."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""

    max_tokens: int
    """Most tokens to generate, at least one."""

    stop_tokens: frozenset[int] = frozenset()
    """The first of these ends the request and is part of the output."""

    sampling: Sampling = Sampling()
    """How tokens are chosen; greedy by default."""

    num_replayed: int = 0
    """How many tokens at the prompt's end are output of other ranks."""

    hold_latents: bool = False
    """Whether to hold its latents when it has finished, for a rank of another pool."""

    latents_from: LatentSource | None = None
    """A rank that holds latents of the prompt's beginning; None to prefill all of it."""

    prompt_logprobs: int | None = None
    """How many of the most likely tokens to report at each position of the prompt; None for no
    logprobs of the prompt."""

    min_tokens: int = 0
    """Stop tokens are not generated before the output, replayed tokens included, is this long."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens and what to add to their logits."""

    grammar: Grammar | None = None
    """What the output must match; None for anything."""

    @property
    def num_prompt_logprobs(self) -> int:
        """How many tokens of the prompt have their logprobs reported."""
        return 0 if self.prompt_logprobs is None else len(self.prompt) - self.num_replayed - 1

    def after(self, tokens: tuple[int, ...]) -> "GenerateRequest":
        """The request that remains once these tokens exist; any rank continues it identically."""
        if not tokens:
            return self
        return replace(
            self,
            prompt=self.prompt + tokens,
            max_tokens=self.max_tokens - len(tokens),
            num_replayed=self.num_replayed + len(tokens),
            # They came with the first token.
            prompt_logprobs=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """How likely a token was: natural logarithms."""

    value: float
    """Of the token itself."""

    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and theirs, most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """What a rank found out about a prompt."""

    num_cached: int
    """Tokens found in the rank's cache."""

    logprobs: tuple[TokenLogprob, ...] = ()
    """Of each token after the first, or none if the request did not ask for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTokens:
    """Consecutive tokens of one request."""

    tokens: tuple[int, ...]
    """Token ids in order."""

    finish: FinishReason | None = None
    """Set with the last token of the request."""

    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token, or none if the request did not ask for them."""

    prompt: PromptReport | None = None
    """Comes with the first tokens."""

    held: LatentHold | None = None
    """Set with the last token if the rank holds the request's latents."""

    num_handed_over: int | None = None
    """On the first part after a request's first handover, the tokens of the prompt that the decode
    rank did not prefill again."""
