"""Whether the prefill pool runs a request's prompt, and what is left for the decode rank. Pure.

A handover is a planned break after the first token: the decode rank continues with the request
that remains, as after any break, and fetches the latents of the prompt's full blocks.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from equipoise.gateway.rank_load import RankLoad
from equipoise.wire.inference_messages import (
    FinishReason,
    GeneratedTokens,
    GenerateRequest,
    LatentHold,
    LatentSource,
)


class Direct(StrEnum):
    """Why a decode rank prefills a prompt itself."""

    SHORT = "short"
    """The rank lacks less than a block of it, so nothing could be fetched."""

    NO_PREFILL = "no_prefill"
    """No rank of the prefill pool serves."""

    FORM = "form"
    """Latents of the prefill pool have another form."""

    CROWDED = "crowded"
    """No rank of the prefill pool is free soon enough, or the chosen one's queue is full."""

    REJECTED = "rejected"
    """A rank of the prefill pool rejects what this one accepts: their limits differ."""

    SUSPECT = "suspect"
    """Ranks failed on it: it runs on one rank, so that it is known which."""


def why_direct(
    request: GenerateRequest,
    *,
    decode: RankLoad,
    num_cached: int,
    prefill: Sequence[RankLoad],
    is_suspect: bool,
) -> Direct | None:
    """Why the rank `decode` should prefill the prompt itself; None if `prefill` should.

    `num_cached` of the prompt's tokens are probably cached on it.
    """
    if len(request.prompt) - num_cached < decode.block_tokens:
        return Direct.SHORT
    if is_suspect:
        return Direct.SUSPECT
    serving = [rank for rank in prefill if not rank.trouble]
    if not serving:
        return Direct.NO_PREFILL
    return None if any(have_same_form(decode, rank) for rank in serving) else Direct.FORM


def have_same_form(one: RankLoad, other: RankLoad) -> bool:
    """Whether two ranks can exchange latents."""
    return bool(one.latent_form) and one.latent_form == other.latent_form


def first_leg(request: GenerateRequest) -> GenerateRequest:
    """What the prefill pool does of a request: its prompt and its first token."""
    return replace(
        request,
        max_tokens=1,
        min_tokens=min(request.min_tokens, request.num_replayed + 1),
        hold_latents=request.max_tokens > 1,
    )


def first_part(part: GeneratedTokens, request: GenerateRequest) -> GeneratedTokens:
    """The first token as part of the whole request, which does not end with its first leg."""
    is_leg_end = part.finish is FinishReason.LENGTH and request.max_tokens > 1
    return replace(part, finish=None if is_leg_end else part.finish, held=None)


def second_leg(
    request: GenerateRequest, part: GeneratedTokens, *, pool: str, prefill: RankLoad
) -> GenerateRequest:
    """What the decode rank does, and where it finds the latents that the first leg left."""
    rest = request.after(part.tokens)
    if part.held is None:
        return rest
    source = LatentSource(
        address=prefill.address,
        pool=pool,
        worker=prefill.name,
        boot_id=part.held.boot_id,
        hold=part.held.hold,
    )
    return replace(rest, latents_from=source)


def has_all(part: GeneratedTokens, held: LatentHold) -> bool:
    """Whether the decode rank whose first part this is has all latents that are held for it."""
    return part.prompt is not None and part.prompt.num_cached >= held.num_tokens
