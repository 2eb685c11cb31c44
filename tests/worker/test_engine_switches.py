"""Ranks agree before a step when to switch, and switching changes no token."""

import pytest

from equipoise.rank.errors import GroupError
from equipoise.worker.group import RankGroup
from tests.support.lone_engine import PROMPTS, Client, engine_of, leave_when_done, request


@pytest.mark.parametrize("shared_as_routed", [False, True])
def test_switching_in_every_other_step_changes_no_token(
    rank_of_one, staged_from_checkpoint, random_layout, solo, shared_as_routed
):
    core, held = rank_of_one(shared_as_routed=shared_as_routed)
    num_experts = 9 if shared_as_routed else 8

    def then(engine, result):
        if len(client.finished) == len(PROMPTS):
            engine.leave()
        elif result.switch is None:
            layout = random_layout(engine.generation + 1, num_experts=num_experts)
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
    log = {result.step: result.generation for result in client.results}
    assert client.switches
    for switch in client.switches:
        assert log[switch.step] == switch.generation
        assert log[switch.step - 1] == switch.generation - 1
        assert switch.median_step_us > 0


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


def test_an_offer_from_a_past_generation_is_rejected(
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
    assert {result.generation for result in client.results} == {1}


class TwoRanks(RankGroup):
    """Exchanges this rank's header with a second rank's, which a script derives from it."""

    def __init__(self, script):
        super().__init__(epoch=1, rank=0, names=("a", "b"))
        self.script = script

    def exchange(self, header):
        return (header, self.script(header))


def test_a_generation_dropped_after_the_deciding_header_is_still_switched_to(
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
        return header if ready else header._replace(staged_generation=0, staged_digest=0)

    client = Client(lambda engine, result: engine.leave())
    engine = engine_of(core, held, client, group=TwoRanks(script))
    engine.offer(staged_from_checkpoint(core, held.contents.layout, random_layout(2)))
    engine.run()
    assert steps[:6] == [1, 1, 1, 1, 1, 2]


def test_a_peer_that_staged_another_layout_under_the_number_is_rejected_and_serving_continues(
    rank_of_one, staged_from_checkpoint, random_layout
):
    core, held = rank_of_one()
    peers_digest = 7

    def script(header):
        return header._replace(staged_digest=header.staged_digest and peers_digest)

    client = Client(lambda engine, result: engine.leave())
    engine = engine_of(core, held, client, group=TwoRanks(script))
    engine.offer(staged_from_checkpoint(core, held.contents.layout, random_layout(2)))
    engine.run()
    assert engine.generation == 1
    assert engine.staged_generation == 0
    rejected = client.results[0].rejected
    assert (rejected.epoch, rejected.rank, rejected.generation) == (1, 0, 2)
    assert "b: 0000000000000007" in rejected.reason


def test_a_peer_that_runs_another_layout_under_the_number_ends_the_run(rank_of_one):
    core, held = rank_of_one()
    group = TwoRanks(lambda header: header._replace(layout_digest=header.layout_digest ^ 1))
    engine = engine_of(core, held, Client(), group=group)
    with pytest.raises(GroupError, match="disagree about the layout of generation 1"):
        engine.run()


def test_ranks_that_disagree_end_the_run(rank_of_one):
    core, held = rank_of_one()
    group = TwoRanks(lambda header: header._replace(step=header.step + 1))
    engine = engine_of(core, held, Client(), group=group)
    with pytest.raises(GroupError, match="disagree about the step"):
        engine.run()
