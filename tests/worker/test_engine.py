"""The step loop of a single rank makes the tokens of a solo run, whatever else happens."""

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.distributed import DistBackendError

from equipoise.planning.ratio import RankUse, use_between
from equipoise.rank.errors import GroupError
from equipoise.rank.header import HEADER_WIDTH, Leaving, StepHeader
from equipoise.wire.inference_messages import Blame, FinishReason
from equipoise.worker.engine import (
    IDLE_WAIT_S,
    LONG_IDLE_TURNS,
    LONG_IDLE_WAIT_S,
    idle_wait_s,
)
from equipoise.worker.errors import QueueFullError, StepError
from equipoise.worker.placement import placement_of
from equipoise.worker.prefill_cost import PrefillCostFit
from equipoise.worker.sequence import Request
from equipoise.worker.step_inputs import draft_tokens
from equipoise_model.dispatch import ExpertParallel
from tests.support.lone_engine import PROMPTS, Client, engine_of, leave_when_done, request


def test_many_requests_at_once_get_their_solo_tokens(rank_of_one, solo):
    client = Client(leave_when_done(len(PROMPTS)))
    engine = engine_of(*rank_of_one(), client)
    for key in range(len(PROMPTS)):
        engine.submit(request(key, max_tokens=10 + key))
    engine.run()
    for key, prompt in enumerate(PROMPTS):
        assert client.tokens[key] == solo(prompt, 10 + key)
        assert client.finished[key] is FinishReason.LENGTH
    assert len({tuple(tokens) for tokens in client.tokens.values()}) == len(PROMPTS)


def test_steps_that_are_cut_make_the_same_tokens_and_loads(rank_of_one, solo, monkeypatch):
    cuts = []
    cut = ExpertParallel.agree

    def agree(experts, rows, **how):
        cuts.append(rows)
        cut(experts, rows, **how)

    monkeypatch.setattr(ExpertParallel, "agree", agree)
    loads = {}
    for cut_from_tokens in (0, 3):
        client = Client(leave_when_done(len(PROMPTS)))
        engine = engine_of(*rank_of_one(), client, cut_from_tokens=cut_from_tokens)
        for key in range(len(PROMPTS)):
            engine.submit(request(key, max_tokens=10 + key))
        engine.run()
        for key, prompt in enumerate(PROMPTS):
            assert client.tokens[key] == solo(prompt, 10 + key)
        loads[cut_from_tokens] = engine.progress().loads[0].slot_load_LS
        assert {len(rows) for rows in cuts if sum(map(sum, rows)) < 3} == {1}
        assert {len(rows) for rows in cuts if sum(map(sum, rows)) >= 3} == {
            2 if cut_from_tokens else 1
        }
        cuts.clear()
    assert (loads[0] == loads[3]).all()


def test_requests_that_are_paused_for_want_of_blocks_lose_nothing(rank_of_one, solo):
    client = Client(leave_when_done(len(PROMPTS)))
    engine = engine_of(*rank_of_one(cache_tokens=96), client)
    for key in range(len(PROMPTS)):
        engine.submit(request(key, max_tokens=40))
    engine.run()
    assert client.tokens == {key: solo(prompt, 40) for key, prompt in enumerate(PROMPTS)}
    stats = engine.progress().stats
    assert stats.requests_preempted > 0
    assert (stats.cache_tokens, stats.cache_tokens_used) == (96, 0)


def test_prefix_caching_works_across_a_switch(
    rank_of_one, staged_from_checkpoint, random_layout, solo
):
    core, held = rank_of_one()
    prompt = tuple(range(40))

    def then(engine, result):
        if result.switch is None and engine.generation == 1:
            engine.offer(staged_from_checkpoint(core, held.contents.layout, random_layout(2)))
        elif 0 in client.finished and result.switch is None and 1 not in client.tokens:
            engine.submit(Request(key=1, prompt=(*prompt, 3), max_tokens=9))
        elif 1 in client.finished:
            engine.leave()

    client = Client(then)
    engine = engine_of(core, held, client)
    engine.submit(Request(key=0, prompt=prompt, max_tokens=9))
    engine.run()
    assert client.tokens == {0: solo(prompt, 9), 1: solo((*prompt, 3), 9)}
    assert client.generations[1] == {2}
    assert engine.progress().stats.prefix_tokens_found == 32


def test_a_stop_token_ends_a_request_and_is_its_last_token(rank_of_one, solo):
    expected = solo(PROMPTS[5], 20)
    stop = expected[4]
    client = Client(leave_when_done(1))
    engine = engine_of(*rank_of_one(), client)
    engine.submit(request(5, stop_tokens=frozenset({stop})))
    engine.run()
    assert client.tokens[5] == expected[: expected.index(stop) + 1]
    assert client.finished[5] is FinishReason.STOP


def test_cancelled_requests_free_their_rows_for_others(rank_of_one, solo):
    def then(engine, result):
        if result.step == 3:
            for key in range(4):
                engine.cancel(key)
        if 8 in client.finished:
            engine.leave()

    client = Client(then)
    engine = engine_of(*rank_of_one(), client)
    for key in (0, 1, 2, 3, 8):
        engine.submit(request(key, max_tokens=60))
    engine.run()
    assert client.tokens[8] == solo(PROMPTS[8], 60)
    assert all(len(client.tokens.get(key, [])) <= 3 for key in range(4))


def test_a_full_queue_is_an_error_for_the_caller(rank_of_one):
    engine = engine_of(*rank_of_one(), Client(), max_queued=1)
    for key in range(5):
        engine.submit(request(key))
    with pytest.raises(QueueFullError):
        engine.submit(request(5))


def test_counters_have_every_assignment_of_every_token_once(
    rank_of_one, staged_from_checkpoint, random_layout
):
    core, held = rank_of_one()

    def then(engine, result):
        if result.step == 5 and engine.generation == 1:
            engine.offer(staged_from_checkpoint(core, held.contents.layout, random_layout(2)))
        if len(client.finished) == 2:
            engine.leave()

    client = Client(then)
    engine = engine_of(core, held, client)
    engine.submit(request(4))
    engine.submit(request(7))
    engine.run()
    progress = engine.progress()
    now, before = progress.loads
    assert (now.generation, before.generation) == (2, 1)
    tokens = sum(len(PROMPTS[key]) + 20 - 1 for key in (4, 7))
    assert progress.stats.tokens_processed == tokens
    assert progress.stats.tokens_generated == 40
    assert progress.stats.steps == client.results[-1].step
    assert progress.stats.median_step_us > 0
    np.testing.assert_array_equal((now.slot_load_LS + before.slot_load_LS).sum(axis=1), tokens * 2)
    assert now.slot_load_LS.sum() > 0
    assert before.slot_load_LS.sum() > 0
    assert engine.progress().stats.median_step_us == 0


def test_a_request_wakes_an_idle_engine_on_its_thread(rank_of_one, solo):
    done = threading.Event()
    client = Client(lambda engine, result: done.set() if client.finished else None)
    engine = engine_of(*rank_of_one(), client)
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        engine.submit(request(6, max_tokens=5))
        assert done.wait(60)
        assert client.tokens[6] == solo(PROMPTS[6], 5)
    finally:
        engine.leave()
        thread.join(60)
    assert not thread.is_alive()


def test_an_idle_rank_looks_for_work_less_often_with_time():
    waits = [idle_wait_s(num_idle) for num_idle in (1, LONG_IDLE_TURNS, LONG_IDLE_TURNS + 1)]
    assert waits == [IDLE_WAIT_S, IDLE_WAIT_S, LONG_IDLE_WAIT_S]


@pytest.mark.parametrize(
    ("fault", "ends_with", "words"),
    [
        (DistBackendError("NCCL communicator was aborted"), GroupError, "a peer rank failed"),
        (torch.OutOfMemoryError("no 2 GiB left"), StepError, "step 1 .*: no 2 GiB left"),
        (RuntimeError("shapes differ"), StepError, "step 1 .*: shapes differ"),
    ],
)
def test_a_device_error_late_in_a_step_ends_the_group_or_the_rank(
    rank_of_one, monkeypatch, fault, ends_with, words
):
    client = Client()
    core, held = rank_of_one()
    experts = ExpertParallel.local(core.checkpoint.config, placement_of(held.contents.layout))
    engine = engine_of(core, held, client, experts=experts)
    engine.submit(request(3))

    def fail():
        raise fault

    monkeypatch.setattr(experts, "loads", fail)
    with pytest.raises(ends_with, match=words) as ended:
        engine.run()
    assert type(ended.value) is ends_with
    if ends_with is StepError:
        assert (ended.value.keys, ended.value.blame) == ((3,), Blame.REQUEST)
    assert not client.tokens


def test_a_request_without_finite_logits_fails_alone_and_leaves_no_nan_behind(rank_of_one, solo):
    """Token 7 has a damaged embedding: only the request with it in its prompt is hit."""
    core, held = rank_of_one()
    core.model.embed_tokens.weight.data[7] = float("nan")
    client = Client(leave_when_done(2))
    engine = engine_of(core, held, client)
    bad = Request(key=1, prompt=(7, 1, 2) * 7, max_tokens=4)
    good = Request(key=2, prompt=PROMPTS[3], max_tokens=4)
    assert 7 not in (*good.prompt, *solo(good.prompt, 4))
    engine.submit(bad)
    engine.submit(good)
    engine.run()
    assert client.finished == {1: None, 2: FinishReason.LENGTH}
    assert client.tokens[2] == solo(good.prompt, 4)
    assert engine.progress().stats.tokens_generated == 4


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_no_request_pays_for_what_an_earlier_one_left_in_its_blocks(
    rank_of_one, solo, is_cancelled
):
    """The first has NaN in every block of the cache, and fails or is cancelled half-way."""
    core, held = rank_of_one(cache_tokens=96, max_step_tokens=12)

    def then(engine, result):
        if result.emissions and 1 in client.finished and 2 not in client.tokens:
            engine.submit(Request(key=2, prompt=PROMPTS[3], max_tokens=4))
        if 2 in client.finished:
            engine.leave()

    client = Client(then)
    engine = engine_of(core, held, client)
    core.model.embed_tokens.weight.data[7] = float("nan")
    engine.submit(Request(key=1, prompt=(7, 1, 2) * 30, max_tokens=4))
    if is_cancelled:
        engine._turn()
        assert core.cache._stores[0].isnan().any()
        engine.cancel(1)
        engine.submit(Request(key=2, prompt=PROMPTS[3], max_tokens=4))
    engine.run()
    assert client.finished[2] is FinishReason.LENGTH
    assert client.tokens[2] == solo(PROMPTS[3], 4)


@pytest.mark.parametrize("why", [Leaving.IN_ORDER, Leaving.DAMAGED])
def test_latents_that_were_computed_with_wrong_experts_are_not_found_again(rank_of_one, why):
    client = Client(lambda engine, result: client.finished and engine.leave(why))
    engine = engine_of(*rank_of_one(), client)
    engine.submit(Request(key=0, prompt=tuple(range(40)), max_tokens=2))
    engine.run()
    assert (engine._scheduler.blocks.num_findable == 0) == (why is Leaving.DAMAGED)


def test_a_draft_module_runs_if_any_rank_drafts_on_the_rows_of_those_that_do():
    blank = StepHeader(*[0] * HEADER_WIDTH)
    busy, drafting, deeper = (
        blank._replace(num_tokens=n, num_drafts=depth) for n, depth in ((9, 0), (2, 1), (3, 2))
    )
    assert draft_tokens((blank, busy)) == []
    assert draft_tokens((drafting, busy, blank)) == [[2, 0, 0]]
    assert draft_tokens((busy, deeper, drafting)) == [[0, 3, 2], [0, 3, 0]]


def test_a_report_shows_what_is_left_to_prefill_and_what_prefill_costs(rank_of_one):
    core, held = rank_of_one()
    costs = PrefillCostFit()
    client = Client(leave_when_done(len(PROMPTS)))
    engine = engine_of(core, held, client, prefill_cost=costs)
    for key in range(len(PROMPTS)):
        engine.submit(request(key))
    before = engine.progress().stats
    assert before.max_requests == 4
    assert before.pending_prompt_tokens == sum(map(len, PROMPTS))
    assert before.pending_prompt_pairs == sum(len(one) ** 2 // 2 for one in PROMPTS)
    assert before.parity_tokens == core.checkpoint.config.attention_parity_tokens
    engine.run()
    after = engine.progress().stats
    assert (after.pending_prompt_tokens, after.pending_prompt_pairs) == (0, 0)
    assert 0 < costs.num_steps < after.steps, "only steps that prefill prompts count"


def test_reports_show_that_a_rank_with_prompts_is_busy(rank_of_one):
    """A rank processes as many tokens as its pending prompts lose: advice relies on it."""
    core, held = rank_of_one()
    leave, seen = leave_when_done(len(PROMPTS)), []

    def then(engine, result):
        seen.append(engine.progress().stats)
        leave(engine, result)

    engine = engine_of(core, held, Client(then))
    for key in range(len(PROMPTS)):
        engine.submit(request(key, max_tokens=1))
    seen.append(engine.progress().stats)
    engine.run()
    uses = [
        use_between(
            *(
                RankUse(
                    time_s=time_s,
                    boot_id="a",
                    processed=stats.tokens_processed,
                    cached=stats.prefix_tokens_found,
                    pending=stats.pending_prompt_tokens,
                    slots=0.0,
                    cache=0.0,
                )
                for time_s, stats in enumerate(pair)
            )
        )
        for pair in pairwise(seen)
    ]
    assert [one.tokens for one in uses] == [-one.pending_growth for one in uses]
    assert sum(one.tokens for one in uses) == sum(map(len, PROMPTS))
    busy = [one for one in uses if one.full_s]
    assert len(busy) == len([one for one in uses if one.tokens]) - 1, "all but the last step"
