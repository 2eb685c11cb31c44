"""`timed_requests`: the requests of a benchmark, a function of its settings and seed. Pure."""

from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np

from equipoise.cli.bench.settings import BenchServeSettings
from equipoise.settings.errors import InvalidSettingsError
from equipoise_model.train.data import DOMAINS, CorpusError, Domain, heldout_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRequest:
    """One request and its arrival time."""

    domain: str
    """Kind of text."""

    prompt: str
    """Text to complete."""

    max_tokens: int
    """Number of tokens to request."""

    begins_s: float
    """Arrival time, seconds after the start."""


def timed_requests(
    settings: BenchServeSettings, *, count: int, stream: int
) -> tuple[TimedRequest, ...]:
    """Make `count` requests in order of arrival; each `stream` of a seed differs.

    Raises:
        InvalidSettingsError: a kind of text is unknown, or has too little text.
    """
    rng = np.random.default_rng([settings.seed, stream])
    shares = settings.shares
    names = list(shares)
    for name in names:
        if name not in DOMAINS:
            raise InvalidSettingsError(f"--mix {name}: kinds of text are {', '.join(DOMAINS)}")
    domains = [names[i] for i in rng.choice(len(names), size=count, p=list(shares.values()))]
    prompts = {name: iter(_prompts(settings, name, domains.count(name), stream)) for name in names}
    lengths = rng.integers(*settings.output_tokens, size=count, endpoint=True)
    gaps_s = rng.exponential(size=count) / settings.request_rate
    begins_s = gaps_s.cumsum() - gaps_s[0]
    return tuple(
        TimedRequest(
            domain=domain,
            prompt=next(prompts[domain]),
            max_tokens=int(length),
            begins_s=float(begin_s),
        )
        for domain, length, begin_s in zip(domains, lengths, begins_s, strict=True)
    )


def _prompts(settings: BenchServeSettings, domain: str, count: int, stream: int) -> list[str]:
    """Prompts of a kind of text, repeated if the text has too few."""
    least, most = settings.input_chars
    wanted = count
    while wanted:
        try:
            found = heldout_prompts(
                cast("Domain", domain),
                num_prompts=wanted,
                seed=settings.seed * 2 + stream,
                min_bytes=least,
                max_bytes=most,
            )
        except CorpusError:
            wanted //= 2
        else:
            texts = [prompt.decode() for prompt in found]
            return list(islice((text for _ in range(count) for text in texts), count))
    if count:
        raise InvalidSettingsError(f"--input-length: no {domain} text has {least} characters")
    return []
