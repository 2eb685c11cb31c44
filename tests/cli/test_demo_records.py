import pytest

from equipoise.cli.demo.records import switches_of, windows_of
from equipoise_api.v1 import status_pb2


def test_windows_come_in_the_order_they_closed_and_empty_ones_are_left_out():
    told = [
        status_pb2.WindowStatus(
            closed_unix_s=8.0, balancedness=0.5, max_over_mean=2.1, assignments=10, generation=2
        ),
        status_pb2.WindowStatus(
            closed_unix_s=4.0, balancedness=0.9, max_over_mean=1.1, assignments=10, generation=1
        ),
        status_pb2.WindowStatus(closed_unix_s=1.0, balancedness=1.0, assignments=0),
    ]
    assert [tuple(w) for w in windows_of(told)] == [
        (4.0, 0.9, 1.1, 1),
        (8.0, 0.5, 2.1, 2),
    ]


def test_a_switch_spans_its_staging_and_the_word_of_the_last_rank():
    (switch,) = switches_of(
        [
            status_pb2.SwitchStatus(
                generation=3,
                max_stall_us=1500,
                median_step_us=40_000,
                moves=7,
                staging_s=2.0,
                time_unix_s=100.0,
            )
        ]
    )
    assert switch.span.to_s == 100.0
    assert switch.span.from_s < 98.0
    assert (switch.stall_ms, switch.median_step_ms) == pytest.approx((1.5, 40.0))
