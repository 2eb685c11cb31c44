"""What ranks compare: an `Arrival` before they form, a `StepHeader` before every step. Pure.

The header is the entire switch protocol: every rank sees the same headers and applies the same
rule, so all ranks switch at the same step or none does, without the balancer. Numbers name a layout
but do not prove it, so both also carry digests of the content (`Layout.digest`).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple

from equipoise.planning.layout import DIGEST_BYTES, digest_text
from equipoise.rank.errors import GroupError, PeerLeftError
from equipoise.wire.balancer_messages import JoinEpoch, Peer

_WORD_BYTES = 8
"""What a header carries of a digest: an int64."""

_MAX_SHOWN = 4
"""Ranks named per value, and values shown, in a message: a pool may have hundreds of ranks."""


class StepHeader(NamedTuple):
    """One rank's header; travels as a row of int64, in the order of the fields.

    A tuple, because every rank reads all ranks' headers before every step.
    """

    epoch: int
    step: int
    """Number of steps completed in the epoch."""
    num_tokens: int
    """Tokens that the rank runs in the coming step."""
    num_drafts: int
    """Draft modules that the rank runs on these tokens after the step; 0 if it does not draft."""
    generation: int
    staged_generation: int
    """0 if no generation is staged."""
    leaving: int
    """Whether the rank stops after this header, and why: a `Leaving`."""
    peers_digest: int
    """`digest_word` of the epoch's peers; 0 for a rank alone."""
    layout_digest: int
    """`digest_word` of the layout in use."""
    staged_digest: int
    """`digest_word` of the staged layout; 0 if none is staged."""
    num_second: int = 0
    """Tokens, the last of `num_tokens`, that the rank puts into a second micro-batch."""
    wants_two_hops: int = 0
    """1 if the rank wants rows of the coming step to travel to other nodes in two hops."""
    wants_balance: int = 0
    """1 if the rank wants replicas of the coming step to be chosen by all ranks' counts."""


class Leaving(IntEnum):
    """Whether a rank stops after a header."""

    NOT = 0
    IN_ORDER = 1
    DAMAGED = 2
    """Its slots held wrong bytes, so the latents that all ranks computed with it may be wrong."""


HEADER_WIDTH = len(StepHeader._fields)

_AGREED = attrgetter("epoch", "step", "generation", "peers_digest", "layout_digest")
_STAGED = attrgetter("staged_generation", "staged_digest")


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a rank publishes at the rendezvous. Travels as JSON."""

    peers_digest: str
    """Hex digest of the epoch's peers."""
    generation: int
    """Generation that the epoch starts with."""
    layout_digest: str
    """Hex digest of its layout."""
    announcement: str
    """What the rank computes with."""
    header_width: int = HEADER_WIDTH
    """Fields of its step headers, which releases may change."""

    @classmethod
    def of(cls, join_epoch: JoinEpoch, *, announcement: str) -> "Arrival":
        """Return a rank's arrival in an epoch."""
        return cls(
            peers_digest=peers_digest(join_epoch.peers).hex(),
            generation=join_epoch.layout.generation,
            layout_digest=join_epoch.layout.digest().hex(),
            announcement=announcement,
        )

    def to_json(self) -> str:
        """Return it as published."""
        return json.dumps(astuple(self))

    @classmethod
    def from_json(cls, text: str) -> "Arrival":
        """Return what a rank published.

        Raises:
            ValueError: it is not an arrival.
        """
        try:
            published = json.loads(text)
        except (ValueError, RecursionError):
            published = None
        if isinstance(published, list) and [type(one) for one in published] == _ARRIVAL_TYPES:
            arrival = cls(*published)
            if arrival.header_width == HEADER_WIDTH:
                return arrival
        raise ValueError(f"{text[:80]!r}, which no rank of this release does")


_ARRIVAL_TYPES = [str, int, str, str, int]


def peers_digest(peers: Sequence[Peer]) -> bytes:
    """Digest the peers of an epoch, in rank order: BLAKE2b-128 of a JSON array of their fields."""
    rows = [(peer.rank, peer.worker, peer.address, peer.node) for peer in peers]
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=DIGEST_BYTES).digest()


def digest_word(digest: bytes) -> int:
    """Return the first 8 bytes of a digest as an int64, as a header carries them."""
    return int.from_bytes(digest[:_WORD_BYTES], "big", signed=True)


def check_arrivals(arrivals: Sequence[Arrival], *, names: Sequence[str]) -> None:
    """Check that all ranks were sent the same peers and the same layout.

    `arrivals` and `names` (of workers, for the message) are in rank order.

    Raises:
        ValueError: ranks differ; a group of them would mix layouts.
    """
    generation = arrivals[0].generation
    for what, values in (
        ("the peers of the epoch", [_short(one.peers_digest) for one in arrivals]),
        ("the generation", [str(one.generation) for one in arrivals]),
        (
            f"the layout of generation {generation}",
            [_short(one.layout_digest) for one in arrivals],
        ),
    ):
        if detail := _disagreement(values, names):
            raise ValueError(
                f"ranks disagree about {what} ({detail}): they wait for the next epoch; if it "
                "fails too, restart the balancer"
            )


def check_group(headers: tuple[StepHeader, ...], *, names: tuple[str, ...]) -> None:
    """Check that all ranks stay, at the same step of the same epoch, with the same layout.

    `headers` and `names` (of workers, for the message) are in rank order.

    Raises:
        PeerLeftError: a rank leaves.
        GroupError: ranks disagree; a step would mix layouts or hang.
    """
    leaving = [names[rank] for rank, header in enumerate(headers) if header.leaving]
    if leaving:
        raise PeerLeftError(
            f"{' and '.join(leaving)} left the pool: the ranks must form a new group"
        )
    if len(set(map(_AGREED, headers))) == 1:  # The usual case, before every step.
        return
    for what, values in (
        ("the epoch", [str(one.epoch) for one in headers]),
        ("the peers of the epoch", [_word_text(one.peers_digest) for one in headers]),
        ("the step", [str(one.step) for one in headers]),
        ("the generation", [str(one.generation) for one in headers]),
        (
            f"the layout of generation {headers[0].generation}",
            [_word_text(one.layout_digest) for one in headers],
        ),
    ):
        if detail := _disagreement(values, names):
            raise GroupError(f"ranks disagree about {what} ({detail}): restart these workers")


def agreed_generation(headers: tuple[StepHeader, ...]) -> int | None:
    """Return the generation that every rank has staged and can switch to now, or None.

    All ranks must have staged the same layout as the same one. A minimum over ranks would be wrong:
    after an abort and a new stage, it could name a generation that some rank has dropped.
    """
    staged = set(map(_STAGED, headers))
    if len(staged) > 1:
        return None
    generation, _ = staged.pop()
    return generation if generation > headers[0].generation else None


def staged_conflict(headers: tuple[StepHeader, ...], *, names: tuple[str, ...]) -> str:
    """Return why ranks never switch although all have staged this generation, or an empty string.

    They staged different layouts under one number. Every rank finds it in the same headers.
    """
    generation = headers[0].staged_generation
    if not generation or any(header.staged_generation != generation for header in headers):
        return ""
    detail = _disagreement([_word_text(one.staged_digest) for one in headers], names)
    if not detail:
        return ""
    return (
        f"ranks disagree about the staged layout of generation {generation} ({detail}): plan "
        "again; if it is rejected too, restart the balancer"
    )


def takes_two_hops(headers: tuple[StepHeader, ...]) -> bool:
    """Whether rows of the coming step travel to other nodes in two hops: most ranks want it."""
    return 2 * sum(header.wants_two_hops for header in headers) > len(headers)


def balances_replicas(headers: tuple[StepHeader, ...]) -> bool:
    """Whether replicas of the coming step are chosen by all ranks' counts: most ranks want it."""
    return 2 * sum(header.wants_balance for header in headers) > len(headers)


def _disagreement(values: Sequence[str], names: Sequence[str]) -> str:
    """Return which ranks have which value, the rarest first; an empty string if all are equal."""
    holders: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        holders.setdefault(value, []).append(name)
    if len(holders) == 1:
        return ""
    rarest = sorted(holders.items(), key=lambda item: len(item[1]))
    return "; ".join(f"{_listed(names)}: {value}" for value, names in rarest[:_MAX_SHOWN])


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more


def _word_text(word: int) -> str:
    return digest_text(word.to_bytes(_WORD_BYTES, "big", signed=True))


def _short(hex_digest: str) -> str:
    return hex_digest[: 2 * _WORD_BYTES]
