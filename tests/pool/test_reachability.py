"""Who is at fault that ranks did not meet, from what each reports about its peers."""

import itertools

import numpy as np
import pytest

from equipoise.pool.member import Member
from equipoise.pool.reachability import Reachability, find_unreachable, process_of
from tests.support.scripted_worker import make_hello


def found(reports, *, ranks="abcd", earlier=()):
    """Reports are words: the rank, then the peers that it could not connect to.

    Those of `earlier` say that after a colon, or of all ranks.
    """

    def row(named):
        return np.array([name in named for name in ranks])

    return "".join(
        find_unreachable(
            list(ranks),
            {one[0]: row(one[1:]) for one in reports.split()},
            earlier=[
                (row(one.partition(":")[0]), row(one.partition(":")[2] or ranks)) for one in earlier
            ],
        ).workers
    )


@pytest.mark.parametrize(
    ("reports", "culprits"),
    [
        ("a b cb db", "b"),  # No peer reaches it, but it reaches its peers.
        ("ab bacd cb db", "b"),  # Nor does it reach them.
        ("ab cb", "b"),  # Neither it nor a third rank has reported yet.
        ("ab b cb d", "b"),
        ("abc b cb dbc", "bc"),
        ("ab b c d", "a"),  # One accuser, whom two others contradict.
        ("abcd b c d", "a"),
        ("ab b", ""),  # One word against another.
        ("ab ba c d", "a"),  # Both ends of a broken link: one of them has to go.
        ("abc ba ca d", "a"),
        ("acd bcd cab dab", ""),  # Split in halves: all ranks are.
        ("abcd bacd cabd dabc", ""),
        ("a b c d", ""),
        ("ax b c d", ""),
        ("", ""),
    ],
)
def test_most_of_those_that_tried_decide(reports, culprits):
    assert found(reports) == culprits


def test_in_a_larger_group_two_liars_do_not_outvote_those_that_reached_their_victim():
    assert found("ac bc c d e", ranks="abcde") == "a"
    assert found("c dc ec", ranks="cde") == "c", "with more accusers than others it is excluded"


def test_what_a_worker_reported_in_another_group_counts_only_against_a_peer():
    assert found("a ba", ranks="ab") == "", "one accuser alone"
    assert found("a ba", ranks="ab", earlier=["a"]) == "a"
    assert found("a ba", ranks="ab", earlier=["b"]) == ""
    assert found("a b", ranks="ab", earlier=["a", "a"]) == "", "a rank that is reached now"


def test_if_no_rank_reports_those_before_decide_and_contradict_each_other():
    assert found("", earlier=["a"]) == "", "one accuser alone"
    assert found("", earlier=["a", "a"]) == "a"
    assert found("", earlier=["a", "a", "", ""]) == ""
    assert found("", ranks="abcde", earlier=["a", "a"]) == "", "most ranks did not report"
    assert found("", ranks="ab", earlier=["ab", "ab"]) == "", "all ranks are"
    assert found("", ranks="ab", earlier=["a", "a", ":b", ":b"]) == "a", "groups without it"


@pytest.mark.parametrize("num_ranks", [3, 4, 5])
def test_no_single_liar_has_another_rank_excluded(num_ranks):
    ranks = "abcde"[:num_ranks]
    others = ranks[1:]
    for size in range(1, num_ranks):
        for named in itertools.combinations(others, size):
            reports = " ".join(["a" + "".join(named), *others])
            assert found(reports, ranks=ranks) == "a", reports


def member(name, boot="1"):
    return Member(hello=make_hello(name, boot_id=boot), last_heard_s=0, since_s=0)


class Group:
    """Workers of one epoch after another, and what they remember of each other."""

    def __init__(self):
        self.reachability = Reachability()

    def fail(self, ranks, reports):
        """Ranks report that their group did not form; returns who is blamed."""
        reporters = [one[0] for one in reports.split()]
        for one in reports.split():
            processes = tuple(map(process_of, ranks))
            self.reachability.note(one[0], set(one[1:]), ranks=processes, known="abcd")
        return "".join(self.reachability.blame(ranks, reporters=reporters).workers)


def test_accusers_of_several_epochs_add_up_until_a_group_serves_or_the_accused_restarts():
    a, b, c = map(member, "abc")
    group = Group()
    assert group.fail([a, b], "a ba") == ""
    assert group.fail([a, c], "a ca") == "a"
    group.reachability.note_serving([a, b])
    assert group.fail([a, c], "a ca") == ""
    assert group.fail([a, b], "a ba") == "a"
    again = member("a", boot="2")
    assert group.fail([again, b], "a ba") == "", "another process, which only b has tried"
    assert group.fail([again, c], "a ca") == "a"


def test_no_worker_contradicts_those_that_tried_a_rank_which_was_not_its_peer():
    a, b, c, d = map(member, "abcd")
    group = Group()
    group.fail([d, b, c], "d")
    group.fail([a, b], "a ba")
    group.fail([a, c], "a ca")
    hanging = group.reachability.blame([a, b], reporters=())
    assert hanging.workers == ("a",)


def test_names_that_are_not_peers_say_nothing_and_only_known_workers_are_remembered():
    a, b = map(member, "ab")
    group = Group()
    assert group.fail([a, b], "aaxyz b") == ""
    assert not any(report.unreached.any() for report in group.reachability._reports.values())
    ranks = (process_of(a), process_of(b))
    for number in range(100):
        group.reachability.note(f"w-{number}", {"a"}, ranks=ranks, known={"a", f"w-{number}"})
    assert set(group.reachability._reports) == {"a", "w-99"}
