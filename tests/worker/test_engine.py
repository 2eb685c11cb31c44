"""The step loop of a rank alone: the tokens of a solo run, whatever happens meanwhile."""

import threading

import numpy as np
import pytest
import torch
from torch.distributed import DistBackendError

from equipoise.worker.applier import placement_of
from equipoise.worker.engine import IDLE_WAIT_S, LONG_IDLE_WAIT_S, Engine
from equipoise.worker.errors import GroupError, QueueFullError, WorkerError
from equipoise.worker.group import RankGroup
from equipoise.worker.header import StepHeader
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.sequence import FinishReason, Request
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.drafting import Drafter

PROMPTS = [tuple(int(t) for t in np.random.default_rng(n).integers(0, 64, n)) for n in range(1, 10)]


class Client:
    """Collects what an engine publishes, and acts behind every step on the engine's thread."""

    def __init__(self, then=lambda engine, result: None):
        self.tokens = {}
        self.finished = {}
        self.generations = {}
        self.switches = []
        self.results = []
        self.then = then
        self.engine = None

    def __call__(self, result):
        self.results.append(result)
        if result.switch:
            self.switches.append(result.switch)
        for emission in result.emissions:
            self.tokens.setdefault(emission.key, []).append(emission.token)
            self.generations.setdefault(emission.key, set()).add(result.generation)
            if emission.finish:
                self.finished[emission.key] = emission.finish
        self.then(self.engine, result)


def engine_of(core, held, client, *, group=None, max_queued=32, max_step_tokens=12, num_drafts=0):
    engine = Engine(
        model=core.model,
        cache=core.cache,
        experts=ExpertParallel.local(core.checkpoint.config, placement_of(held.contents.layout)),
        held=held,
        group=group or RankGroup.alone(),
        scheduler=Scheduler(
            blocks=core.block_pool(),
            max_requests=4,
            max_queued=max_queued,
            max_step_tokens=max_step_tokens,
            num_drafts=num_drafts,
        ),
        epoch=1,
        names=("worker-0",),
        publish=client,
        drafter=Drafter(core.model, num_drafts=num_drafts) if num_drafts else None,
    )
    client.engine = engine
    return engine


def request(key, max_tokens=20, **changes):
    return Request(key=key, prompt=PROMPTS[key], max_tokens=max_tokens, **changes)


def leave_when_done(count):
    def then(engine, result):
        if len(engine._publish.finished) == count:
            engine.leave()

    return then


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


def test_requests_that_are_paused_for_want_of_blocks_lose_nothing(rank_of_one, solo):
    client = Client(leave_when_done(len(PROMPTS)))
    engine = engine_of(*rank_of_one(cache_tokens=96), client)
    for key in range(len(PROMPTS)):
        engine.submit(request(key, max_tokens=40))
    engine.run()
    assert client.tokens == {key: solo(prompt, 40) for key, prompt in enumerate(PROMPTS)}
    stats = engine.progress().stats
    assert stats.requests_paused > 0
    assert (stats.cache_tokens, stats.cache_tokens_used) == (96, 0)


def test_a_request_that_begins_like_a_past_one_finds_its_latents_after_a_switch_too(
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


def test_switching_in_every_other_step_changes_no_token(
    rank_of_one, staged_from_checkpoint, random_layout, solo
):
    core, held = rank_of_one()

    def then(engine, result):
        if len(client.finished) == len(PROMPTS):
            engine.leave()
        elif result.switch is None:
            layout = random_layout(engine.generation + 1)
            assert engine.offer(staged_from_checkpoint(core, held.contents.layout, layout))

    client = Client(then)
    engine = engine_of(core, held, client)
    for key in range(len(PROMPTS)):
        engine.submit(request(key))
    engine.run()
    for key, prompt in enumerate(PROMPTS):
        assert client.tokens[key] == solo(prompt, 20)
    assert len(client.switches) >= 10
    assert max(len(generations) for generations in client.generations.values()) >= 5
    assert held.contents.layout.generation == client.switches[-1].generation


def test_every_switch_names_the_first_step_that_used_it(
    rank_of_one, staged_from_checkpoint, random_layout
):
    core, held = rank_of_one()

    def then(engine, result):
        if len(client.finished) == 1:
            engine.leave()
        elif result.step % 3 == 0:
            engine.offer(
                staged_from_checkpoint(
                    core, held.contents.layout, random_layout(engine.generation + 1)
                )
            )

    client = Client(then)
    engine = engine_of(core, held, client)
    engine.submit(request(3))
    engine.run()
    log = dict(engine.step_log)
    assert client.switches
    for switch in client.switches:
        assert log[switch.step] == switch.generation
        assert log[switch.step - 1] == switch.generation - 1
        assert switch.median_step_us > 0
    for result in client.results:
        assert log[result.step] == result.generation


def test_an_idle_rank_switches_too(rank_of_one, staged_from_checkpoint, random_layout):
    core, held = rank_of_one()
    client = Client(lambda engine, result: engine.leave())
    engine = engine_of(core, held, client)
    layout = random_layout(2)
    engine.offer(staged_from_checkpoint(core, held.contents.layout, layout))
    engine.run()
    assert engine.generation == 2
    assert engine.staged_generation == 0
    assert client.switches[0].step == 1
    expert = int(layout.expert_of_slot[1, 0])
    payload = held.read(layer=1, expert=expert)
    assert payload.equal(core.checkpoint.read_expert(1, expert))


def test_an_offer_from_a_generation_that_is_gone_is_not_taken(
    rank_of_one, staged_from_checkpoint, random_layout
):
    core, held = rank_of_one()
    engine = engine_of(core, held, Client())
    elsewhere = random_layout(3)
    assert not engine.offer(staged_from_checkpoint(core, elsewhere, random_layout(4)))
    assert engine.staged_generation == 0


def test_a_dropped_generation_is_not_switched_to(
    rank_of_one, staged_from_checkpoint, random_layout
):
    core, held = rank_of_one()
    client = Client(leave_when_done(1))
    engine = engine_of(core, held, client)
    engine.offer(staged_from_checkpoint(core, held.contents.layout, random_layout(2)))
    engine.drop(3)
    assert engine.staged_generation == 2
    engine.drop(2)
    engine.submit(request(2))
    engine.run()
    assert {generation for _, generation in engine.step_log} == {1}


class TwoRanks(RankGroup):
    """This rank's headers, and those that a script makes of them for a second rank."""

    def __init__(self, script):
        super().__init__(rank=0, num_ranks=1)
        self.script = script

    def exchange(self, header):
        return (header, self.script(header))


def test_a_generation_dropped_behind_the_deciding_header_is_switched_to_all_the_same(
    rank_of_one, staged_from_checkpoint, random_layout
):
    core, held = rank_of_one()

    def script(header):
        if header.staged_generation:
            client.engine.drop(2)
        return header

    client = Client(lambda engine, result: engine.leave())
    engine = engine_of(core, held, client, group=TwoRanks(script))
    engine.offer(staged_from_checkpoint(core, held.contents.layout, random_layout(2)))
    engine.run()
    assert engine.generation == 2


def test_the_switch_waits_for_the_last_rank(rank_of_one, staged_from_checkpoint, random_layout):
    core, held = rank_of_one()
    steps = []

    def script(header):
        steps.append(header.generation)
        ready = len(steps) >= 5
        return StepHeader(
            1, header.step, 0, header.generation, header.staged_generation if ready else 0, 0
        )

    client = Client(lambda engine, result: engine.leave())
    engine = engine_of(core, held, client, group=TwoRanks(script))
    engine.offer(staged_from_checkpoint(core, held.contents.layout, random_layout(2)))
    engine.run()
    assert steps[:6] == [1, 1, 1, 1, 1, 2]


def test_ranks_that_disagree_end_the_run(rank_of_one):
    core, held = rank_of_one()
    group = TwoRanks(lambda header: StepHeader(1, header.step + 1, 0, 1, 0, 0))
    engine = engine_of(core, held, Client(), group=group)
    engine._names = ("a", "b")
    with pytest.raises(GroupError, match="disagree about the step"):
        engine.run()


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


def test_a_full_line_is_an_error_for_who_asks(rank_of_one):
    engine = engine_of(*rank_of_one(), Client(), max_queued=1)
    for key in range(5):
        engine.submit(request(key))
    with pytest.raises(QueueFullError):
        engine.submit(request(5))


def test_counters_have_every_choice_of_every_token_once(
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
    assert progress.stats.steps == len(engine.step_log)
    assert progress.stats.median_step_us > 0
    np.testing.assert_array_equal((now.rows_LS + before.rows_LS).sum(axis=1), tokens * 2)
    assert now.rows_LS.sum() > 0
    assert before.rows_LS.sum() > 0
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


def test_an_idle_rank_looks_for_work_less_often_with_time_and_at_once_for_its_own(rank_of_one):
    waits = []

    class Wake(threading.Event):
        def wait(self, timeout=None):
            waits.append(timeout)
            if len(waits) == 150:
                engine.submit(request(1, max_tokens=2))
            elif len(waits) == 151:
                engine.leave()
            return super().wait(0)

    engine = engine_of(*rank_of_one(), Client())
    engine._wake = Wake()
    engine.run()
    assert waits == [IDLE_WAIT_S] * 100 + [LONG_IDLE_WAIT_S] * 50 + [IDLE_WAIT_S]


@pytest.mark.parametrize(
    ("fault", "ends_with", "words"),
    [
        (DistBackendError("NCCL communicator was aborted"), GroupError, "a peer rank failed"),
        (torch.OutOfMemoryError("no 2 GiB are left"), WorkerError, "step 1: no 2 GiB are left"),
        (RuntimeError("shapes differ"), RuntimeError, "^shapes differ$"),
    ],
)
def test_a_device_that_fails_late_in_a_step_is_the_groups_or_the_ranks_end(
    rank_of_one, monkeypatch, fault, ends_with, words
):
    client = Client()
    engine = engine_of(*rank_of_one(), client)
    engine.submit(request(3))

    def fail():
        raise fault

    monkeypatch.setattr(engine._experts, "loads", fail)
    with pytest.raises(ends_with, match=words) as ended:
        engine.run()
    assert type(ended.value) is ends_with
    assert not client.tokens


def test_logits_that_are_no_numbers_end_the_rank_and_say_so(rank_of_one):
    core, held = rank_of_one()
    core.model.norm.weight.data.fill_(float("nan"))
    engine = engine_of(core, held, Client())
    engine.submit(request(1))
    with pytest.raises(WorkerError, match="step 1: logits of row 0 are NaN"):
        engine.run()
