"""The soak's judgement of growth, and which processes its faults spare."""

import pytest

from tests.support.chaos.plan import Kind
from tests.support.chaos.soak import MORTAL, Sample, growths, run_of


def samples(values, *, pid=lambda _: 7):
    return [
        Sample(
            name="gateway",
            pid=pid(number),
            at_s=number,
            resident_mib=value,
            descriptors=10,
            threads=3,
            children=0,
        )
        for number, value in enumerate(values)
    ]


def test_memory_that_grows_all_the_time_is_reported_and_a_warm_up_is_not():
    leaking = {one.figure: one.grew for one in growths(samples(range(100, 180)))}
    assert leaking == {
        "resident_mib": True,
        "descriptors": False,
        "threads": False,
        "children": False,
    }
    warming = [*range(100, 120), *[120] * 60]
    assert not any(one.grew for one in growths(samples(warming)))


def test_a_process_that_was_replaced_is_not_judged():
    assert not list(growths(samples(range(100, 180), pid=lambda number: number // 40)))


def test_a_soak_that_is_too_short_is_rejected():
    with pytest.raises(ValueError, match="7 samples of gateway are too few"):
        list(growths(samples(range(7))))


def test_only_one_worker_is_ever_killed():
    for seed in range(300):
        for fault in run_of(seed).faults:
            assert fault.kind not in {Kind.BALANCER_KILLED, Kind.FOLLOWER_KILLED}
            if fault.kind in {Kind.WORKER_KILLED, Kind.WORKER_STOPPED}:
                assert fault.victim == MORTAL
