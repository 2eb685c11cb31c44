from dataclasses import replace

import pytest
from rich.console import Console

from equipoise.cli.demo.result import Latency
from equipoise.cli.demo.view import (
    LiveScreen,
    Mark,
    PlainScreen,
    Scene,
    balance_chart,
    decision_line,
    open_screen,
    picture,
)
from equipoise_api.v1 import status_pb2

YES = status_pb2.Decision(
    sequence=1, accepted=True, reason="0.97 instead of 0.61 on the latest window", moves=12
)
NO = status_pb2.Decision(sequence=2, accepted=False, reason="it would gain 0.004")
WINDOWS = [
    status_pb2.WindowStatus(
        closed_unix_s=float(i), balancedness=1 / value, max_over_mean=value, generation=i
    )
    for i, value in enumerate((1.6, 1.1, 1.9, 1.05))
]
SCENE = Scene(
    elapsed_s=41.0,
    activity="arithmetic traffic",
    status=status_pb2.PoolStatus(
        pool="demo",
        ranks=[
            status_pb2.RankStatus(rank=rank, node="node-0", state="connected", load_share=0.25)
            for rank in range(4)
        ],
        rollout=status_pb2.RolloutStatus(generation=7, state="staging"),
    ),
    windows=WINDOWS,
    decisions=[YES, NO],
    marks=[Mark(at_s=-1.0, domain="code"), Mark(at_s=1.5, domain="arithmetic")],
    tokens_per_s=512.3,
    latency=Latency(p50_ms=40.2, p95_ms=60.0, p99_ms=90.8, samples=100),
    requests=321,
    failed_requests=0,
    tokens_compared=12345,
    tokens_identical=12345,
    references_ready=96,
    references_total=96,
    memory_bytes=3 * 2**30,
)


def printed(renderable) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def plain_lines(*scenes: Scene) -> list[str]:
    console = Console(width=60, force_terminal=False)
    with console.capture() as capture:
        screen = PlainScreen(console)
        for scene in scenes:
            screen.show(scene)
    return capture.get().splitlines()


def test_the_picture_shows_balance_traffic_rollout_and_decisions():
    text = printed(picture(SCENE))
    for part in (
        "arithmetic traffic",
        "1.05",
        "512 tokens/s",
        "p50 40",
        "p99 91",
        "0 failed",
        "12,345 of 12,345 tokens identical",
        "rollout of generation 7: staging",
        "decision 1: yes, 12 moves: 0.97 instead of 0.61",
        "decision 2: no: it would gain 0.004",
    ):
        assert part in text


def test_the_picture_can_be_drawn_before_anything_is_known():
    bare = replace(SCENE, status=None, windows=[], decisions=[], marks=[], references_ready=16)
    assert "16 of 96 prompts" in printed(picture(bare))


def test_the_chart_rises_with_imbalance_and_names_domains_where_they_begin():
    bars, names = printed(balance_chart(WINDOWS, SCENE.marks)).splitlines()[:2]
    chart = bars.removeprefix("rank max/mean  ")
    assert chart[2] > chart[0] > chart[1] >= chart[3]
    begins = names.index("arithmetic") - 1
    assert begins == len("rank max/mean  ") + 2
    assert names[len("rank max/mean  ")] == "└"


def test_the_chart_keeps_to_the_newest_windows():
    many = [
        status_pb2.WindowStatus(
            closed_unix_s=float(i), balancedness=0.9, max_over_mean=1.1, generation=1
        )
        for i in range(500)
    ]
    assert max(map(len, printed(balance_chart(many, SCENE.marks)).splitlines())) < 100


def test_plain_lines_come_once_a_window_and_once_a_decision():
    lines = plain_lines(SCENE, SCENE)
    assert [line.split()[2] for line in lines] == ["decision", "decision", "arithmetic"]
    assert "rank max/mean 1.05  generation 3  512 tokens/s" in lines[-1]


def test_a_plain_line_is_never_broken_and_never_read_as_markup():
    marked = status_pb2.Decision(sequence=3, reason="layers [0, 3] are worse")
    (line,) = plain_lines(replace(SCENE, decisions=[marked], marks=[]))
    assert line.endswith("no: layers [0, 3] are worse")


def test_windows_from_before_the_traffic_are_not_printed():
    assert plain_lines(replace(SCENE, decisions=[], marks=[])) == []


def test_a_decision_mentions_a_traffic_shift():
    assert "traffic shift" in decision_line(status_pb2.Decision(sequence=4, shift_detected=True))


@pytest.mark.parametrize(
    ("terminal", "plain", "kind"),
    [(True, False, LiveScreen), (True, True, PlainScreen), (False, False, PlainScreen)],
)
def test_the_live_picture_is_for_terminals(terminal, plain, kind, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = Console(force_terminal=terminal)
    with console.capture(), open_screen(console, plain=plain) as screen:
        assert isinstance(screen, kind)


def test_messages_scroll_by_above_the_live_picture(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = Console(width=120, force_terminal=True)
    with console.capture() as capture, open_screen(console, plain=False) as screen:
        screen.show(SCENE)
        screen.say("traffic shifts from [code] to arithmetic", at_s=41.0)
    assert "traffic shifts from [code] to arithmetic" in capture.get()
