"""`RankLoad`: a rank as this gateway knows it, and the work that it has. Pure.

Work has four kinds: requests, tokens in the latent cache, prompt tokens yet to be prefilled, and
the pairs of such a token and an earlier position, which attention computes. Of each, the gateway
knows what it has booked itself, and from the rank's reports how much there is beyond that.
"""

import math
from dataclasses import dataclass, field
from enum import IntEnum

from equipoise.gateway.prefix_index import PrefixIndex

CROWDED_SHARE = 0.9
"""A latent cache above this share will soon be full: ranks with more room are preferred."""

ASSUMED_MAX_REQUESTS = 64
ASSUMED_SLOT_TOKENS = 512
"""Request slots of a rank that does not report them, and cache tokens for each."""

ASSUMED_PENDING_TOKENS = 128
"""Pending tokens of a request from elsewhere, on a rank that does not report them."""


HALF_LIFE_S = 60.0
"""Half-life of the sums that count what was sent lately, seconds."""


class RankState(IntEnum):
    """Whether a rank takes requests, best first."""

    OPEN = 0
    """It serves, as far as the gateway knows."""

    DOUBTFUL = 1
    """The balancer has lost contact with it. It may serve, so it is tried if no other rank can."""

    CLOSED = 2
    """It is leaving, or is no longer in the pool. It finishes the requests it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """A rank as a balancer or a setting reports it."""

    name: str
    """Name for logs and messages."""

    address: str
    """host:port."""

    state: RankState
    """Whether it takes requests."""

    num_requests: int = 0
    """Requests active and queued there, from all gateways."""

    max_requests: int = 0
    """Requests that it generates at a time; 0 if unknown."""

    pending_tokens: int = 0
    """Tokens of their prompts that have not run yet; meaningless if `max_requests` is unknown."""

    pending_pairs: int = 0
    """Pairs of one of those and an earlier position; likewise."""

    parity_tokens: int = 0
    """Pairs that take as long as one token does without attention; 0 if unknown."""

    kv_tokens_total: int = 0
    """Tokens that its latent cache has room for; 0 if unknown."""

    kv_tokens_used: int = 0
    """Tokens that the cache holds."""

    report: int = 0
    """A number that changes with each report of the rank."""

    boot_id: str = ""
    """Identifies its process, whose cache starts empty; empty if unknown."""

    latent_form: str = ""
    """Form of its latents; empty if unknown."""

    block_tokens: int = 0
    """Tokens per block of latents; 0 if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """A request's work on one rank."""

    pending_tokens: int
    """Tokens of its prompt to prefill."""

    pending_pairs: int
    """Pairs of one of those and an earlier position."""

    latents: int
    """Tokens that the cache will hold at its end, as far as can be expected."""


@dataclass(slots=True, kw_only=True)
class Amount:
    """One kind of work on a rank.

    A report counts everybody's work, including ours, as it was some time ago. So what it counts
    beyond the most that we had booked, since the report before the previous one, is from elsewhere;
    our own bookings are on top of that, seen by the report or not.
    """

    booked: int = 0
    """Of this gateway's requests, now."""

    foreign: int = 0
    """Of requests from elsewhere, by the latest report."""

    # Most booked at a time: since the latest report, and between that and the one before.
    peak: int = 0
    earlier_peak: int = 0

    @property
    def total(self) -> int:
        """All of it, as far as is known."""
        return self.booked + self.foreign

    def add(self, amount: int) -> None:
        """Book more; less if negative."""
        self.booked += amount
        self.peak = max(self.peak, self.booked)

    def report(self, total: int) -> None:
        """Take a new report of the rank."""
        self.foreign = max(0, total - max(self.peak, self.earlier_peak))
        self.earlier_peak, self.peak = self.peak, self.booked


@dataclass(slots=True, kw_only=True)
class Recent:
    """A sum in which what was added `HALF_LIFE_S` ago counts half."""

    value: float = 0.0
    """The sum at `at_s`."""

    at_s: float = 0.0
    """When something was added last, seconds."""

    def at(self, now: float) -> float:
        """The sum now."""
        return self.value * math.exp2((self.at_s - now) / HALF_LIFE_S)

    def add(self, amount: float, *, now: float) -> None:
        """Add to it."""
        self.value, self.at_s = self.at(now) + amount, now


@dataclass(slots=True, kw_only=True, eq=False)
class RankLoad:
    """A rank and its work now."""

    name: str
    """Name for logs and messages."""

    address: str
    """host:port."""

    state: RankState = RankState.OPEN
    """Whether it takes requests."""

    requests: Amount = field(default_factory=Amount)
    """Requests, active and queued."""

    latents: Amount = field(default_factory=Amount)
    """Tokens that the latent cache holds, or will hold at the end of our requests."""

    pending_tokens: Amount = field(default_factory=Amount)
    """Tokens of prompts that have not run yet."""

    pending_pairs: Amount = field(default_factory=Amount)
    """Pairs of one of those and an earlier position."""

    sent_tokens: Recent = field(default_factory=Recent)
    """Prompt tokens to prefill that this gateway sent lately."""

    sent_pairs: Recent = field(default_factory=Recent)
    """Pairs of one of those and an earlier position."""

    max_requests: int = 0
    """Requests that it generates at a time; 0 if unknown."""

    kv_tokens_total: int = 0
    """Tokens that the cache has room for; 0 if unknown."""

    parity_tokens: int = 0
    """Pairs that take as long as one token does without attention; 0 if unknown."""

    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    """The prompts' beginnings that it has probably cached."""

    num_unanswered: int = 0
    """Requests of ours that it has not accepted yet."""

    num_suspects: int = 0
    """Requests, not proven here yet, of which a choice ran on two ranks that failed."""

    num_failures: int = 0
    """Failures since it last accepted a request. While above 0, it gets one request at a time."""

    answers: bool | None = None
    """Whether it serves, by its latest answer or failure; None if it is not known."""

    silence: str = ""
    """Why it does not serve, if it does not."""

    latent_form: str = ""
    """Form of its latents; empty if unknown."""

    block_tokens: int = 0
    """Tokens per block of latents; 0 if unknown."""

    context_length: int = 0
    """Most tokens of prompt and output together; 0 if unknown."""

    resting_until_s: float = 0.0
    """End of the rank's backoff, on the clock of `now`."""

    resting_reason: str = ""
    """Reason for the latest backoff."""

    # Of the latest report.
    report: int = 0
    boot_id: str = ""

    @property
    def num_open(self) -> int:
        """Requests of this gateway."""
        return self.requests.booked

    @property
    def trouble(self) -> str:
        """Why it does not serve; empty when it does. A full queue is no trouble."""
        if self.state is RankState.CLOSED:
            return "is leaving"
        if self.answers is None and self.state is RankState.DOUBTFUL:
            return "has lost contact with the balancer"
        return f"does not serve: {self.silence}" if self.answers is False else ""

    @property
    def request_slots(self) -> int:
        """Requests that it generates at a time, or an assumption."""
        if self.max_requests or not self.kv_tokens_total:
            return self.max_requests or ASSUMED_MAX_REQUESTS
        return max(1, self.kv_tokens_total // ASSUMED_SLOT_TOKENS)

    @property
    def cache_tokens(self) -> int:
        """Tokens that the latent cache has room for, or an assumption."""
        return self.kv_tokens_total or self.request_slots * ASSUMED_SLOT_TOKENS

    @property
    def is_crowded(self) -> bool:
        """Whether the latent cache is so full that requests will be preempted or wait for room."""
        return 0 < self.kv_tokens_total * CROWDED_SHARE < self.latents.total

    def share_with(self, booking: Booking) -> float:
        """The larger of the shares of request slots and cache in use, with one more request."""
        return max(
            (self.requests.total + 1) / self.request_slots,
            (self.latents.total + booking.latents) / self.cache_tokens,
        )

    def note_report(self, info: RankInfo) -> None:
        """Take what a balancer or a setting says of the rank."""
        if info.state is not self.state:
            self.answers = None
        self.name, self.state = info.name, info.state
        self.latent_form, self.block_tokens = info.latent_form, info.block_tokens
        self.max_requests, self.kv_tokens_total = info.max_requests, info.kv_tokens_total
        self.parity_tokens = info.parity_tokens
        if info.boot_id != self.boot_id:
            self.boot_id = info.boot_id
            self.prefixes.clear()
        if info.report == self.report:
            return
        self.report = info.report
        self.requests.report(info.num_requests)
        self.latents.report(info.kv_tokens_used)
        self.pending_tokens.report(info.pending_tokens)
        self.pending_pairs.report(info.pending_pairs)
        if not info.max_requests:
            # An earlier version, which reports no prompts.
            self.pending_tokens.foreign = ASSUMED_PENDING_TOKENS * self.requests.foreign

    def book(self, booking: Booking, *, now: float) -> None:
        """Count a request that this gateway sends to the rank."""
        self.sent_tokens.add(booking.pending_tokens, now=now)
        self.sent_pairs.add(booking.pending_pairs, now=now)
        self.requests.add(1)
        self.num_unanswered += 1
        self.latents.add(booking.latents)
        self.pending_tokens.add(booking.pending_tokens)
        self.pending_pairs.add(booking.pending_pairs)

    def note_prefilled(self, booking: Booking) -> None:
        """The rank has prefilled the prompt of our request, or the request ended before that."""
        self.pending_tokens.add(-booking.pending_tokens)
        self.pending_pairs.add(-booking.pending_pairs)
