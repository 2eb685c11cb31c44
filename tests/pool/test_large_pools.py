"""What a message costs grows with the number of workers of its pool, not with its square.

Nothing is timed: the names of workers and nodes count how often they are looked at.
"""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.planning.expert_needs import ExpertNeeds
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.membership import EpochCandidate, MemberState, next_epoch
from equipoise.planning.policy import Policy
from equipoise.planning.resumption import RunningClaim, choose_group
from equipoise.pool.counters import Rejections
from equipoise.pool.member import Member
from equipoise.pool.members import Roster
from equipoise.pool.quarantine import Quarantine
from equipoise.pool.reachability import Reachability, process_of
from equipoise.wire.messages import RunningState
from tests.support.scripted_worker import make_hello

FEW, MANY = 64, 128


class Name(str):
    """A name that counts how often any of them is hashed or compared."""

    __slots__ = ()
    looks = 0

    def __hash__(self):
        Name.looks += 1
        return super().__hash__()

    def __eq__(self, other):
        Name.looks += 1
        return super().__eq__(other)


def names(number, stem="w"):
    return tuple(Name(f"{stem}-{place:04d}") for place in range(number))


def assert_linear(work_of):
    """`work_of` a number of workers returns the work to count."""
    counted = []
    for number in (FEW, MANY):
        work = work_of(number)
        Name.looks = 0
        work()
        counted.append(Name.looks)
    assert 0 < counted[1] <= 2.5 * counted[0], counted


def claims_of(workers, *, epoch, digest=b"a"):
    return [
        RunningClaim(worker=one, epoch=epoch, workers=workers, generation=1, digest=digest)
        for one in workers
    ]


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("other_epoch", [2, 3])
def test_choosing_the_group_to_take_over(is_recorded, other_epoch):
    def work_of(number):
        ours, others = names(number), names(number, "x")
        recorded = (2, ours) if is_recorded else (0, ())
        claims = [
            *claims_of(ours, epoch=2),
            *claims_of(others[:-1], epoch=other_epoch),
            *claims_of((*ours[1:], others[-1]), epoch=2)[-1:],
        ]

        def work():
            choice = choose_group(
                claims,
                recorded=recorded,
                connected=frozenset((*ours, *others)),
                num_opposed=0,
                known={},
                waited_s=1e6,
                policy=Policy(),
            )
            assert len(choice.ranks) == number
            assert len(choice.contradicting) == number
            assert len(choice.reason) < 500, "a few are named"

        return work

    assert_linear(work_of)


def test_leaving_out_ranks_that_are_late(monkeypatch):
    compared = []
    monkeypatch.setattr(
        EpochCandidate, "__eq__", lambda one, other: compared.append(1) or one is other
    )
    late, in_time = (
        [
            EpochCandidate(name=name, state=MemberState.JOINING, since_s=since_s)
            for name in names(FEW, stem)
        ]
        for stem, since_s in (("late", 0.0), ("new", 1e5))
    )
    opening = next_epoch(
        [*late, *in_time],
        num_ranks=2 * FEW,
        needs=ExpertNeeds(num_experts=8, num_layers=1, slots_per_rank=8),
        unheard=frozenset(),
        is_on_record=True,
        is_rolling_out=False,
        policy=Policy(),
        now=1e5,
    )
    assert len(opening.left_out) == len(opening.workers) == FEW
    assert not compared


def roster_of(number, **changes):
    roster = Roster("tiny")
    for place, name in enumerate(names(number)):
        hello = make_hello(name, num_ranks=number, node=Name(f"node-{place}"), **changes)
        roster.admit(hello, now=0.0)
    return roster


def test_opening_an_epoch_of_ranks_that_each_have_a_node():
    def work_of(number):
        roster = roster_of(number)
        workers = frozenset(roster.members)

        def work():
            roster.open_epoch(workers, no_hosts=(), left_out=None, now=0.0)
            assert len(roster.seated()) == number

        return work

    assert_linear(work_of)


def test_finding_a_rank():
    class Counted(Member):
        looks = 0

        def __getattribute__(self, field):
            Counted.looks += field == "rank"
            return super().__getattribute__(field)

    roster = roster_of(MANY)
    roster.open_epoch(frozenset(roster.members), no_hosts=(), left_out=None, now=0.0)
    roster._seated = tuple(
        Counted(hello=one.hello, last_heard_s=0.0, since_s=0.0, rank=one.rank)
        for one in roster.seated()
    )
    for rank in (0, 1, MANY - 1):
        Counted.looks = 0
        assert roster.name_at(rank) == roster.seated()[rank].name
        assert Counted.looks <= 10


def test_telling_which_workers_serve_in_a_group_of_their_own():
    def work_of(number):
        roster = roster_of(FEW)
        roster.open_epoch(frozenset(roster.members), no_hosts=(), left_out=None, now=0.0)
        others = names(number, "x")
        layout = contiguous_layout(
            num_layers=3, num_experts=32, num_ranks=number, slots_per_rank=12
        )
        for rank, name in enumerate(others):
            hello = make_hello(name)
            member = Member(hello=hello, last_heard_s=0.0, since_s=0.0)
            member.note_claim(
                RunningState(
                    epoch=1,
                    rank=rank,
                    workers=others,
                    staged_generation=0,
                    layout=layout,
                    checksums=np.zeros((3, 12, 16), dtype=np.uint8),
                )
            )
            roster._members[str(name)] = member

        def work():
            found = roster.candidates((), excluded={}, quarantined={})
            assert sum(one.holds for one in found) == number

        return work

    assert_linear(work_of)


def test_noting_what_a_rank_could_not_reach():
    def work_of(number):
        ranks = [
            Member(hello=make_hello(name), last_heard_s=0.0, since_s=0.0) for name in names(number)
        ]
        unreached = tuple(one.name for one in ranks[1:])
        reachability = Reachability()

        def work():
            reachability.note(
                ranks[0].name,
                unreached,
                ranks=tuple(map(process_of, ranks)),
                known=(ranks[0].name,),
            )

        return work

    assert_linear(work_of)


def test_quarantining_all_workers_at_once():
    def work_of(number):
        roster = roster_of(number)
        for place, (name, member) in enumerate(roster.members.items()):
            member.hello = replace(member.hello, slots_per_rank=12 + place % 2)
            assert member.name == name
        quarantine = Quarantine(roster=roster, rejections=Rejections())

        def work():
            assert len(quarantine.follow_majority(now=0.0)) == 2 * number

        return work

    assert_linear(work_of)
