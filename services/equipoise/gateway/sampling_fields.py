"""How a request's tokens are chosen and described: its fields, and the model's own defaults."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.gateway.errors import GatewayError, InvalidRequestError
from equipoise.gateway.fields import Fields, is_whole, shown
from equipoise.wire.inference_messages import (
    MAX_LISTED_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    Sampling,
)

MAX_STOPS = 256
"""Stop strings of a request; OpenAI takes 4."""

MAX_STOP_CHARACTERS = 4096
"""Characters of all stop strings together: held text is compared with all of them at each token."""

MAX_ANSWER_LOGPROBS = 2**18
"""Logprobs that are sent at once. 100,000 took up to 0.6 s of a gateway's time, and 7 MB."""

MIN_TEMPERATURE = 0.01
"""A lower temperature other than 0 is raised to this, as vLLM does."""

_OF_MODELS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request gets that does not say how its tokens are chosen."""

    values: Mapping[str, float] = field(default_factory=dict)
    """By the name of the field; a field that is missing here has OpenAI's default."""

    @classmethod
    def of_checkpoint(cls, folder: Path) -> "SamplingDefaults":
        """Read generation_config.json, if there is one.

        Raises:
            GatewayError: it cannot be read, or has a value that no request may have.
        """
        path = folder / "generation_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, RecursionError) as error:
            raise GatewayError(f"{path}: cannot be read: {error}") from None
        if not isinstance(config, dict):
            raise GatewayError(f"{path}: not a JSON object")
        values = {name: config[name] for name in _OF_MODELS if config.get(name) is not None}
        try:
            sampling_of(Fields(values), logprobs=None, defaults=cls())
        except InvalidRequestError as error:
            raise GatewayError(f"{path}: {error}") from None
        return cls(values=values)


def sampling_of(fields: Fields, *, logprobs: int | None, defaults: SamplingDefaults) -> Sampling:
    """The sampling parameters of a request.

    Raises:
        InvalidRequestError: a field is out of range; names it.
    """

    def number(name: str, *, least: float, most: float, default: float) -> float:
        return fields.number(
            name, least=least, most=most, default=defaults.values.get(name, default)
        )

    if "top_p" in fields and fields.get("top_p") == 0:
        raise fields.reject("top_p", "must be above 0: send temperature: 0 for greedy tokens")
    seed = fields.whole("seed", least=-(2**63), most=2**64 - 1, default=secrets.randbits(63))
    temperature = number("temperature", least=0, most=2, default=1)
    top_k = int(defaults.values.get("top_k", 0))
    return Sampling(
        temperature=max(temperature, MIN_TEMPERATURE) if temperature else 0.0,
        top_p=number("top_p", least=0, most=1, default=1),
        # Some clients send -1 for all tokens.
        top_k=max(0, fields.whole("top_k", least=-1, most=2**31, default=top_k)),
        min_p=number("min_p", least=0, most=1, default=0),
        repetition_penalty=number("repetition_penalty", least=0.01, most=100, default=1),
        presence_penalty=number("presence_penalty", least=-2, most=2, default=0),
        frequency_penalty=number("frequency_penalty", least=-2, most=2, default=0),
        seed=seed % 2**64,
        logprobs=logprobs,
    )


def num_logprobs_of(fields: Fields, name: str) -> int | None:
    """How many of the most likely tokens to report for each token; None for no logprobs.

    Raises:
        InvalidRequestError: it is out of range.
    """
    if name not in fields:
        return None
    return fields.whole(name, least=0, most=MAX_LOGPROBS, default=0)


def prompt_logprobs_of(
    fields: Fields, *, stream: bool, echoed: int | None
) -> tuple[int | None, bool]:
    """The same for the tokens of the prompts, and whether they get a field of their own.

    `echoed`: the `logprobs` of an answer that repeats its prompt.

    Raises:
        InvalidRequestError: it is out of range.
    """
    own = num_logprobs_of(fields, "prompt_logprobs")
    if own is not None and stream:
        raise fields.reject("prompt_logprobs", "is not available in a stream")
    return (echoed if own is None else own), own is not None


def check_num_logprobs(
    fields: Fields,
    *,
    num_scored: int,
    prompt_logprobs: int | None,
    num_generated: int,
    logprobs: int | None,
) -> None:
    """Check how many logprobs would be sent at once.

    `num_scored`: tokens in the prompts of all choices. `num_generated`: tokens that all choices
    may have, except in a stream, which sends their logprobs one by one.

    Raises:
        InvalidRequestError: the answer could be too large.
    """
    of_prompts = 0 if prompt_logprobs is None else num_scored * (1 + prompt_logprobs)
    generated = 0 if logprobs is None else num_generated * (1 + logprobs)
    if of_prompts + generated > MAX_ANSWER_LOGPROBS:
        is_own = "prompt_logprobs" in fields and of_prompts > generated
        raise fields.reject(
            "prompt_logprobs" if is_own else "logprobs",
            f"could make an answer of {of_prompts + generated} logprobs, more than "
            f"{MAX_ANSWER_LOGPROBS}: ask for fewer logprobs, tokens (max_tokens) or choices (n), "
            f"send fewer prompts at a time, or stream the generated tokens",
        )


def logit_bias_of(fields: Fields, *, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """The tokens of `logit_bias`, in ascending order, and what to add to their logits.

    Raises:
        InvalidRequestError: it is invalid.
    """
    value = fields.get("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_LISTED_TOKENS:
        raise fields.reject(
            "logit_bias", f"must be an object with at most {MAX_LISTED_TOKENS} token ids"
        )
    biases = Fields(value, path="logit_bias.")
    bound = MAX_LOGIT_BIAS
    result = {}
    for name in value:
        token = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else -1
        if not 0 <= token < vocab_size:
            raise fields.reject(
                "logit_bias", f"must have tokens 0 to {vocab_size - 1}, not {shown(name)}"
            )
        result[token] = biases.number(name, least=-bound, most=bound, default=0)
    return tuple(sorted(result.items()))


def tokens_of(fields: Fields, name: str, *, vocab_size: int) -> tuple[int, ...]:
    """A field's token ids; empty if it is missing.

    Raises:
        InvalidRequestError: it is not a list of tokens.
    """
    value = [] if fields.get(name) is None else fields.get(name)
    if not isinstance(value, list):
        raise fields.reject(name, "must be a list of token ids")
    for token in value:
        if not is_whole(token) or not 0 <= token < vocab_size:
            raise fields.reject(name, f"must have tokens 0 to {vocab_size - 1}, not {shown(token)}")
    return tuple(value)


def stops_of(fields: Fields) -> tuple[str, ...]:
    """The stop strings.

    Raises:
        InvalidRequestError: `stop` is invalid.
    """
    value = fields.get("stop")
    stops: Any = [] if value is None else [value] if isinstance(value, str) else value
    is_list = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not is_list or not all(isinstance(stop, str) and stop for stop in stops):
        raise fields.reject("stop", f"must be a string or a list of up to {MAX_STOPS}, not empty")
    if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
        raise fields.reject("stop", f"must have at most {MAX_STOP_CHARACTERS} characters in all")
    return tuple(stops)
