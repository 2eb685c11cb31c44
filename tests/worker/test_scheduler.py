"""Scheduling loses no request, keeps its budget, and is fair."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.worker.errors import QueueFullError
from equipoise.worker.scheduler import FinishReason, Request, Scheduler
from equipoise_model.sampling_params import SampledToken, SamplingParams


def next_token(tokens):
    """A stand-in for the model: the next token is a function of all tokens before it."""
    return (sum(tokens) * 31 + len(tokens)) % 50


def told(token):
    return SampledToken(token=token, logprob=-1.0)


class Model:
    """Keeps a cache as the model does, so that a wrong row, place or order is noticed."""

    def __init__(self):
        self.rows = {}

    def run(self, plan):
        sampled = []
        for chunk in plan.chunks:
            row = self.rows.setdefault(chunk.row, [])
            del row[chunk.start :]
            assert len(row) == chunk.start
            row.extend(chunk.tokens)
            if chunk.samples:
                sampled.append(told(next_token(row)))
        return sampled


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
        )
        for key in range(draw(st.integers(1, max_size)))
    ]


@settings(deadline=None)
@given(requests(), st.integers(1, 4), st.integers(0, 8), st.data())
def test_every_request_gets_its_solo_tokens_within_the_budget(offered, rows, spare, data):
    scheduler = Scheduler(max_requests=rows, max_queued=20, max_step_tokens=rows + spare)
    model, got, finished = Model(), {one.key: [] for one in offered}, {}
    waiting = list(offered)
    arrivals = data.draw(st.lists(st.integers(0, 3), max_size=20))
    while len(finished) < len(offered):
        for _ in range(arrivals.pop() if arrivals else len(waiting)):
            if waiting:
                scheduler.submit(waiting.pop(0))
        plan = scheduler.plan()
        assert plan.num_tokens <= rows + spare
        assert len({chunk.row for chunk in plan.chunks}) == len(plan.chunks)
        assert plan.num_tokens > 0 or scheduler.num_active == 0
        for emission in scheduler.commit(plan, model.run(plan)):
            assert emission.key not in finished
            got[emission.key].append(emission.token)
            if emission.finish is not None:
                finished[emission.key] = emission.finish
    for request in offered:
        assert got[request.key] == solo(request)
        stopped = got[request.key][-1] in request.stop_tokens
        assert finished[request.key] == (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert scheduler.num_active == scheduler.num_queued == 0


@settings(deadline=None)
@given(requests(max_size=8), st.data())
def test_a_cancel_at_any_moment_harms_nobody_else(offered, data):
    scheduler = Scheduler(max_requests=2, max_queued=20, max_step_tokens=5)
    model, got, cancelled = Model(), {one.key: [] for one in offered}, set()
    for request in offered:
        scheduler.submit(request)
    while scheduler.num_active + scheduler.num_queued:
        plan = scheduler.plan()
        sampled = model.run(plan)
        victim = data.draw(st.integers(-10, len(offered) - 1))
        if victim >= 0 and scheduler.cancel(victim):
            cancelled.add(victim)
        for emission in scheduler.commit(plan, sampled):
            got[emission.key].append(emission.token)
    for request in offered:
        tokens = solo(request)
        if request.key in cancelled:
            assert got[request.key] == tokens[: len(got[request.key])]
        else:
            assert got[request.key] == tokens


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(6, 30))
def test_first_tokens_come_in_the_order_of_arrival_when_prompts_are_equal(rows, count):
    scheduler = Scheduler(max_requests=rows, max_queued=count, max_step_tokens=rows + 2)
    model, order = Model(), []
    for key in range(count):
        scheduler.submit(Request(key=key, prompt=(1, 2, 3, 4, 5), max_tokens=3))
    while scheduler.num_active + scheduler.num_queued:
        plan = scheduler.plan()
        for emission in scheduler.commit(plan, model.run(plan)):
            if emission.key not in order:
                order.append(emission.key)
    assert order == list(range(count))


def test_generating_requests_run_in_every_step_while_a_long_prompt_is_read():
    scheduler = Scheduler(max_requests=2, max_queued=2, max_step_tokens=4)
    scheduler.submit(Request(key=0, prompt=(1,), max_tokens=20))
    scheduler.commit(scheduler.plan(), [told(7)])
    scheduler.submit(Request(key=1, prompt=tuple(range(9)), max_tokens=2))
    for expected in (3, 3, 3):
        plan = scheduler.plan()
        assert [(chunk.key, len(chunk.tokens)) for chunk in plan.chunks] == [(0, 1), (1, expected)]
        scheduler.commit(plan, [told(7)] * sum(chunk.samples for chunk in plan.chunks))


def test_a_full_line_refuses_and_takes_again_when_somebody_leaves():
    scheduler = Scheduler(max_requests=1, max_queued=1, max_step_tokens=1)
    for key in range(2):
        scheduler.submit(Request(key=key, prompt=(1,), max_tokens=1))
    with pytest.raises(QueueFullError, match="bound"):
        scheduler.submit(Request(key=2, prompt=(1,), max_tokens=1))
    scheduler.commit(scheduler.plan(), [told(3)])
    scheduler.submit(Request(key=2, prompt=(1,), max_tokens=1))
    assert scheduler.num_queued == 2


def test_clearing_names_everybody_and_frees_all_rows():
    scheduler = Scheduler(max_requests=1, max_queued=2, max_step_tokens=1)
    for key in range(3):
        scheduler.submit(Request(key=key, prompt=(1,), max_tokens=1))
    scheduler.plan()
    assert sorted(scheduler.clear()) == [0, 1, 2]
    assert scheduler.plan().num_tokens == 0
    assert scheduler.num_active == scheduler.num_queued == 0


def test_rows_to_sample_tell_output_from_prompt_also_where_another_rank_made_it():
    scheduler = Scheduler(max_requests=2, max_queued=0, max_step_tokens=9)
    params = SamplingParams(seed=5)
    whole = Request(key=0, prompt=(1, 2, 3), max_tokens=4, sampling=params)
    rest = Request(key=1, prompt=(1, 2, 3, 4), max_tokens=3, sampling=params, num_replayed=1)
    scheduler.submit(whole)
    first = scheduler.plan()
    assert [list(chunk.sampling.output) for chunk in first.chunks] == [[]]
    scheduler.commit(first, [told(4)])
    scheduler.submit(rest)
    goes_on, replayed = (chunk.sampling for chunk in scheduler.plan().chunks)
    assert goes_on == replayed
    assert (list(replayed.prompt), list(replayed.output)) == ([1, 2, 3], [4])
