"""`asked_requests`: what a benchmark asks, and when. Pure: a function of settings and seed."""

from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np

from equipoise.cli.bench.settings import BenchServeSettings
from equipoise.cli.offline.settings import ToolInputError
from equipoise_model.train.data import DOMAINS, CorpusError, Domain, heldout_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRequest:
    """One request: its kind of text, and the second at which it is to begin, from the start."""

    domain: str
    prompt: str
    max_tokens: int
    begins_s: float


def asked_requests(
    settings: BenchServeSettings, *, count: int, stream: int
) -> tuple[AskedRequest, ...]:
    """So many requests in order; each `stream` of a seed has others.

    Raises:
        ToolInputError: there is no such kind of text, or too little of it.
    """
    rng = np.random.default_rng([settings.seed, stream])
    shares = settings.shares
    names = list(shares)
    for name in names:
        if name not in DOMAINS:
            raise ToolInputError(f"--mix {name}: there is {', '.join(DOMAINS)}")
    domains = [names[i] for i in rng.choice(len(names), size=count, p=list(shares.values()))]
    prompts = {name: iter(_prompts(settings, name, domains.count(name), stream)) for name in names}
    lengths = rng.integers(*settings.output_tokens, size=count, endpoint=True)
    gaps_s = rng.exponential(size=count) / settings.request_rate
    begins_s = gaps_s.cumsum() - gaps_s[0]
    return tuple(
        AskedRequest(
            domain=domain,
            prompt=next(prompts[domain]),
            max_tokens=int(length),
            begins_s=float(begin_s),
        )
        for domain, length, begin_s in zip(domains, lengths, begins_s, strict=True)
    )


def _prompts(settings: BenchServeSettings, domain: str, count: int, stream: int) -> list[str]:
    """Prompts of a domain; where its text has fewer different ones, they come again."""
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
        raise ToolInputError(f"--input-length: there is no {domain} text of {least} characters")
    return []
