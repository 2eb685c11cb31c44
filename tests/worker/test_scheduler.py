"""Scheduling loses no request, keeps its budget, and is fair."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.wire.inference_messages import FinishReason
from equipoise.worker.blocks import BlockPool
from equipoise.worker.errors import QueueFullError
from equipoise.worker.latents.holds import HoldEnd
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.sequence import PrefillWork, Request
from equipoise_model.sampling_params import SampledToken, SamplingParams

BLOCK = 4


def next_token(tokens):
    """A stand-in for the model: the next token is a function of all tokens before it."""
    return (sum(tokens) * 31 + len(tokens)) % 50


def sampled_token(token):
    return SampledToken(token=token, logprob=-1.0)


def score_of(before, token):
    """A stand-in for a logprob: a function of all tokens up to the scored one."""
    return SampledToken(token=token, logprob=-float(next_token(before)))


def commit(scheduler, plan, results):
    sampled, drafts, scores = results
    return scheduler.commit(plan, sampled, drafts, scores=scores)


class Model:
    """Keeps a cache as the model does, so that a wrong block, place or order is noticed.

    It drafts the right token if `guesses` says so, and else another.
    """

    def __init__(self, guesses=lambda: True, num_drafts=0):
        self.cache = {}
        self.guesses = guesses
        self.num_drafts = num_drafts

    def run(self, plan):
        written = set()
        sampled, drafts, scores = [], {}, []
        for chunk in plan.chunks:
            places = [(block, place) for block in chunk.blocks for place in range(BLOCK)]
            for position, token in enumerate(chunk.tokens, chunk.start):
                assert places[position] not in written
                written.add(places[position])
                self.cache[places[position]] = token
            # What the model would attend to: everything so far, from the cache alone.
            end = chunk.start + len(chunk.tokens)
            tokens = [self.cache[place] for place in places[:end]]
            for place, token in enumerate(chunk.scored, chunk.start + chunk.score_from + 1):
                assert tokens[place : place + 1] in ([], [token])
                scores.append(score_of(tokens[:place], token))
            rows = range(end - len(chunk.sampling) + 1, end + 1)
            of_chunk = [sampled_token(next_token(tokens[:row])) for row in rows]
            sampled += of_chunk
            if chunk.sampling:
                standing = chunk.accepted(of_chunk)
                known = tokens[: chunk.start + len(chunk.known)]
                drafts[chunk.key] = self.draft([*known, *(one.token for one in standing)])
        return sampled, drafts, scores

    def draft(self, tokens):
        drafts = []
        for _ in range(self.num_drafts):
            token = next_token([*tokens, *drafts])
            drafts.append(token if self.guesses() else (token + 1) % 50)
        return tuple(drafts)


def scheduler_of(*, num_blocks=100, **changes):
    chosen = {"max_requests": 2, "max_queued": 20, "max_step_tokens": 5} | changes
    return Scheduler(blocks=BlockPool(num_blocks=num_blocks, block_tokens=BLOCK), **chosen)


def solo(request):
    tokens = list(request.prompt)
    while True:
        tokens.append(next_token(tokens))
        generated = tokens[len(request.prompt) :]
        if generated[-1] in request.stop_tokens or len(generated) == request.max_tokens:
            return generated


@st.composite
def requests(draw, max_size=12):
    return [
        Request(
            key=key,
            prompt=tuple(draw(st.lists(st.integers(0, 49), min_size=1, max_size=30))),
            max_tokens=draw(st.integers(1, 12)),
            stop_tokens=frozenset(draw(st.sets(st.integers(0, 49), max_size=3))),
            prompt_logprobs=draw(st.none() | st.just(0)),
        )
        for key in range(draw(st.integers(1, max_size)))
    ]


@settings(deadline=None)
@given(
    requests(),
    st.integers(1, 4),
    st.integers(0, 8),
    # The longest request needs 42 places, 11 blocks.
    st.integers(11, 40),
    st.integers(0, 2),
    st.data(),
)
def test_every_request_gets_its_solo_tokens_within_budget_and_blocks(
    offered, most, spare, num_blocks, num_drafts, data
):
    budget = most * (1 + num_drafts) + spare
    scheduler = scheduler_of(
        num_blocks=num_blocks,
        max_requests=most,
        max_step_tokens=budget,
        num_drafts=num_drafts,
        max_drafting=data.draw(st.integers(1, most)),
    )
    luck = data.draw(st.lists(st.booleans(), max_size=30))
    model = Model(lambda: luck.pop() if luck else True, num_drafts)
    got, finished = {one.key: [] for one in offered}, {}
    prompts = {}
    waiting = list(offered)
    arrivals = data.draw(st.lists(st.integers(0, 3), max_size=20))
    while len(finished) < len(offered):
        for _ in range(arrivals.pop() if arrivals else len(waiting)):
            if waiting:
                scheduler.submit(waiting.pop(0))
        plan = scheduler.plan()
        assert plan.num_tokens <= budget
        assert len({chunk.key for chunk in plan.chunks}) == len(plan.chunks)
        assert plan.num_tokens > 0 or scheduler.num_active == scheduler.num_queued == 0
        for emission in commit(scheduler, plan, model.run(plan)):
            assert emission.key not in finished
            if not got[emission.key]:
                prompts[emission.key] = emission.prompt
            else:
                assert emission.prompt is None
            got[emission.key].append(emission.token)
            if emission.finish is not None:
                finished[emission.key] = emission.finish
    for request in offered:
        is_scored, prompt = request.prompt_logprobs is not None, request.prompt
        assert prompts[request.key].scores == tuple(
            score_of(prompt[:place], prompt[place]) for place in range(1, len(prompt)) if is_scored
        )
        assert prompts[request.key].num_cached < (1 if is_scored else len(prompt))
        assert got[request.key] == solo(request)
        stopped = got[request.key][-1] in request.stop_tokens
        assert finished[request.key] == (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert scheduler.num_active == scheduler.num_queued == scheduler.blocks.num_used == 0
    counts = scheduler.counts
    assert counts.generated == sum(map(len, got.values()))
    assert counts.accepted <= counts.drafted


@settings(deadline=None)
@given(requests(max_size=8), st.integers(11, 30), st.data())
def test_a_cancellation_at_any_moment_affects_no_other_request(offered, num_blocks, data):
    scheduler = scheduler_of(num_blocks=num_blocks)
    model, got, cancelled = Model(), {one.key: [] for one in offered}, set()
    for request in offered:
        scheduler.submit(request)
    while scheduler.num_active + scheduler.num_queued:
        plan = scheduler.plan()
        sampled, drafts, scores = model.run(plan)
        victim = data.draw(st.integers(-10, len(offered) - 1))
        if victim >= 0 and scheduler.cancel(victim):
            cancelled.add(victim)
        for emission in commit(scheduler, plan, (sampled, drafts, scores)):
            got[emission.key].append(emission.token)
    for request in offered:
        tokens = solo(request)
        if request.key in cancelled:
            assert got[request.key] == tokens[: len(got[request.key])]
        else:
            assert got[request.key] == tokens
    assert scheduler.blocks.num_used == 0


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(6, 30))
def test_first_tokens_come_in_the_order_of_arrival_when_prompts_are_equal(rows, count):
    scheduler = scheduler_of(max_requests=rows, max_queued=count, max_step_tokens=rows + 2)
    model, order = Model(), []
    for key in range(count):
        scheduler.submit(Request(key=key, prompt=(1, 2, 3, 4, 5), max_tokens=3))
    while scheduler.num_active + scheduler.num_queued:
        plan = scheduler.plan()
        for emission in commit(scheduler, plan, model.run(plan)):
            if emission.key not in order:
                order.append(emission.key)
    assert order == list(range(count))


def test_the_youngest_is_paused_for_blocks_and_finds_its_prefix_cached():
    scheduler = scheduler_of(num_blocks=6, max_requests=3, max_step_tokens=12)
    model, got = Model(), {0: [], 1: []}
    prompts = {0: (1, 2, 3, 4, 5, 6, 7), 1: (9, 8, 7, 6, 5, 4, 3)}
    for key, prompt in prompts.items():
        scheduler.submit(Request(key=key, prompt=prompt, max_tokens=15))
    while scheduler.num_active + scheduler.num_queued:
        plan = scheduler.plan()
        if scheduler.counts.preempted == 1 and scheduler.num_active == 1:
            assert [chunk.key for chunk in plan.chunks] in ([0], [1])
        for emission in commit(scheduler, plan, model.run(plan)):
            got[emission.key].append(emission.token)
    for key, prompt in prompts.items():
        assert got[key] == solo(Request(key=key, prompt=prompt, max_tokens=15))
    assert scheduler.counts.preempted == 1
    assert scheduler.counts.processed > 2 * (7 + 14)


def test_a_cached_prompt_does_not_run_again():
    scheduler, model = scheduler_of(max_step_tokens=30), Model()
    prompt = tuple(range(20))
    for key, num_run in ((0, 20), (1, 4), (2, 4)):
        scheduler.submit(Request(key=key, prompt=prompt, max_tokens=1))
        plan = scheduler.plan()
        assert plan.num_tokens == num_run
        (emission,) = commit(scheduler, plan, model.run(plan))
        assert emission.token == next_token(prompt)
    assert (scheduler.counts.sought, scheduler.counts.found) == (60, 32)


def test_a_broken_steps_plan_is_planned_again():
    scheduler, model = scheduler_of(), Model()
    scheduler.submit(Request(key=0, prompt=(1, 2, 3, 4, 5, 6), max_tokens=3))
    for _ in range(8):
        first = scheduler.plan()
        model.run(first)
        again = scheduler.plan()
        assert again == first
        commit(scheduler, again, model.run(again))
    assert scheduler.num_active == 0


def test_a_broken_steps_drafts_are_planned_again_although_more_requests_are_active():
    """They may have left NaN in the cache, which only rows at the same positions overwrite."""
    scheduler = scheduler_of(max_requests=2, num_drafts=2, max_drafting=1, max_step_tokens=4)
    model = Model(num_drafts=2)
    scheduler.submit(Request(key=0, prompt=(1, 2), max_tokens=9))
    commit(scheduler, scheduler.plan(), model.run(scheduler.plan()))
    (broken,) = scheduler.plan().chunks
    assert len(broken.drafts) == 2
    scheduler.submit(Request(key=1, prompt=(3,), max_tokens=9))
    plan = scheduler.plan()
    assert (plan.chunks[0], plan.num_tokens) == (broken, 4)
    commit(scheduler, plan, model.run(plan))
    assert not any(chunk.drafts for chunk in scheduler.plan().chunks)


@pytest.mark.parametrize("is_committed", [True, False])
def test_blocks_of_a_request_cancelled_in_a_step_are_free_after_it(is_committed):
    scheduler, model = scheduler_of(num_blocks=4, max_step_tokens=12), Model()
    scheduler.submit(Request(key=0, prompt=tuple(range(10)), max_tokens=2))
    plan = scheduler.plan()
    results = model.run(plan)
    assert scheduler.cancel(0)
    assert (scheduler.num_active, scheduler.blocks.num_used) == (0, 3)
    handed_over = Request(key=1, prompt=tuple(range(20, 29)), max_tokens=1, is_handed_over=True)
    scheduler.submit(handed_over)
    assert scheduler.begin_pull(1) is None
    if is_committed:
        assert commit(scheduler, plan, results) == []
    else:
        scheduler.plan()
    assert len(scheduler.begin_pull(1).blocks) == scheduler.blocks.num_used == 2


def test_blocks_of_a_faulty_request_are_suspect_even_if_it_was_cancelled_in_the_step():
    scheduler = scheduler_of()
    scheduler.submit(Request(key=0, prompt=tuple(range(10)), max_tokens=2))
    scheduler.commit(scheduler.plan(), [])
    scheduler.commit(scheduler.plan(), [sampled_token(3)])
    plan = scheduler.plan()
    (chunk,) = plan.chunks
    assert scheduler.cancel(0)
    assert scheduler.commit(plan, [SampledToken(token=0, logprob=0.0, fault="NaN")]) == []
    assert scheduler.blocks.num_used == scheduler.blocks.num_findable == 0
    scheduler.submit(Request(key=1, prompt=tuple(range(20, 30)), max_tokens=2))
    commit(scheduler, plan := scheduler.plan(), Model().run(plan))
    assert set(scheduler.blocks.take_to_clear()) == set(chunk.blocks[:2])


def test_a_prefix_from_which_one_request_failed_is_found_by_no_other():
    """Others that hold it fail, too, but the next one runs it anew."""
    scheduler, prefix = scheduler_of(max_requests=3, max_step_tokens=40), tuple(range(2 * BLOCK))
    model = Model()
    for key in range(2):
        scheduler.submit(Request(key=key, prompt=(*prefix, 40 + key), max_tokens=4))
    commit(scheduler, plan := scheduler.plan(), model.run(plan))
    commit(scheduler, plan := scheduler.plan(), model.run(plan))
    one, other = scheduler.plan().chunks
    assert one.blocks[:2] == other.blocks[:2]
    fault = SampledToken(token=0, logprob=0.0, fault="NaN")
    commit(scheduler, plan := scheduler.plan(), ([fault, sampled_token(3)], {}, []))
    scheduler.submit(Request(key=2, prompt=(*prefix, 42), max_tokens=1))
    _, newcomer = scheduler.plan().chunks
    assert newcomer.start == 0
    assert not set(newcomer.blocks) & set(other.blocks)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_blocks_of_a_prompt_that_was_cancelled_half_way_are_cleared_before_others_run(num_steps):
    scheduler = scheduler_of()
    scheduler.submit(Request(key=0, prompt=tuple(range(14)), max_tokens=2))
    for _ in range(num_steps):
        plan = scheduler.plan()
        scheduler.commit(plan, [])
    scheduler.cancel(0)
    scheduler.submit(Request(key=1, prompt=(40, 41), max_tokens=2))
    (chunk,) = scheduler.plan().chunks
    assert scheduler.blocks.take_to_clear() == list(chunk.blocks)


def test_no_request_ends_the_pull_of_an_older_one():
    scheduler = scheduler_of(num_blocks=10, max_step_tokens=40)
    for key in range(2):
        first = 100 * key
        prompt = tuple(range(first, first + 6 * BLOCK))
        scheduler.submit(Request(key=key, prompt=prompt, max_tokens=1, is_handed_over=key == 0))
    pull = scheduler.begin_pull(0)
    assert len(pull.missing) == 5
    assert scheduler.plan().chunks == ()
    assert scheduler.pulls.next_block(0, pull) is not None


def test_latents_that_may_be_wrong_are_used_by_no_further_request():
    scheduler, model = scheduler_of(num_blocks=12, max_step_tokens=40), Model()
    prompt = tuple(range(4 * BLOCK + 1))
    scheduler.submit(Request(key=0, prompt=prompt, max_tokens=1, hold_latents=True))
    (emission,) = commit(scheduler, plan := scheduler.plan(), model.run(plan))
    scheduler.submit(Request(key=1, prompt=(*prompt, 1, 2, 3), max_tokens=2))
    commit(scheduler, plan := scheduler.plan(), model.run(plan))
    scheduler.forget_latents()
    assert scheduler.blocks.num_findable == 0
    assert not scheduler.holds.end(emission.hold, HoldEnd.FETCHED)
    assert scheduler.num_active == 0
    plan = scheduler.plan()
    (chunk,) = plan.chunks
    assert (chunk.key, chunk.start, len(chunk.known)) == (1, 0, len(prompt) + 4)
    commit(scheduler, plan, model.run(plan))


def test_accepted_drafts_yield_several_tokens_per_step():
    scheduler = scheduler_of(num_drafts=2, max_step_tokens=6)
    model, steps = Model(num_drafts=2), []
    scheduler.submit(Request(key=0, prompt=(1, 2), max_tokens=8))
    while scheduler.num_active + scheduler.num_queued:
        plan = scheduler.plan()
        steps.append(len(commit(scheduler, plan, model.run(plan))))
    assert steps == [1, 3, 3, 1]
    assert (scheduler.counts.drafted, scheduler.counts.accepted) == (4, 4)
    assert scheduler.counts.processed == 2 + 7


def test_rejected_drafts_cost_no_token():
    scheduler = scheduler_of(num_drafts=1, max_step_tokens=4)
    model, request = Model(lambda: False, 1), Request(key=0, prompt=(1, 2), max_tokens=5)
    scheduler.submit(request)
    tokens = []
    while scheduler.num_active + scheduler.num_queued:
        plan = scheduler.plan()
        tokens += [one.token for one in commit(scheduler, plan, model.run(plan))]
    assert tokens == solo(request)
    assert (scheduler.counts.drafted, scheduler.counts.accepted) == (3, 0)
    assert scheduler.counts.processed == 2 + 4


def test_nothing_is_drafted_while_many_requests_are_active():
    scheduler = scheduler_of(
        max_requests=3, num_drafts=1, max_drafting=1, max_step_tokens=3, max_queued=0
    )
    model, requests = (
        Model(num_drafts=1),
        [Request(key=key, prompt=(key, 2), max_tokens=3 + 4 * key) for key in range(3)],
    )
    tokens, guessed = {key: [] for key in range(3)}, []
    for one in requests:
        scheduler.submit(one)
    while scheduler.num_active + scheduler.num_queued:
        plan = scheduler.plan()
        assert plan.num_tokens <= 3
        guessed.append((len(plan.chunks), plan.drafts, sum(len(c.drafts) for c in plan.chunks)))
        sampled, drafts, _ = model.run(plan)
        for one in scheduler.commit(plan, sampled, drafts if plan.drafts else {}):
            tokens[one.key].append(one.token)
    assert tokens == {one.key: solo(one) for one in requests}
    assert all(drafts == (num_active == 1) for num_active, drafts, _ in guessed)
    assert max(num for num_active, _, num in guessed if num_active > 1) == 0
    assert scheduler.counts.accepted > 0


def test_generating_requests_run_in_every_step_during_a_long_prefill():
    scheduler = scheduler_of(max_requests=2, max_queued=2, max_step_tokens=4)
    scheduler.submit(Request(key=0, prompt=(1,), max_tokens=20))
    scheduler.commit(scheduler.plan(), [sampled_token(7)])
    scheduler.submit(Request(key=1, prompt=tuple(range(9)), max_tokens=2))
    for expected in (3, 3, 3):
        plan = scheduler.plan()
        assert [(chunk.key, len(chunk.tokens)) for chunk in plan.chunks] == [(0, 1), (1, expected)]
        scheduler.commit(
            plan, [sampled_token(7)] * sum(bool(chunk.sampling) for chunk in plan.chunks)
        )


def test_a_full_queue_rejects_until_a_request_leaves():
    scheduler = scheduler_of(max_requests=1, max_queued=1, max_step_tokens=1)
    for key in range(2):
        scheduler.submit(Request(key=key, prompt=(1,), max_tokens=1))
    with pytest.raises(QueueFullError, match="limit"):
        scheduler.submit(Request(key=2, prompt=(1,), max_tokens=1))
    scheduler.commit(scheduler.plan(), [sampled_token(3)])
    scheduler.submit(Request(key=2, prompt=(1,), max_tokens=1))
    assert scheduler.num_queued == 2


def test_sampling_rows_separate_prompt_from_output_also_after_a_replay():
    scheduler = scheduler_of(max_requests=2, max_queued=0, max_step_tokens=9)
    params = SamplingParams(seed=5, repetition_penalty=1.1)
    whole = Request(key=0, prompt=(1, 2, 3), max_tokens=4, sampling=params)
    rest = Request(key=1, prompt=(1, 2, 3, 4), max_tokens=3, sampling=params, num_replayed=1)
    scheduler.submit(whole)
    first = scheduler.plan()
    ((row,),) = (chunk.sampling for chunk in first.chunks)
    assert (row.position, counted(row)) == (3, {})
    scheduler.commit(first, [sampled_token(4)])
    scheduler.submit(rest)
    rows = [chunk.sampling[0] for chunk in scheduler.plan().chunks]
    assert len(rows) == 2
    assert rows[0].counts is row.counts, "counted once"
    for one in rows:
        assert (one.position, counted(one)) == (4, {4: 1})
        assert one.counts.in_prompt.tolist() == [False, True, True, True]


def counted(row):
    """The output's tokens and drafts as penalties count them."""
    counts = Counter()
    for token, number in row.counts.in_output(row.drafts).T.tolist():
        counts[token] += number
    return counts


def test_penalties_count_each_token_once_and_drafts_only_where_they_stand():
    params = SamplingParams(frequency_penalty=0.5)
    request = Request(key=0, prompt=(1, 2, 3), max_tokens=9, sampling=params)
    scheduler = scheduler_of(max_requests=1, num_drafts=2)
    scheduler.submit(request)
    scheduler.commit(scheduler.plan(), [sampled_token(4)], {0: (5, 4)})
    plan = scheduler.plan()
    rows = plan.chunks[0].sampling
    assert [counted(row) for row in rows] == [{4: 1}, {4: 1, 5: 1}, {4: 2, 5: 1}]
    assert rows[0].counts.in_prompt.size == 0, "these penalties do not read the prompt"
    scheduler.commit(plan, [sampled_token(token) for token in (5, 7, 8)])
    (chunk,) = scheduler.plan().chunks
    assert [counted(row) for row in chunk.sampling] == [{4: 1, 5: 1, 7: 1}]


class AnyText:
    """A constraint that accepts everything."""

    def accept(self, _):
        return True


def test_where_a_grammar_allows_no_token_behind_a_draft_the_next_step_decides():
    scheduler = scheduler_of(max_requests=1, num_drafts=2)
    scheduler.submit(Request(key=0, prompt=(1, 2, 3), max_tokens=9, constraint=AnyText()))
    scheduler.commit(scheduler.plan(), [sampled_token(4)], {0: (5, 6)})
    nothing = SampledToken(token=0, logprob=0.0, fault="no token is allowed")
    emitted = scheduler.commit(scheduler.plan(), [sampled_token(5), nothing, nothing])
    assert [(one.token, one.sampled.fault) for one in emitted] == [(5, "")]
    plan = scheduler.plan()
    assert [(chunk.known, chunk.drafts) for chunk in plan.chunks] == [((5,), ())]
    (emission,) = scheduler.commit(plan, [nothing])
    assert emission.sampled.fault


def test_what_is_left_to_prefill_shrinks_with_each_step_and_counts_what_waits():
    scheduler = scheduler_of(max_requests=1, max_step_tokens=5, num_blocks=20)
    model = Model()
    scheduler.submit(Request(key=1, prompt=tuple(range(12)), max_tokens=2))
    scheduler.submit(Request(key=2, prompt=tuple(range(20, 26)), max_tokens=1))
    # Another pool has prefilled all but what is behind the last full block, and the last token.
    scheduler.submit(Request(key=3, prompt=(1,) * 9, max_tokens=1, is_handed_over=True))
    waiting = PrefillWork(tokens=6 + 1, pairs=6 * 6 // 2 + 8)
    found = []
    for _ in range(4):
        found.append(scheduler.prefill_work())
        plan = scheduler.plan()
        commit(scheduler, plan, model.run(plan))
    assert found == [
        PrefillWork(tokens=waiting.tokens + 12, pairs=waiting.pairs + 12 * 12 // 2),
        PrefillWork(tokens=waiting.tokens + 7, pairs=waiting.pairs + 7 * 5 + 7 * 7 // 2),
        PrefillWork(tokens=waiting.tokens + 2, pairs=waiting.pairs + 2 * 10 + 2 * 2 // 2),
        waiting,
    ]


def test_what_was_not_fetched_of_a_prompt_is_left_to_prefill():
    scheduler, model = scheduler_of(max_requests=1, num_blocks=20), Model()
    scheduler.submit(Request(key=1, prompt=tuple(range(4)), max_tokens=3))
    plan = scheduler.plan()
    commit(scheduler, plan, model.run(plan))

    def left():
        return scheduler.prefill_work().tokens

    scheduler.submit(Request(key=2, prompt=tuple(range(10, 19)), max_tokens=1, is_handed_over=True))
    assert left() == 1
    scheduler.end_pull(2)
    assert left() == 9, "nothing was fetched"
    scheduler.submit(Request(key=3, prompt=tuple(range(30, 39)), max_tokens=1, is_handed_over=True))
    scheduler.pulls.publish(scheduler.begin_pull(3))
    scheduler.end_pull(3)
    assert left() == 9 + 5, "one block of two was fetched"


def test_a_preempted_request_has_to_prefill_its_tokens_again_wherever_they_came_from():
    scheduler, model = scheduler_of(num_blocks=6, max_step_tokens=20), Model()
    scheduler.submit(Request(key=1, prompt=tuple(range(8)), max_tokens=16))
    scheduler.submit(Request(key=2, prompt=tuple(range(20, 28)), max_tokens=9, is_handed_over=True))
    scheduler.end_pull(2)
    while not scheduler.counts.preempted:
        plan = scheduler.plan()
        commit(scheduler, plan, model.run(plan))
    assert scheduler.num_queued == 1
    assert scheduler.prefill_work().tokens > 8
