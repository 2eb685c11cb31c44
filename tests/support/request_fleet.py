"""A pool of ranks under a trace of requests, on a virtual clock: what a choice of ranks achieves.

Traces are drawn from a seed, or read from a file of recorded arrivals.

Ranks prefill prompts one after another at a fixed speed and generate for all requests that have a
slot. The gateways' side is the product's: `RankLoad` with its bookings and reports, and `choose`.
Everything is drawn from seeds, so results are exact.
"""

import csv
import heapq
import itertools
import json
import random
from dataclasses import dataclass, field, replace
from datetime import datetime

from equipoise.gateway.rank_load import RankInfo, RankLoad, RankState
from equipoise.gateway.request_balance import balancedness
from equipoise.gateway.routing import Demand, choose

PARITY = 14_245
"""Pairs that take as long as a token: DeepSeek-V3's arithmetic."""

PREFILL_TOKENS_PER_S = 20_000.0
STEP_S = 0.05
REPORT_S, DELAY_S = 1.0, 0.5
BLOCK = 64
SLOT_TOKENS = 3072
WINDOW_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    keys: tuple[bytes, ...]

    @property
    def cost(self):
        return self.prompt_tokens + self.prompt_tokens**2 / 2 / PARITY


def trace(seed, *, count, per_s):
    """Arrivals like those of published traces.

    Lengths are log-normal around the medians of the conversations of Azure's LLM inference trace
    (Splitwise, ISCA 2024: 1,020 prompt tokens, 129 answer tokens). Prompts begin with one of 200
    shared texts, the most popular ones most often, so that about half of the tokens could be
    cached (open-infra-index, day 6: 56 %). Arrivals come in bursts, the coefficient of variation
    of their distances is 2.
    """
    rng = random.Random(seed)
    shared = [min(16_000, int(rng.lognormvariate(6.9, 0.8))) for _ in range(200)]
    weights = [1 / (1 + place) for place in range(len(shared))]
    now_s = 0.0
    for number in range(count):
        now_s += rng.gammavariate(0.25, 4 / per_s)
        (text,) = rng.choices(range(len(shared)), weights)
        own = max(16, min(32_000, int(rng.lognormvariate(6.3, 1.5))))
        prompt = shared[text] + own
        num_full, num_shared = (prompt - 1) // BLOCK, shared[text] // BLOCK
        keys = [b"shared %d %d" % (text, place) for place in range(num_shared)]
        keys += [b"own %d %d" % (number, place) for place in range(num_shared, num_full)]
        answer = max(2, min(2_000, int(rng.lognormvariate(4.86, 1.0))))
        yield Arrival(
            at_s=now_s, prompt_tokens=prompt, answer_tokens=answer, keys=tuple(keys[:num_full])
        )


HASHED_TOKENS = 512
"""Tokens for which a trace of Mooncake has one hash."""


def recorded(path):
    """Arrivals from a file.

    It may be a trace of Mooncake (JSON lines, which say what prompts share; FAST 2025) or one of
    Azure's LLM inference traces of 2023 (CSV, no prompts share anything; Splitwise, ISCA 2024).
    """
    read = _mooncake if path.suffix == ".jsonl" else _azure
    with path.open() as lines:
        return [one for one in read(lines) if one.answer_tokens > 0]


def at_load(arrivals, load, *, prefills, generates, num_ranks=8, slots=64):
    """Arrivals sped up or slowed down until ranks are busy for this share of the time.

    That is the largest of the shares of prefill (nothing being cached), of slots and of cache.
    """
    slots *= num_ranks
    answers_s = [STEP_S * one.answer_tokens for one in arrivals]
    seconds = {
        "prefill": prefills * sum(one.cost for one in arrivals) / PREFILL_TOKENS_PER_S / num_ranks,
        "slots": generates * sum(answers_s) / slots,
        "cache": generates * sum(
            one.prompt_tokens * for_s for one, for_s in zip(arrivals, answers_s, strict=True)
        ) / (slots * SLOT_TOKENS),
    }  # fmt: skip
    first_s, last_s = arrivals[0].at_s, arrivals[-1].at_s
    speed = load * (last_s - first_s) / max(seconds.values())
    return [replace(one, at_s=(one.at_s - first_s) / speed) for one in arrivals], speed


def _mooncake(lines):
    for line in lines:
        one = json.loads(line)
        num_full = (one["input_length"] - 1) // BLOCK
        parts = range(HASHED_TOKENS // BLOCK)
        keys = (b"%d %d" % (text, part) for text in one["hash_ids"] for part in parts)
        yield Arrival(
            at_s=one["timestamp"] / 1000,
            prompt_tokens=one["input_length"],
            answer_tokens=one["output_length"],
            keys=tuple(itertools.islice(keys, num_full)),
        )


def _azure(lines):
    for number, row in enumerate(csv.DictReader(lines)):
        prompt = int(row["ContextTokens"])
        # Seven digits after the point are more than Python reads.
        at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        keys = tuple(b"%d %d" % (number, place) for place in range((prompt - 1) // BLOCK))
        yield Arrival(
            at_s=at_s, prompt_tokens=prompt, answer_tokens=int(row["GeneratedTokens"]), keys=keys
        )


@dataclass(eq=False)
class SimRank:
    """What a rank really does."""

    slots: int
    cache_tokens: int
    prefixes: dict = field(default_factory=dict)
    prefills: list = field(default_factory=list)
    busy_until_s: float = 0.0
    active: int = 0
    latents: int = 0
    num_reports: int = 0
    pairs_of_window: dict = field(default_factory=dict)

    def prefill(self, now_s, arrival):
        """Queue a prompt; returns when it is prefilled."""
        num_cached = 0
        for key in arrival.keys:
            if key not in self.prefixes:
                break
            num_cached += BLOCK
        uncached = arrival.prompt_tokens - num_cached
        pairs = num_cached * uncached + uncached**2 // 2
        start_s = max(now_s, self.busy_until_s)
        self.busy_until_s = start_s + (uncached + pairs / PARITY) / PREFILL_TOKENS_PER_S
        self.prefills.append((start_s, self.busy_until_s, uncached, pairs))
        window = int(self.busy_until_s // WINDOW_S)
        self.pairs_of_window[window] = self.pairs_of_window.get(window, 0) + pairs
        return self.busy_until_s

    def remember(self, keys):
        for key in reversed(keys):
            self.prefixes.pop(key, None)
            self.prefixes[key] = None
        while len(self.prefixes) * BLOCK > self.cache_tokens:
            del self.prefixes[next(iter(self.prefixes))]

    def info(self, now_s, name):
        self.num_reports += 1
        self.prefills = [one for one in self.prefills if one[1] > now_s]
        left = [
            (uncached, pairs, min(1.0, (end_s - now_s) / (end_s - start_s)))
            for start_s, end_s, uncached, pairs in self.prefills
        ]
        return RankInfo(
            name=name,
            address=name,
            state=RankState.OPEN,
            num_requests=self.active,
            max_requests=self.slots,
            pending_tokens=round(sum(part * uncached for uncached, _, part in left)),
            pending_pairs=round(sum(part * pairs for _, pairs, part in left)),
            parity_tokens=PARITY,
            kv_tokens_total=self.cache_tokens,
            kv_tokens_used=self.latents,
            report=self.num_reports,
            block_tokens=BLOCK,
        )


def by_rule(ranks, demand, turn):
    choice = choose(ranks, demand=demand, now=0.0, avoid=frozenset(), turn=turn)
    return next(n for n, rank in enumerate(ranks) if rank.address == choice.address)


def round_robin(ranks, _demand, turn):
    return turn % len(ranks)


def least_requests(ranks, _demand, turn):
    def order(n):
        return ranks[n].requests.total, (n - turn) % len(ranks)

    return min(range(len(ranks)), key=order)


RULES = {"round robin": round_robin, "least requests": least_requests, "this rule": by_rule}


@dataclass(kw_only=True)
class Outcome:
    """Means of mean / max over ranks, and waits."""

    attention: float
    """Pairs that ranks computed in windows of 10 s."""
    latents: float
    """Tokens that they held, each second."""
    requests: float
    """Requests that they had, each second."""
    mean_wait_s: float
    """From arrival until the prompt is prefilled."""
    p99_wait_s: float
    hit_rate: float
    """Share of prompt tokens that were cached."""


def play(arrivals, rule, *, prefills=True, generates=True, num_ranks=8, num_gateways=1, slots=64):
    """Play a trace; each request arrives at a gateway by chance."""
    return _Play(rule, prefills, generates, num_ranks, num_gateways, slots).run(list(arrivals))


class _Play:
    def __init__(self, rule, prefills, generates, num_ranks, num_gateways, slots):
        self.rule, self.prefills, self.generates = rule, prefills, generates
        self.ranks = [SimRank(slots, slots * SLOT_TOKENS) for _ in range(num_ranks)]
        self.views = []
        for _ in range(num_gateways):
            view = [RankLoad(name=f"r{n}", address=f"r{n}") for n in range(num_ranks)]
            for rank in view:
                rank.prefixes.max_blocks = slots * SLOT_TOKENS // BLOCK
            self.views.append(view)
        dice = random.Random(7)
        self.turns = [itertools.count(dice.randrange(1000)) for _ in self.views]
        self.dice = dice
        self.events, self.order = [], itertools.count()
        self.waits, self.samples = [], {"latents": [], "requests": []}
        self.num_tokens = self.num_uncached = 0

    def at(self, at_s, act, *args):
        heapq.heappush(self.events, (at_s, next(self.order), act, args))

    def run(self, arrivals):
        for arrival in arrivals:
            self.at(arrival.at_s, self.arrive, arrival)
        end_s = arrivals[-1].at_s
        for n in range(len(self.ranks)):
            report_s = REPORT_S * n / len(self.ranks)
            while report_s < end_s:
                self.at(report_s, self.report, n)
                report_s += REPORT_S
        for second in range(10, int(end_s)):
            self.at(second + 0.5, self.sample)
        while self.events:
            now_s, _, act, args = heapq.heappop(self.events)
            act(now_s, *args)
        windows = range(1, int(end_s // WINDOW_S))
        pairs = [[rank.pairs_of_window.get(w, 0) for rank in self.ranks] for w in windows]
        self.waits.sort()
        return Outcome(
            attention=_mean([balancedness(one) for one in pairs if any(one)]),
            latents=_mean(self.samples["latents"]),
            requests=_mean(self.samples["requests"]),
            mean_wait_s=_mean(self.waits),
            p99_wait_s=self.waits[int(0.99 * len(self.waits))] if self.waits else 0.0,
            hit_rate=1 - self.num_uncached / max(1, self.num_tokens),
        )

    def report(self, now_s, n):
        info = self.ranks[n].info(now_s, f"r{n}")
        self.at(now_s + DELAY_S, self.deliver, n, info)

    def deliver(self, _now_s, n, info):
        for view in self.views:
            view[n].note_report(info)

    def sample(self, _now_s):
        for kind, burdens in (
            ("latents", [rank.latents for rank in self.ranks]),
            ("requests", [rank.active for rank in self.ranks]),
        ):
            if any(burdens):
                self.samples[kind].append(balancedness(burdens))

    def arrive(self, now_s, arrival):
        gateway = self.dice.randrange(len(self.views))
        view = self.views[gateway]
        demand = Demand(
            prompt_tokens=arrival.prompt_tokens,
            answer_tokens=213 if self.generates else 1,
            is_prefilled_elsewhere=not self.prefills,
            generates=self.generates,
            keys=arrival.keys,
            block_tokens=BLOCK,
        )
        n = self.rule(view, demand, next(self.turns[gateway]))
        rank, load = self.ranks[n], view[n]
        booking = demand.booking_on(load)
        load.book(booking, now=now_s)
        rank.active += 1
        rank.latents += arrival.prompt_tokens
        prefilled_s = now_s
        if self.prefills:
            prefilled_s = rank.prefill(now_s, arrival)
            self.num_tokens += arrival.prompt_tokens
            self.num_uncached += rank.prefills[-1][2]
        self.at(prefilled_s, self.is_prefilled, rank, load, booking, arrival, now_s)

    def is_prefilled(self, now_s, rank, load, booking, arrival, arrived_s):
        load.note_prefilled(booking)
        load.prefixes.note(arrival.keys)
        rank.remember(arrival.keys)
        self.waits.append(now_s - arrived_s)
        if not self.generates:
            return self.end(now_s, rank, load, booking, arrival, 0)
        # Latents grow by steps of 16 tokens.
        for made in range(16, arrival.answer_tokens, 16):
            self.at(now_s + made * STEP_S, self.grow, rank)
        grown = (arrival.answer_tokens - 1) // 16 * 16
        end_s = now_s + arrival.answer_tokens * STEP_S
        return self.at(end_s, self.end, rank, load, booking, arrival, grown)

    def grow(self, _now_s, rank):
        rank.latents += 16

    def end(self, _now_s, rank, load, booking, arrival, grown):
        rank.active -= 1
        rank.latents -= arrival.prompt_tokens + grown
        load.requests.add(-1)
        load.num_unanswered -= 1
        load.latents.add(-booking.latents)


def _mean(values):
    return sum(values) / len(values) if values else 0.0
